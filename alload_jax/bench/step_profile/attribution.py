"""Says which part of a step an instruction of a compiled program belongs to, and its work.

Matrix products, copies and collectives are found by what an instruction does, the other parts by
the scope (alload_jax/models/common/parts.py) in its name. A fusion belongs to the part that does
most of its arithmetic, counted in elements: a kernel's time cannot be divided by measurement. The
other parts that it holds are named with it.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from alload_jax.bench.step_profile import hlo
from alload_jax.bench.step_profile.hlo import Instruction, Program
from alload_jax.files import Json
from alload_jax.models.common import parts as scopes

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


def attention_call(instruction: Instruction) -> AttentionCall | None:
    """The shape of its call of cuDNN's fused attention; None if it has none.

    JAX's layouts: operands [B, S, N, H]; the output, or the first gradient, [B, N, S, H].
    """
    for each in (*instruction.within(), instruction):
        if not each.target.startswith(FUSED_ATTENTION):
            continue
        query, key = each.operand(0), each.operand(1)
        if query is not None and key is not None and len(each.arrays[0].shape) == 4:
            rows, heads, queries, head_dim = each.arrays[0].shape
            keys = key.size // (rows * heads * head_dim)
            backward = "Backward" in each.target
            return AttentionCall(rows, queries, keys, heads, head_dim, backward)
    return None


def _product_flops(instruction: Instruction) -> float:
    left = instruction.operand(0)
    if not is_product(instruction) or left is None:
        return 0.0
    # Axes of the left operand that the product sums over.
    if instruction.opcode == "dot":
        found = _LHS_CONTRACTED.search(instruction.attributes)
        axes = [axis for axis in found[1].split(",") if axis] if found else []
    else:
        content: Json = {}
        if config := _BACKEND_CONFIG.search(instruction.attributes):
            content, _ = json.JSONDecoder().raw_decode(instruction.attributes, config.end())
        numbers = content.get("gemm_backend_config", content).get("dot_dimension_numbers", {})
        axes = numbers.get("lhs_contracting_dimensions", [])
    inner = math.prod(left.shape[int(axis)] for axis in axes)
    return 2.0 * instruction.arrays[0].size * inner


def moved_bytes(instruction: Instruction) -> float:
    """Bytes that it must read and write at least: operands and results once each.

    Of an array that is only sliced, the slices count; of one that is updated in place, the updates.
    """
    if instruction.opcode in _SLICES:
        return 2 * instruction.bytes
    if instruction.opcode == hlo.UPDATE:
        update = instruction.operand(1)
        return 2 * update.bytes if update else instruction.bytes
    fused = instruction.called
    if not fused or instruction.opcode not in ("fusion", "fusion-start"):
        return instruction.bytes + sum(read.bytes for read in instruction.operands)
    read = sum(_read_bytes(each) for each in fused if each.opcode == "parameter")
    return read + sum(_written_bytes(each) for each in fused if each.is_root)


def _read_bytes(parameter: Instruction) -> float:
    """Bytes that a fusion reads of one of its parameters."""

    def through_views(each: Instruction) -> Iterator[tuple[Instruction, int]]:
        for user, place in each.uses:
            if user.opcode in _VIEWS:
                yield from through_views(user)
            else:
                yield user, place

    whole, parts = False, 0.0
    for user, place in through_views(parameter):
        if place == 0 and user.opcode in _SLICES:
            parts += user.bytes
        elif place != 0 or user.opcode != hlo.UPDATE:
            whole = True
    return parameter.bytes if whole else min(parts, parameter.bytes)


def _written_bytes(root: Instruction) -> float:
    """Bytes that a fusion writes of its results."""
    written = 0.0
    for each in root.operands if root.opcode == "tuple" else [root]:
        while each.opcode in _VIEWS and each.operands:
            each = each.operands[0]
        update = each.operand(1) if each.opcode == hlo.UPDATE else None
        written += update.bytes if update else each.bytes
    return written


Pass = Literal["forward", "recomputed", "backward", ""]

ATTENTION = {
    scopes.SELF_ATTENTION: "self-attention",
    scopes.CROSS_ATTENTION: "cross-attention",
    scopes.JOINT_ATTENTION: "joint attention",
}
OTHER_ATTENTION = "other attention"
PRODUCTS = "matrix products"
COPIES = "copies"
COMMUNICATION = "exposed communication"
IDLE = "idle"
ELSE = "everything else"
OPTIMIZER = "optimizer, clipping, EMA"
ACCUMULATION = "gradient accumulation"
GRADIENT_SUMS = "gradient_sums"
PARTS = {
    scopes.NORM: "norms with modulation",
    scopes.QK_NORM: "q/k RMSNorm, rotary embedding",
    scopes.ROTARY: "q/k RMSNorm, rotary embedding",
    scopes.ACTIVATION: "activation",
    scopes.RESIDUAL: "residual with gate",
    scopes.LINEAR: "biases",
    GRADIENT_SUMS: "sums of gradients",
    scopes.EMBEDDING: "embeddings and head",
    scopes.HEAD: "embeddings and head",
    scopes.OBJECTIVE: "noise and loss",
    scopes.BLOCKS: ELSE,
    scopes.ACCUMULATION: ACCUMULATION,
    scopes.OPTIMIZER: OPTIMIZER,
}
"""Part of each scope that says what is computed."""
WHOLE = (scopes.ACCUMULATION, scopes.OPTIMIZER)
"""Scopes to whose parts copies and products belong as well."""

_SCOPED = [name for scope, name in PARTS.items() if scope not in WHOLE and name != ELSE]
ORDER = (
    *(*ATTENTION.values(), OTHER_ATTENTION, PRODUCTS),
    *dict.fromkeys(_SCOPED),
    *(COPIES, ACCUMULATION, OPTIMIZER, ELSE, COMMUNICATION, IDLE),
)
"""All parts, as tables and pictures list them."""

_SUMMED_IN = (scopes.LINEAR, scopes.BLOCKS, scopes.OBJECTIVE)
_SCOPES = {*PARTS, scopes.ATTENTION}
_WORD = re.compile(r"[/();]")
_COLLECTIVE = re.compile("^(all-|reduce-scatter|collective-|ragged-all|send|recv)")
_MOVES = {
    *("bitcast", "bitcast-convert", "copy", "copy-start", "copy-done", "transpose", "reshape"),
    *("broadcast", "convert", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"),
    *("pad", "gather", "iota", "reverse"),
}
_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "fusion", "partition-id"}
_CONTAINERS = {"while", "call", "conditional"}
_WITHOUT_KERNEL = _CONTAINERS | _NOTHING - {"fusion"}
_SMALL = 64
"""Elements up to which an instruction is bookkeeping, such as the number of a layer."""


class Attribution(NamedTuple):
    """Where an instruction's time belongs, and what it must do.

    Attributes:
      part: one of `ORDER`.
      detail: which pass of the step it is in, or which kind of copy it is; "" if neither applies.
      op_name: names of JAX's operation and scopes.
      also: the other parts that a fusion holds.
      flops: of its matrix products.
      bytes: that it must read and write.
      attention: shape of a call of cuDNN's fused attention.
      tensor: what a copy moves.
    """

    part: str
    detail: str = ""
    op_name: str = ""
    also: tuple[str, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0
    attention: AttentionCall | None = None
    tensor: str = ""


UNKNOWN = Attribution(ELSE)


def unknown(instruction: str) -> Attribution:
    """The attribution of a kernel that no program has, by the name of its instruction."""
    detail = hlo.kind_by_name(instruction)
    return Attribution(COPIES, detail) if detail else UNKNOWN


def attributions(program: Program, unscoped: str = "") -> dict[str, Attribution]:
    """The attribution of each instruction that can have a kernel, by its name.

    Args:
      program: the compiled program.
      unscoped: part of all kernels that have no scope; "" to tell them by what they do.
    """
    found: dict[str, Attribution] = {}
    for name, each in program.executed.items():
        if each.opcode in _WITHOUT_KERNEL:
            continue
        attribution = _attribution(each)
        if unscoped and not scope_of(attribution.op_name):
            attribution = attribution._replace(part=unscoped, detail="")
        # A product that reads or writes a slice of a stack is in a fusion, and keeps its own name.
        calls = (inner for inner in each.within() if inner.target)
        found |= {name: attribution} | {call.name: attribution for call in calls}
    return found


def containers(program: Program) -> set[str]:
    """Names of the instructions whose time is that of others, such as loops."""
    return {name for name, each in program.executed.items() if each.opcode in _CONTAINERS}


def pass_of(op_name: str) -> Pass:
    """The pass of an operation, by the transformations in JAX's name of it."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


