"""Reads the text of a compiled XLA program: its instructions, their names, copies among them.

XLA copies slices into and out of a scan's stacks on streams of their own. The text of a program
has such a copy as `fusion-start.3`, a profile as `loop_dynamic_update_slice_fusion.34`: the fusion
that the start wraps, in a computation that the text leaves out. XLA numbers both in one order.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<opcode>[\w\-]+)"
    r"\((?P<operands>[^)]*)\)?(?P<attributes>.*)"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_WITHOUT_BYTES = ("token", "opaque")


@dataclass(frozen=True)
class Array:
    """An array's type. dtype: as XLA writes it, such as bf16."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """Bytes of its elements."""
        if self.dtype in _WITHOUT_BYTES:
            return 0
        if self.dtype == "pred":
            return self.size
        return self.size * int(re.findall(r"\d+", self.dtype)[0]) / 8


@dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      name: unique in its program.
      opcode: as XLA writes it, such as `fusion`.
      arrays: its results; several for a tuple.
      operands: the instructions whose results it takes.
      called: the computation that a fusion or a call computes; empty for none.
      op_name: names of JAX's operations and scopes that it is for; "" if unknown.
      target: of a custom call; otherwise "".
      attributes: the text behind the operands.
      is_root: whether its result is that of its computation.
      uses: the instructions that take its result, each with the place among its operands.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple["Instruction", ...] = field(repr=False)
    called: Sequence["Instruction"] = field(repr=False)
    op_name: str
    target: str
    attributes: str
    is_root: bool
    uses: list[tuple["Instruction", int]] = field(default_factory=list, repr=False)

    @property
    def size(self) -> int:
        """Elements of all results."""
        return sum(array.size for array in self.arrays)

    @property
    def bytes(self) -> float:
        """Bytes of all results."""
        return sum(array.bytes for array in self.arrays)

    def operand(self, place: int) -> Array | None:
        """The first result of an operand; None if there is none."""
        found = self.operands[place : place + 1]
        return found[0].arrays[0] if found and found[0].arrays else None

    def within(self) -> Iterator["Instruction"]:
        """The instructions that a fusion or an asynchronous call computes, at any depth."""
        for each in self.called:
            yield each
            yield from each.within()


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      name: of its module, such as jit_update.
      executed: each instruction that can have a kernel of its own, by name; those within fusions
        and reducers have none.
    """

    name: str
    executed: Mapping[str, Instruction]


def read_program(text: str) -> Program:
    """Reads a program as `jax.stages.Compiled.as_text` writes it.

    Raises:
      ValueError: the text is no program of XLA.
    """
    module = _MODULE.match(text)
    if module is None:
        raise ValueError(f"HLO text begins with {text[:40]!r}; it must begin with 'HloModule'")
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    fused: set[str] = set()
    for line in text.splitlines():  # what is used or called stands before
        if found := _INSTRUCTION.match(line):
            called = _CALLED.search(found["attributes"])
            inner = computations.get(called[1], {}) if called else {}
            current[found["name"]] = _instruction(found, current, [*inner.values()])
            if called and found["opcode"] not in ("call", "async-start"):
                fused.add(called[1])
        elif opened := _COMPUTATION.fullmatch(line):
            current = computations.setdefault(opened[1], {})
    executed = {
        name: each
        for place, computation in computations.items()
        if place not in fused
        for name, each in computation.items()
    }
    return Program(module[1], executed)


def _instruction(
    found: re.Match[str], known: Mapping[str, Instruction], called: Sequence[Instruction]
) -> Instruction:
    attributes = found["attributes"]

    def first(pattern: re.Pattern[str]) -> str:
        named = pattern.search(attributes)
        return named[1] if named else ""

    arrays = (
        Array(dtype, tuple(int(size.lstrip("<=")) for size in shape.split(",") if size))
        for dtype, shape in _ARRAY.findall(found["type"])
    )
    names = _OPERAND.findall(found["operands"])
    instruction = Instruction(
        name=found["name"],
        opcode=found["opcode"],
        arrays=tuple(arrays),
        operands=tuple(known[name] for name in names if name in known),
        called=called,
        op_name=first(_OP_NAME),
        target=first(_TARGET),
        attributes=attributes,
        is_root=bool(found["root"]),
    )
    for place, operand in enumerate(instruction.operands):
        operand.uses.append((instruction, place))
    return instruction


UPDATE, SLICE = "dynamic-update-slice", "dynamic-slice"
_START = "fusion-start"
_WRAPPED = re.compile(r"loop_(dynamic_(?:update_)?slice)_fusion(?:\.\d+)?")
_FILLS = {"broadcast", "bitcast", "copy", "reshape", "transpose"}
_VIEWS = ("bitcast", "get-tuple-element", "reshape", "copy")
_WORDS = 3
"""Words of an operation's name that say what a tensor is."""


