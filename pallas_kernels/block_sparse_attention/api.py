"""Block-sparse attention: its operands, its meaning, its implementations and the function."""

import math
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.block_sparse_attention.block_lists import (
    BLOCK_SIZES,
    BlockLists,
    check_values,
    clamped,
    invert,
)
from pallas_kernels.op import (
    DTYPES,
    Call,
    Implementation,
    Ref,
    Registry,
    call_of,
    differentiated_once,
    on_shards,
    placed,
)

NAME = "block_sparse_attention"
Pass = Literal["forward", "dq", "dkv"]
"""A kernel, by what it computes."""
OUTPUT_NAME = "attention_output"
"""Of what `jax.checkpoint` may keep; dense attention in alload_jax has the same."""
_LOW = (jnp.bfloat16, jnp.float16)
_WIDTHS = (64, 128)
_WHOLE = {1: "tokens are", 3: "width is"}
"""Dimensions of q that nothing may split."""
_MOST_ELEMENTS = 2**31
"""Offsets within an array are 32-bit counts of elements."""


class AttentionOperands(NamedTuple):
    """The arrays of a call.

    Attributes:
      q: [R, S, H, D].
      k: [R, T, H, D].
      v: [R, T, H, D].
      blocks: the lists.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    blocks: BlockLists


@dataclass(frozen=True)
class AttentionOptions:
    """What a call asks for besides its arrays.

    Attributes:
      scale: factor of the scores.
      interpret: run kernels in Pallas's interpreter.
    """

    scale: float
    interpret: bool


AttentionCall = Call[AttentionOptions]


class AttentionInputs(NamedTuple):
    """What the kernels of the backward read: arrays, or references to them within a kernel.

    Attributes:
      q, k, v: as in `AttentionOperands`.
      dout: [R, S, H, D] in q's dtype, cotangent of the output.
      lse: [R, H, S] float32, the logarithm of the sum of exponentials of a query's scores; 0 where
        there are none.
      delta: [R, H, S] float32, Σ dout·out − dlse; 0 for queries that are not valid.
    """

    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    lse: Ref
    delta: Ref


def checked(operands: AttentionOperands, scale: float | None, interpret: bool) -> AttentionOptions:
    """The options of a call whose arguments fit together.

    Raises:
      TypeError: blocks or scale is of another type.
      ValueError: a shape, dtype or value does not fit.
    """
    q, k, v, blocks = operands
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(
                f"{NAME}: {name} is {array.shape}; it must be [rows, tokens, heads, D]"
            )
        if array.dtype != q.dtype:
            raise ValueError(f"{NAME}: {name} is {array.dtype} and q is {q.dtype}; cast them alike")
    if q.dtype not in DTYPES:
        raise ValueError(f"{NAME}: q is {q.dtype}; it must be bfloat16, float16 or float32")
    rows, tokens, heads, width = q.shape
    if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (rows, heads, width):
        raise ValueError(
            f"{NAME}: k is {k.shape} and v is {v.shape}; with q {q.shape} both must be "
            f"[{rows}, T, {heads}, {width}]"
        )
    _check_lists(blocks, rows, heads, tokens, k.shape[1])
    scale = 1 / math.sqrt(width) if scale is None else scale
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number):
        raise TypeError(f"{NAME}: scale is {type(scale).__name__}; give a Python number")
    scale = float(scale)
    if not (math.isfinite(scale) and scale):
        raise ValueError(f"{NAME}: scale is {scale}; it must be finite and not 0")
    return AttentionOptions(scale, interpret)


def _check_lists(blocks: BlockLists, rows: int, heads: int, queries: int, keys: int) -> None:
    if not isinstance(blocks, BlockLists):
        raise TypeError(f"{NAME}: blocks is {type(blocks).__name__}; give BlockLists")
    for name, size in (("query_block", blocks.query_block), ("key_block", blocks.key_block)):
        if size not in BLOCK_SIZES:
            raise ValueError(f"{NAME}: blocks.{name} is {size}; it must be 64 or 128")
    n_query, n_key = -(-queries // blocks.query_block), -(-keys // blocks.key_block)
    if blocks.indices.ndim != 4:
        raise ValueError(f"{NAME}: blocks.indices is {blocks.indices.shape}; it must have 4 axes")
    most = blocks.indices.shape[-1]
    expected = {
        "indices": (rows, heads, n_query, most),
        "counts": (rows, heads, n_query),
        "query_tokens": (rows, n_query),
        "key_tokens": (rows, n_key),
    }
    for name, shape in expected.items():
        array = getattr(blocks, name)
        if array.shape != shape:
            raise ValueError(
                f"{NAME}: blocks.{name} is {array.shape}; for {queries:,} queries in blocks of "
                f"{blocks.query_block} and {keys:,} keys in blocks of {blocks.key_block} it must "
                f"be {shape}"
            )
        if array.dtype != jnp.int32:
            raise ValueError(f"{NAME}: blocks.{name} is {array.dtype}; it must be int32")


def unsupported_query(q: jax.Array | jax.ShapeDtypeStruct) -> Exception | None:
    """Why the kernels cannot take such queries on any device, as the error to raise; else None."""
    if q.dtype not in _LOW:
        return ValueError(f"q is {q.dtype}; give bfloat16 or float16, or use 'xla'")
    if q.shape[-1] not in _WIDTHS:
        return ValueError(f"D is {q.shape[-1]}; give 64 or 128, or use 'xla'")
    return None


def unsupported_by_kernels(operands: AttentionOperands, call: AttentionCall) -> Exception | None:
    """Why the kernels cannot take a call that the reference can; None if they can."""
    q, k, _, blocks = operands
    if reason := unsupported_query(q):
        return reason
    whole = {n: (f"{what} split", "; split rows or heads") for n, what in _WHOLE.items()}
    axes = "row axes, None, head axes, None"
    if reason := devices.unsupported_sharding(q, call.sharding, name="q", axes=axes, whole=whole):
        return reason
    shards = devices.shards_of(call.sharding, 0) * devices.shards_of(call.sharding, 2)
    for name, array in {"q": q, "k": k, "blocks.indices": blocks.indices}.items():
        if array.size // shards >= _MOST_ELEMENTS:
            return NotImplementedError(
                f"{name} {array.shape} has 2³¹ elements or more on a device; split it over "
                "more devices or calls"
            )
    return None


def operand_specs(call: AttentionCall, blocks: BlockLists) -> AttentionOperands:
    """How each operand is split: rows and heads as those of q."""
    spec = () if call.sharding is None else tuple(call.sharding.spec)
    row, _, head, *_ = (*spec, None, None, None)
    tokens, by_head, by_row = P(row, None, head, None), P(row, head), P(row)
    lists = jax.tree.unflatten(jax.tree.structure(blocks), (by_head, by_head, by_row, by_row))
    return AttentionOperands._make((tokens, tokens, tokens, lists))


# ---------------------------------------------------------------- the reference


class AttentionReference(Implementation[AttentionOperands, AttentionOptions]):
    """`reference` on each device's rows and heads, differentiated by JAX."""

    name = "xla"

    @override
    def run(self, operands: AttentionOperands, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        run, specs = partial(reference, options=call.options), operand_specs(call, operands.blocks)
        out_specs = (specs.q, specs.blocks.counts)
        out, lse = on_shards(call, run, (specs,), out_specs)(operands)
        return checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, OUTPUT_NAME)