def _attribution(instruction: Instruction) -> Attribution:
    inner = list(instruction.within())
    members = inner or [instruction]
    leader = _leader(members, instruction)
    op_name = leader.op_name or _neighbours_name(instruction)
    attention = attention_call(instruction)
    part, detail = _place(instruction, members, is_product(leader), op_name, attention)
    products = sum(map(_product_flops, (*inner, instruction)))
    computing = [each.op_name for each in members if _computes(each)]
    scoped = {_scoped_part(name) for name in computing if scope_of(name)}
    if any(each.opcode == hlo.UPDATE and each.size > _SMALL for each in members):
        scoped.add(COPIES)
    return Attribution(
        part,
        detail,
        op_name,
        tuple(sorted(scoped - {part, ELSE})),
        attention.flops if attention else products,
        moved_bytes(instruction),
        attention,
        hlo.tensor(instruction) if part == COPIES else "",
    )


def _elements(instruction: Instruction) -> int:
    """Elements of the results; of a reduction, of what is reduced if that has more."""
    reads = instruction.operands if instruction.opcode == "reduce" else []
    return max(each.size for each in (instruction, *reads))


def _computes(instruction: Instruction) -> bool:
    moves = instruction.opcode in _MOVES or instruction.opcode in _NOTHING
    return is_product(instruction) or (_elements(instruction) > _SMALL and not moves)


