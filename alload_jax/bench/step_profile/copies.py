"""Says what a kernel copies that computes nothing.

XLA copies slices into and out of a scan's stacks on streams of their own. The text of a program
has such a copy as `fusion-start.3`, a profile as `loop_dynamic_update_slice_fusion.34`: the fusion
that the start wraps, in a computation that the text leaves out. XLA numbers both in one order.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from alload_jax.bench.step_profile.hlo import Array, Computation, Instruction, Program

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
    for name, (each, _) in sorted(program.executed.items(), key=lambda item: _number(item[0])):
        if each.opcode == _START:
            opcodes = {inner.opcode for inner, _ in program.within(each)}
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


def tensor(program: Program, instruction: Instruction, computation: Computation) -> str:
    """Type and shape of what is copied, and where it comes from if it goes to a stack."""
    inside = [*program.within(instruction), (instruction, computation)]
    for opcode in (UPDATE, SLICE):
        for each, place in inside:
            if each.opcode == opcode and each.operands:
                moved = place.get(each.operands[1]) if opcode == UPDATE else each
                if moved is not None and moved.arrays:
                    source = _source(moved, instruction, computation) if opcode == UPDATE else ""
                    return _type(moved.arrays[0]) + (f" of {source}" if source else "")
    arrays = [each for each in instruction.arrays if each.size]
    more = f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
    return _type(max(arrays, key=lambda each: each.bytes)) + more if arrays else ""


def _source(update: Instruction, instruction: Instruction, computation: Computation) -> str:
    """The operation that computed what a fusion writes into a stack; "" if unknown."""
    operands = (computation[name] for name in instruction.operands[1:] if name in computation)
    for each in operands:
        if each.arrays and each.arrays[0].size == update.size:
            producer: Instruction | None = each
            while producer and not producer.op_name and producer.opcode in _VIEWS:
                producer = computation.get(producer.operands[0])
            words = producer.op_name.split("/") if producer else []
            return "/".join(words[-_WORDS:])
    return ""


def _type(array: Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
