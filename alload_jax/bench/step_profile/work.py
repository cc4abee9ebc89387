"""Counts the FLOPs of an instruction of a compiled program, and the bytes that it must move."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from alload_jax.bench.step_profile.hlo import Array, Computation, Instruction, Program

_LHS_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_BACKEND_CONFIG = re.compile(r"backend_config=(?=\{)")
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "get-tuple-element", "reshape")
FUSED_ATTENTION = "__cudnn$fmha"
"""Begins the targets of custom calls of cuDNN's fused attention."""
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
"""Products of [S, head_dim] by [head_dim, T], or of that size, that attention needs."""


class AttentionCall(NamedTuple):
    """Shape of a call of fused attention: rows, queries, keys, heads, width of a head."""

    rows: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    backward: bool

    @property
    def flops(self) -> float:
        """Of the products that it needs; a multiply-add counts as two."""
        products = _BACKWARD_PRODUCTS if self.backward else _FORWARD_PRODUCTS
        pairs = self.rows * self.heads * self.queries * self.keys
        return 2.0 * products * pairs * self.head_dim


def is_product(instruction: Instruction) -> bool:
    """Whether it is a matrix product by itself."""
    return instruction.opcode == "dot" or instruction.target.startswith("__cublas")


def flops_of(program: Program, instruction: Instruction, computation: Computation) -> float:
    """FLOPs of its matrix products, those within a fusion included."""
    attention = attention_call(program, instruction, computation)
    if attention is not None:
        return attention.flops
    inner = sum(_product_flops(each, place) for each, place in program.within(instruction))
    return inner + _product_flops(instruction, computation)


def attention_call(
    program: Program, instruction: Instruction, computation: Computation
) -> AttentionCall | None:
    """The shape of its call of cuDNN's fused attention; None if it has none.

    JAX's layouts: operands [B, S, N, H]; the output, or the first gradient, [B, N, S, H].
    """
    for each, place in program.within(instruction):
        found = attention_call(program, each, place)
        if found is not None:
            return found
    if not instruction.target.startswith(FUSED_ATTENTION):
        return None
    query, key = (_result(name, computation) for name in instruction.operands[:2])
    if query is None or key is None or len(instruction.arrays[0].shape) != 4:
        return None
    rows, heads, queries, head_dim = instruction.arrays[0].shape
    keys = key.size // (rows * heads * head_dim)
    backward = "Backward" in instruction.target
    return AttentionCall(rows, queries, keys, heads, head_dim, backward)


def _product_flops(instruction: Instruction, computation: Computation) -> float:
    if not is_product(instruction):
        return 0.0
    left = _result(instruction.operands[0], computation) if instruction.operands else None
    if left is None:
        return 0.0
    inner = math.prod(left.shape[axis] for axis in _contracted(instruction))
    return 2.0 * instruction.arrays[0].size * inner


def _contracted(instruction: Instruction) -> list[int]:
    """Axes of the left operand that a product sums over."""
    if instruction.opcode == "dot":
        found = _LHS_CONTRACTED.search(instruction.attributes)
        return [int(axis) for axis in found[1].split(",") if axis] if found else []
    config = _BACKEND_CONFIG.search(instruction.attributes)
    content: dict[str, Any] = {}
    if config:
        content, _ = json.JSONDecoder().raw_decode(instruction.attributes, config.end())
    numbers = content.get("gemm_backend_config", content).get("dot_dimension_numbers", {})
    return [int(axis) for axis in numbers.get("lhs_contracting_dimensions", [])]


def moved_bytes(program: Program, instruction: Instruction, computation: Computation) -> float:
    """Bytes that it must read and write at least: operands and results once each.

    Of an array that is only sliced, the slices count; of one that is updated in place, the updates.
    """
    if instruction.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        update = _result(instruction.operands[1], computation)
        return 2 * update.bytes if update else instruction.bytes
    fusion = instruction.opcode in ("fusion", "fusion-start")
    if not fusion or instruction.called not in program.computations:
        read = (computation[name].bytes for name in instruction.operands if name in computation)
        return instruction.bytes + sum(read)
    fused = program.computations[instruction.called]
    return sum(_read(fused)) + sum(_written(fused))


def _read(fused: Computation) -> Iterator[float]:
    """Bytes that a fusion reads of each of its parameters."""
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for each in fused.values():
        for place, name in enumerate(each.operands):
            users.setdefault(name, []).append((each, place))

    def through_views(name: str) -> Iterator[tuple[Instruction, int]]:
        for each, place in users.get(name, ()):
            if each.opcode in _VIEWS:
                yield from through_views(each.name)
            else:
                yield each, place

    for each in fused.values():
        if each.opcode != "parameter":
            continue
        whole, parts = False, 0.0
        for user, place in through_views(each.name):
            if place == 0 and user.opcode in _SLICES:
                parts += user.bytes
            elif place != 0 or user.opcode != "dynamic-update-slice":
                whole = True
        yield each.bytes if whole else min(parts, each.bytes)


def _written(fused: Computation) -> Iterator[float]:
    """Bytes that a fusion writes of each of its results."""
    root = next((each for each in fused.values() if each.is_root), None)
    if root is None:
        return
    names = root.operands if root.opcode == "tuple" else (root.name,)
    for name in names:
        each = fused.get(name)
        while each is not None and each.opcode in _VIEWS and each.operands:
            each = fused.get(each.operands[0])
        if each is None:
            continue
        update = _result(each.operands[1], fused) if each.opcode == "dynamic-update-slice" else None
        yield update.bytes if update else each.bytes


def _result(name: str, computation: Computation) -> Array | None:
    """The first result of an instruction."""
    found = computation.get(name)
    return found.arrays[0] if found and found.arrays else None
