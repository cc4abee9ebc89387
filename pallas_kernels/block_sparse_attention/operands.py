"""The arguments of a call, checked."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from pallas_kernels.block_sparse_attention.block_lists import BLOCK_SIZES, BlockLists

NAME = "block_sparse_attention"
OUTPUT_NAME = "attention_output"
"""Of what `jax.checkpoint` may keep; dense attention in alload_jax has the same."""
_LOW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_WIDTHS = (64, 128)


class Operands(NamedTuple):
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
class Options:
    """What a call asks for beside its arrays.

    Attributes:
      scale: factor of the scores.
      interpret: run kernels in Pallas's interpreter.
    """

    scale: float
    interpret: bool


@dataclass(frozen=True)
class CallConfig:
    """Options, and how q is split over a mesh.

    Attributes:
      options: the options.
      sharding: of q [R, S, H, D]; None for one device, or inside `shard_map`.
    """

    options: Options
    sharding: NamedSharding | None


class Residuals(NamedTuple):
    """What the backward takes from the forward.

    Attributes:
      q, k, v, blocks: as in `Operands`.
      out: [R, S, H, D], the output.
      lse: [R, H, S] float32, the logarithm of the sum of exponentials of a query's scores; −inf
        where there are none.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    blocks: BlockLists
    out: jax.Array
    lse: jax.Array


def checked(operands: Operands, scale: float | None, interpret: bool) -> Options:
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
    if q.dtype not in (*_LOW, jnp.dtype(jnp.float32)):
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
    return Options(scale, interpret)


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


def unsupported_by_kernels(operands: Operands) -> ValueError | None:
    """Why the kernels cannot take a call that the reference can; None if they can."""
    if operands.q.dtype not in _LOW:
        return ValueError(f"q is {operands.q.dtype}; give bfloat16 or float16, or use 'xla'")
    if operands.q.shape[-1] not in _WIDTHS:
        return ValueError(f"D is {operands.q.shape[-1]}; give 64 or 128, or use 'xla'")
    return None
