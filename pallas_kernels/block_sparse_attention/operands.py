"""The arguments of a call, checked, and how a mesh splits them."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import devices
from pallas_kernels.block_sparse_attention.block_lists import BLOCK_SIZES, BlockLists
from pallas_kernels.op import DTYPES, Call, Ref

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


def unsupported_by_kernels(
    operands: AttentionOperands, call: Call[AttentionOptions]
) -> Exception | None:
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


def operand_specs(call: Call[AttentionOptions], blocks: BlockLists) -> AttentionOperands:
    """How each operand is split: rows and heads as those of q."""
    spec = () if call.sharding is None else tuple(call.sharding.spec)
    row, _, head, *_ = (*spec, None, None, None)
    tokens, by_head, by_row = P(row, None, head, None), P(row, head), P(row)
    lists = jax.tree.unflatten(jax.tree.structure(blocks), (by_head, by_head, by_row, by_row))
    return AttentionOperands._make((tokens, tokens, tokens, lists))