def kind(opcodes: Collection[str], step_pass: str) -> str:
    """The kind of a copy, by the instructions of its kernel and the pass that it is in."""
    if UPDATE in opcodes:
        kept = {"forward": "kept tensors ", "backward": "gradients ", "recomputed": "gradients "}
        return f"{kept.get(step_pass, '')}into the scan's stacks"
    if "broadcast" in opcodes and _FILLS.issuperset(opcodes):
        return "zeros and broadcasts"
    if "convert" in opcodes:
        return "casts"
    if SLICE in opcodes:
        return "out of the scan's stacks"
    return "slices" if "gather" in opcodes else "layout"


def kind_by_name(name: str) -> str:
    """The kind of a copy to or from a stack, by the name in a profile; "" for other names."""
    found = _WRAPPED.fullmatch(name)
    return kind([found[1].replace("_", "-")], "") if found else ""


def wrapping_starts(program: Program, names: Iterable[str]) -> dict[str, str]:
    """The instruction that starts each asynchronous copy, by the name that a profile shows.

    Args:
      program: the compiled program.
      names: of instructions in a profile of it; those of `program` are passed over.
    """
    shown: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*names} - program.executed.keys(), key=_number):
        if found := _WRAPPED.fullmatch(name):
            shown[found[1].replace("_", "-")].append(name)
    starts: dict[str, list[str]] = defaultdict(list)
    for name in sorted(program.executed, key=_number):
        if program.executed[name].opcode == _START:
            opcodes = {inner.opcode for inner in program.executed[name].within()}
            starts[UPDATE if UPDATE in opcodes else SLICE].append(name)
    # Where their numbers differ, an order says nothing.
    return {
        name: start
        for opcode, found in shown.items()
        if len(found) == len(starts[opcode])
        for name, start in zip(found, starts[opcode], strict=True)
    }


def _number(name: str) -> int:
    """What XLA appended to a name; -1 for the first."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdecimal() else -1


def tensor(instruction: Instruction) -> str:
    """Type and shape of what is copied, and where it comes from if it goes to a stack."""
    inside = [*instruction.within(), instruction]
    for each in inside:
        if each.opcode == UPDATE and (moved := each.operand(1)):
            source = _source(moved, instruction)
            return f"{moved} of {source}" if source else f"{moved}"
    for each in inside:
        if each.opcode == SLICE and each.operands and each.arrays:
            return f"{each.arrays[0]}"
    arrays = [each for each in instruction.arrays if each.size]
    more = f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
    return f"{max(arrays, key=lambda each: each.bytes)}{more}" if arrays else ""


def _source(update: Array, instruction: Instruction) -> str:
    """The operation that computed what a fusion writes into a stack; "" if unknown."""
    for producer in instruction.operands[1:]:
        if producer.arrays and producer.arrays[0].size == update.size:
            while not producer.op_name and producer.opcode in _VIEWS and producer.operands:
                producer = producer.operands[0]
            return "/".join(producer.op_name.split("/")[-_WORDS:])
    return ""