def reference(
    operands: AttentionOperands, options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """Attention to the listed blocks, computed in float32.

    Its memory grows with the pairs of the longest lists, R·H·nQ·k_max blocks.

    Returns:
      The output [R, S, H, D] in q's dtype, and the logarithm of the sum of exponentials of each
      query's scores, [R, H, S] float32: 0 and −inf where a query has no keys.
    """
    q, k, v, blocks = operands
    blocks = clamped(blocks, q.shape[1], k.shape[1])
    tokens, width = q.shape[1], q.shape[3]
    queries = _in_blocks(q, blocks.query_block)
    keys, values = (_in_blocks(each, blocks.key_block) for each in (k, v))
    rows, heads, n_query, _ = blocks.indices.shape
    index = blocks.indices.reshape(rows, heads, -1)[..., None, None]
    keys, values = (
        jnp.take_along_axis(each, index, axis=2).reshape(rows, heads, n_query, -1, width)
        for each in (keys, values)
    )
    listed = _listed_keys(blocks).reshape(rows, heads, n_query, -1)
    valid = jnp.arange(blocks.query_block) < blocks.query_tokens[:, None, :, None]
    seen = listed[:, :, :, None, :] & valid[..., None]
    # What does not count may hold anything, NaN as well.
    queries = jnp.where(seen.any(axis=-1, keepdims=True), queries, 0.0)
    keys, values = (jnp.where(listed[..., None], each, 0.0) for each in (keys, values))
    scores = jnp.einsum("rhqtd,rhqsd->rhqts", queries, keys, precision="highest") * options.scale
    scores = jnp.where(seen, scores, -jnp.inf)
    row_max = jax.lax.stop_gradient(scores.max(axis=-1, initial=-jnp.inf))
    row_max = jnp.where(jnp.isfinite(row_max), row_max, 0.0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - row_max[..., None], 0.0)), 0.0)
    row_sum = weights.sum(axis=-1)
    some = row_sum != 0  # NaN stays NaN
    share = weights / jnp.where(some, row_sum, 1.0)[..., None]
    out = jnp.einsum("rhqts,rhqsd->rhqtd", share, values, precision="highest")
    lse = jnp.where(some, row_max + jnp.log(jnp.where(some, row_sum, 1.0)), -jnp.inf)
    out = out.reshape(rows, heads, -1, width)[:, :, :tokens]
    return out.swapaxes(1, 2).astype(q.dtype), lse.reshape(rows, heads, -1)[:, :, :tokens]


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """[R, S, H, D] → [R, H, N, block, D] float32; the last block is padded with zeros."""
    rows, tokens, heads, width = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -tokens % block), (0, 0), (0, 0)))
    blocks = padded.reshape(rows, -1, block, heads, width)
    return blocks.transpose(0, 3, 1, 2, 4).astype(jnp.float32)