def _neighbours_name(instruction: Instruction) -> str:
    """The name of an instruction that uses one without a name, or of one that it uses.

    XLA gives none to some that it adds, such as the first half of a large reduction. A name whose
    scope says what is computed goes before one whose scope does not.
    """
    users = dict.fromkeys(user for user, _ in instruction.uses)
    near = [each for each in (*users, *instruction.operands) if each.opcode not in _WITHOUT_KERNEL]
    inner = [member for each in near for member in each.within()]
    names = [each.op_name for each in (*near, *inner) if each.op_name]
    telling = (name for name in names if PARTS.get(scope_of(name), ELSE) != ELSE)
    return next(iter((*telling, *names, "")))


def scope_of(op_name: str) -> str:
    """The innermost scope that says what an operation computes; "" for none."""
    words = [word for word in _WORD.split(op_name.partition(";")[0]) if word in _SCOPES]
    if scopes.EMBEDDING in words and scopes.ATTENTION not in words:
        return scopes.EMBEDDING
    scope = words[-1] if words else ""
    # Autodiff adds the gradients of several users of one tensor in the scope of one of them.
    summed = op_name.endswith("add_any") and scope in _SUMMED_IN
    return GRADIENT_SUMS if summed else scope


def _leader(members: Sequence[Instruction], own: Instruction) -> Instruction:
    """The member whose part a kernel belongs to.

    That is a matrix product; or the largest operation of the scope with most arithmetic, one of
    the backward pass before one that is recomputed for it; without any arithmetic, the instruction
    itself.
    """
    products = [each for each in members if is_product(each)]
    if products:
        return max(products, key=lambda each: each.size)
    by_scope: dict[str, list[Instruction]] = defaultdict(list)
    for each in members:
        if _computes(each) and (scope := scope_of(each.op_name)):
            by_scope[scope].append(each)
    if not by_scope:
        return own
    leading = max(by_scope.values(), key=lambda found: sum(map(_elements, found)))
    return max(leading, key=lambda each: (pass_of(each.op_name) == "backward", _elements(each)))


def _place(
    instruction: Instruction,
    members: Sequence[Instruction],
    product: bool,
    op_name: str,
    attention: AttentionCall | None,
) -> tuple[str, str]:
    """Part and detail of a kernel, by what its leader is and is called."""
    opcodes = [instruction.opcode, *(each.opcode for each in members)]
    if any(_COLLECTIVE.match(opcode) for opcode in opcodes):
        return COMMUNICATION, ""
    fused = attention is not None or instruction.target.startswith(FUSED_ATTENTION)
    if scope_of(op_name) in WHOLE:
        return PARTS[scope_of(op_name)], ""
    if not fused and not any(map(_computes, members)):
        if all(_elements(each) <= _SMALL for each in members):
            part = _scoped_part(op_name)
            return (ELSE, "bookkeeping") if part == ELSE else (part, pass_of(op_name))
        moves = {each.opcode for each in members if _elements(each) > _SMALL} - _NOTHING
        return COPIES, hlo.kind(moves, pass_of(op_name))
    if fused or scope_of(op_name) == scopes.ATTENTION:
        backward = attention.backward if attention else "Backward" in instruction.target
        return _attention_part(op_name, attention), (
            "backward" if backward else pass_of(op_name) or "forward"
        )
    return PRODUCTS if product else _scoped_part(op_name), pass_of(op_name)


def _scoped_part(op_name: str) -> str:
    """The part of an operation by its scope; that of its attention, where it is one."""
    scope = scope_of(op_name)
    if scope == scopes.ATTENTION:
        return _attention_part(op_name, None)
    return PARTS.get(scope, ELSE)


def _attention_part(op_name: str, call: AttentionCall | None) -> str:
    """Which attention of a block an operation is in; by its shape, where its name has lost it."""
    for word in _WORD.split(op_name):
        if word in ATTENTION:
            return ATTENTION[word]
    if call is None or scope_of(op_name) not in ("", scopes.BLOCKS, scopes.OBJECTIVE):
        return OTHER_ATTENTION
    itself = call.queries == call.keys
    return ATTENTION[scopes.SELF_ATTENTION if itself else scopes.CROSS_ATTENTION]
