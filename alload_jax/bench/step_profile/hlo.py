"""Reads the text of a compiled XLA program: its instructions, their shapes and their names."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
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


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      name: unique in its program.
      opcode: as XLA writes it, such as `fusion`.
      arrays: its results; several for a tuple.
      operands: names of instructions of the same computation.
      called: the computation that a fusion or a call computes; "" for none.
      op_name: names of JAX's operations and scopes that it is for; "" if unknown.
      target: of a custom call; otherwise "".
      attributes: the text behind the operands.
      is_root: whether its result is that of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: str
    op_name: str
    target: str
    attributes: str
    is_root: bool

    @property
    def size(self) -> int:
        """Elements of all results."""
        return sum(array.size for array in self.arrays)

    @property
    def bytes(self) -> float:
        """Bytes of all results."""
        return sum(array.bytes for array in self.arrays)


Computation = Mapping[str, Instruction]
"""Instructions by name, in the order in which they are written."""


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      name: of its module, such as jit_update.
      computations: by name.
    """

    name: str
    computations: Mapping[str, Computation]

    @cached_property
    def executed(self) -> Mapping[str, tuple[Instruction, Computation]]:
        """Each instruction that can have a kernel of its own, with its computation.

        Instructions within fusions and reducers have none.
        """
        fused = {
            each.called
            for computation in self.computations.values()
            for each in computation.values()
            if each.opcode not in ("call", "async-start")
        }
        return {
            name: (each, computation)
            for place, computation in self.computations.items()
            if place not in fused
            for name, each in computation.items()
        }

    def within(self, instruction: Instruction) -> Iterator[tuple[Instruction, Computation]]:
        """The instructions that a fusion or an asynchronous call computes, at any depth."""
        computation = self.computations.get(instruction.called, {})
        for each in computation.values():
            yield each, computation
            yield from self.within(each)


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
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            each = _instruction(found[2], line[found.end() :], is_root=bool(found[1]))
            current[each.name] = each
        elif opened := _COMPUTATION.fullmatch(line):
            current = computations.setdefault(opened[1], {})
    return Program(module[1], computations)


def _instruction(name: str, text: str, *, is_root: bool) -> Instruction:
    """text: what stands behind the equals sign."""
    kind, rest = _split_type(text)
    opcode, _, rest = rest.partition("(")
    end = _closing(rest)
    attributes = rest[end + 1 :]

    def first(pattern: re.Pattern[str]) -> str:
        found = pattern.search(attributes)
        return found[1] if found else ""

    return Instruction(
        name=name,
        opcode=opcode.strip(),
        arrays=tuple(_arrays(kind)),
        operands=tuple(_OPERAND.findall(rest[:end])),
        called=first(_CALLED),
        op_name=first(_OP_NAME),
        target=first(_TARGET),
        attributes=attributes,
        is_root=is_root,
    )


def _split_type(text: str) -> tuple[str, str]:
    """The type that a text begins with, and what follows it."""
    if text.startswith("("):
        end = _closing(text[1:]) + 2
        return text[:end], text[end:].lstrip()
    kind, _, rest = text.partition(" ")
    return kind, rest


def _closing(text: str) -> int:
    """Place of the parenthesis that closes one opened before the text."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    return len(text)


def _arrays(kind: str) -> Iterator[Array]:
    for dtype, shape in _ARRAY.findall(kind):
        yield Array(dtype, tuple(int(size.lstrip("<=")) for size in shape.split(",") if size))