def _listed_keys(blocks: BlockLists) -> jax.Array:
    """[R, H, nQ, k_max, key_block] bool: keys of a list that are valid."""
    named = jnp.arange(blocks.indices.shape[-1]) < blocks.counts[..., None]
    tokens = jax.vmap(lambda of_row, number: of_row[number])(blocks.key_tokens, blocks.indices)
    return jnp.arange(blocks.key_block) < jnp.where(named, tokens, 0)[..., None]


# ---------------------------------------------------------------- kernels


class AttentionKernels(Implementation[AttentionOperands, AttentionOptions]):
    """Kernels on NVIDIA GPUs, since Ampere or on Hopper: those of the module of their name here.

    The module is imported where it runs: a JAX without its lowering must still run the others.
    """

    def __init__(self, name: str, *, interpretable: bool):
        self.name, self.interpretable = name, interpretable

    @property
    def module(self) -> ModuleType:
        """It has `forward`, `query_gradient` and `key_gradients`."""
        return import_module(f"pallas_kernels.block_sparse_attention.{self.name}")

    @override
    def run(self, operands: AttentionOperands, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        return _attention(self, call, operands)

    @override
    def unsupported_reason(
        self, operands: AttentionOperands, call: AttentionCall
    ) -> Exception | None:
        """A JAX without the lowering, another device, dtype, width or sharding, or too much."""
        if self.name == "mosaic":
            reason = devices.unsupported_mosaic(operands.q)
        else:
            reason = devices.unsupported_triton(operands.q, interpret=call.options.interpret)
        return reason or unsupported_by_kernels(operands, call)

    @override
    def faster_than_reference(self, operands: AttentionOperands, call: AttentionCall) -> bool:
        """Always: the reference copies the keys of every list."""
        return True


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    kernels: AttentionKernels, call: AttentionCall, operands: AttentionOperands
) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]."""

    def run(operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
        return kernels.module.forward(_clamped(operands), call.options)

    specs = operand_specs(call, operands.blocks)
    return on_shards(call, run, (specs,), (specs.q, specs.blocks.counts))(operands)


def _forward(
    kernels: AttentionKernels, call: AttentionCall, operands: AttentionOperands
) -> tuple[PyTree, PyTree]:
    results = _attention(kernels, call, operands)
    # Named, so that `jax.checkpoint` can keep them: the kernel is then not run again.
    out, lse = (checkpoint_name(x, OUTPUT_NAME) for x in results)
    return (out, lse), (operands, out, lse)


def _backward(
    kernels: AttentionKernels, call: AttentionCall, residuals: PyTree, cotangents: PyTree
) -> tuple[AttentionOperands]:
    def run(operands: AttentionOperands, *arrays: jax.Array) -> PyTree:
        operands = _clamped(operands)
        inputs, blocks = _inputs(operands, *arrays), operands.blocks
        dk, dv = kernels.module.key_gradients(inputs, blocks, invert(blocks), call.options)
        return kernels.module.query_gradient(inputs, blocks, call.options), dk, dv

    specs = operand_specs(call, residuals[0].blocks)
    of_results = (specs.q, specs.blocks.counts)
    on_each = on_shards(call, run, (specs, *of_results, *of_results), specs[:3])
    dq, dk, dv = differentiated_once(NAME, on_each)(*residuals, *cotangents)
    return (AttentionOperands._make((dq, dk, dv, None)),)


_attention.defvjp(_forward, _backward)


def _clamped(operands: AttentionOperands) -> AttentionOperands:
    q, k, _, blocks = operands
    return operands._replace(blocks=clamped(blocks, q.shape[1], k.shape[1]))


def _inputs(
    operands: AttentionOperands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> AttentionInputs:
    """What both kernels of the backward read.

    Args:
      operands: of the forward.
      out: [R, S, H, D], the output.
      lse: [R, H, S] float32, the statistics; −inf where a query has no keys.
      dout: [R, S, H, D], cotangent of the output.
      dlse: [R, H, S] float32, cotangent of the statistics.
    """
    products = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    some = ~jnp.isneginf(lse)  # NaN stays NaN
    delta = jnp.where(some, products.swapaxes(1, 2) - dlse, 0.0)
    dout = dout.astype(operands.q.dtype)
    return AttentionInputs(*operands[:3], dout, jnp.where(some, lse, 0.0), delta)


REGISTRY: Registry[Implementation[AttentionOperands, AttentionOptions]] = Registry(
    reference=AttentionReference()
)
REGISTRY.register(AttentionKernels("triton", interpretable=True))
REGISTRY.register(AttentionKernels("mosaic", interpretable=False))


# ---------------------------------------------------------------- the function


@overload
def block_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    implementation: str = "auto",
    sharding: NamedSharding | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> jax.Array: ...


@overload
def block_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    implementation: str = "auto",
    sharding: NamedSharding | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


def block_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    sharding: NamedSharding | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(q·kᵀ·scale)·v of each query over the keys in the blocks that its list names.

    Scores and sums are float32, and the scale is applied to the scores. Differentiable once in q, k
    and v, in reverse mode; equal inputs give equal bits, gradients too. Under `jax.checkpoint`, the
    output and the statistics have the name "attention_output".

    Args:
      q: [R, S, H, D], bfloat16 or float16, with D 64 or 128; 'xla' also takes float32 and any D.
      k: [R, T, H, D], q's dtype.
      v: [R, T, H, D], q's dtype.
      blocks: the lists. Tokens of different segments meet only where a list says so. Numbers of
        blocks and of tokens that are out of range are taken to be the nearest that exist. A list
        that names a block twice gives wrong results; `debug` finds it. Their order is free.
      scale: factor of the scores; None for 1/√D.
      return_lse: also return the logarithm of the sum of exponentials of each query's scores.
      implementation: "mosaic" (kernels for Hopper), "triton" (kernels), "xla" (the reference), or
        "auto": the first of these that can run.
      sharding: how q is split over a mesh whose axes are Auto: over rows and heads, as the lists
        are then too. Nothing is communicated. Inside `shard_map` leave it out.
      interpret: run the kernels in Pallas's interpreter, which is slow and needs no GPU.
      debug: check on the host what the lists hold, whenever the function runs.

    Returns:
      [R, S, H, D] in q's dtype, 0 for queries whose list is empty or that are not valid; with
      `return_lse` also [R, H, S] float32, −inf for such queries.

    Raises:
      TypeError: blocks is no BlockLists.
      ValueError: a shape or dtype does not fit; with `debug`, a list names a block twice or a
        number is out of range. A compiled program then ends with an error of JAX that quotes it.
      NotImplementedError: this device or this sharding cannot run the kernels.
    """
    operands = AttentionOperands(q, k, v, blocks)
    options = checked(operands, scale, interpret)
    if debug:
        jax.debug.callback(partial(check_values, NAME), blocks)
    call = call_of(q, options, sharding)
    chosen = REGISTRY.choose(NAME, implementation, operands, call, interpret=interpret)
    if not (q.size and k.size and blocks.indices.size):
        out, lse = jnp.zeros_like(q), jnp.full((q.shape[0], *q.shape[2:0:-1]), -jnp.inf)
    else:
        specs = operand_specs(call, blocks)
        out, lse = chosen.run(placed(operands, specs, call.sharding), call)
    return (out, lse) if return_lse else out
