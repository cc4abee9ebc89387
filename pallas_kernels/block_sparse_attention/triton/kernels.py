"""What one program does: walk through a list, tile by tile."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sparse_attention.triton.tuning import Tiles

_LOG2E = math.log2(math.e)
_LOWEST = -1e30
"""Below any score, and finite: differences of it are 0, not NaN."""


@dataclass(frozen=True)
class Launch:
    """What all programs of a kernel know.

    Attributes:
      heads: H.
      width: D.
      query_block: tokens of a block of queries.
      key_block: tokens of a block of keys.
      scale: factor of the scores.
      tiles: of the kernel.
    """

    heads: int
    width: int
    query_block: int
    key_block: int
    scale: float
    tiles: Tiles


class QueryLists(NamedTuple):
    """The lists of all blocks of queries: arrays, or references to them within a kernel.

    Attributes:
      index: [R, H, nQ, k_max] int32, as `BlockLists.indices`.
      count: [R, H, nQ] int32.
      order: [R, H, nQ] int32, blocks of queries in the order of programs.
      query_tokens: [R, nQ] int32.
      key_tokens: [R, nK] int32.
    """

    index: Any
    count: Any
    order: Any
    query_tokens: Any
    key_tokens: Any


@dataclass(frozen=True)
class Tile:
    """Consecutive tokens of one row and head.

    Attributes:
      row: of the batch.
      head: of the row.
      start: first token.
      valid: [tokens] bool, tokens that are valid.
    """

    row: Any
    head: Any
    start: Any
    valid: jax.Array

    def load(self, ref: Any, launch: Launch) -> jax.Array:
        """The tile of [R, S, H, D], zeros where it is not valid: [tokens, D]."""
        return plgpu.load(self._of(ref, launch), mask=self.valid[:, None], other=0.0)

    def store(self, ref: Any, launch: Launch, value: jax.Array) -> None:
        """Writes [tokens, D], where tokens exist; those that are not valid become zeros."""
        value = jnp.where(self.valid[:, None], value, 0.0).astype(ref.dtype)
        exists = self._exists(ref.shape[1])
        plgpu.store(self._of(ref, launch), value, mask=exists[:, None])

    def load_scalars(self, ref: Any) -> jax.Array:
        """The tile of [R, H, S], zeros where it is not valid: [tokens]."""
        place = ref.at[self.row, self.head, pl.ds(self.start, len(self.valid))]
        return plgpu.load(place, mask=self.valid, other=0.0)

    def store_scalars(self, ref: Any, value: jax.Array) -> None:
        """Writes [tokens], where tokens exist."""
        place = ref.at[self.row, self.head, pl.ds(self.start, len(self.valid))]
        plgpu.store(place, value, mask=self._exists(ref.shape[2]))

    def _of(self, ref: Any, launch: Launch) -> Any:
        tokens = pl.ds(self.start, len(self.valid))
        return ref.at[self.row, tokens, self.head, pl.ds(0, launch.width)]

    def _exists(self, tokens: int) -> jax.Array:
        return self.start + jnp.arange(len(self.valid)) < tokens


def forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    lists: QueryLists,
    out_ref: Any,
    lse_ref: Any,
    *,
    launch: Launch,
) -> None:
    """The output and the statistics of a tile of queries."""
    size = launch.tiles.query
    row, head, block, tile = _place(lists.order, launch, launch.query_block, size)
    queries = _tile(row, head, block, tile, size, launch.query_block, lists.query_tokens)
    q = queries.load(q_ref, launch)

    def step(keys: Tile, carry: Any) -> Any:
        top, total, acc = carry
        scores = _product(q, keys.load(k_ref, launch).T) * (launch.scale * _LOG2E)
        scores = jnp.where(keys.valid[None, :], scores, _LOWEST)
        higher = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.where(keys.valid[None, :], jnp.exp2(scores - higher[:, None]), 0.0)
        faded = jnp.exp2(top - higher)
        v = keys.load(v_ref, launch)
        acc = acc * faded[:, None] + _product(weights.astype(v.dtype), v)
        return higher, total * faded + weights.sum(axis=1), acc

    start = (
        jnp.full((size,), _LOWEST, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, launch.width), jnp.float32),
    )
    top, total, acc = _walk_keys(step, start, (row, head, block), lists, launch)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    queries.store(out_ref, launch, acc / total[:, None])
    lse = (top + jnp.log2(total)) / _LOG2E
    queries.store_scalars(lse_ref, jnp.where(some & queries.valid, lse, -jnp.inf))


def dq_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    lists: QueryLists,
    dq_ref: Any,
    *,
    launch: Launch,
) -> None:
    """The gradient of a tile of queries."""
    size = launch.tiles.query
    row, head, block, tile = _place(lists.order, launch, launch.query_block, size)
    queries = _tile(row, head, block, tile, size, launch.query_block, lists.query_tokens)
    q, dout = queries.load(q_ref, launch), queries.load(dout_ref, launch)
    lse, delta = queries.load_scalars(lse_ref) * _LOG2E, queries.load_scalars(delta_ref)

    def step(keys: Tile, dq: jax.Array) -> jax.Array:
        k = keys.load(k_ref, launch)
        scores = _product(q, k.T) * (launch.scale * _LOG2E)
        weights = jnp.where(keys.valid[None, :], jnp.exp2(scores - lse[:, None]), 0.0)
        dweights = _product(dout, keys.load(v_ref, launch).T)
        dscores = weights * (dweights - delta[:, None])
        return dq + _product(dscores.astype(k.dtype), k)

    start = jnp.zeros((size, launch.width), jnp.float32)
    dq = _walk_keys(step, start, (row, head, block), lists, launch)
    queries.store(dq_ref, launch, dq * launch.scale)


def dkv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    named_by_ref: Any,
    offset_ref: Any,
    order_ref: Any,
    query_tokens_ref: Any,
    key_tokens_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    launch: Launch,
) -> None:
    """The gradients of a tile of keys and values."""
    row, head, block, tile = _place(order_ref, launch, launch.key_block, launch.tiles.key)
    keys = _tile(row, head, block, tile, launch.tiles.key, launch.key_block, key_tokens_ref)
    k, v = keys.load(k_ref, launch), keys.load(v_ref, launch)
    size = launch.tiles.query
    parts = launch.query_block // size
    first = plgpu.load(offset_ref.at[row, head, block])
    last = plgpu.load(offset_ref.at[row, head, block + 1])

    def step(number: Any, carry: Any) -> Any:
        dk, dv = carry
        entry, tile = _divmod(number, parts)
        listed = plgpu.load(named_by_ref.at[row, head, first + entry])
        queries = _tile(row, head, listed, tile, size, launch.query_block, query_tokens_ref)
        q, dout = queries.load(q_ref, launch), queries.load(dout_ref, launch)
        lse, delta = queries.load_scalars(lse_ref) * _LOG2E, queries.load_scalars(delta_ref)
        scores = _product(k, q.T) * (launch.scale * _LOG2E)
        weights = jnp.where(queries.valid[None, :], jnp.exp2(scores - lse[None, :]), 0.0)
        dv = dv + _product(weights.astype(dout.dtype), dout)
        dscores = weights * (_product(v, dout.T) - delta[None, :])
        return dk + _product(dscores.astype(q.dtype), q), dv

    zeros = jnp.zeros((launch.tiles.key, launch.width), jnp.float32)
    dk, dv = lax.fori_loop(0, (last - first) * parts, step, (zeros, zeros))
    keys.store(dk_ref, launch, dk * launch.scale)
    keys.store(dv_ref, launch, dv)


def _place(order_ref: Any, launch: Launch, block: int, tile: int) -> tuple[Any, Any, Any, Any]:
    """Row, head, block and tile of this program: heads in turn, each head's longest list first."""
    parts, blocks = block // tile, order_ref.shape[2]
    of_head, number = _divmod(pl.program_id(0), parts * blocks)
    row, head = _divmod(of_head, launch.heads)
    place, tile = _divmod(number, parts)
    return row, head, plgpu.load(order_ref.at[row, head, place]), tile


def _tile(
    row: Any, head: Any, block: Any, tile: Any, size: int, block_size: int, tokens_ref: Any
) -> Tile:
    """A tile of a block, with the block's valid tokens."""
    within = tile * size + jnp.arange(size)
    valid = within < plgpu.load(tokens_ref.at[row, block])
    return Tile(row, head, block * block_size + tile * size, valid)


def _walk_keys(
    step: Callable[[Tile, Any], Any],
    start: Any,
    place: tuple[Any, Any, Any],
    lists: QueryLists,
    launch: Launch,
) -> Any:
    """Folds `step` over the tiles of keys in the list of a row's, head's block of queries."""
    row, head, _ = place
    size = launch.tiles.key
    parts = launch.key_block // size

    def visit(number: Any, carry: Any) -> Any:
        entry, tile = _divmod(number, parts)
        listed = plgpu.load(lists.index.at[*place, entry])
        keys = _tile(row, head, listed, tile, size, launch.key_block, lists.key_tokens)
        return step(keys, carry)

    count = plgpu.load(lists.count.at[*place])
    return lax.fori_loop(0, count * parts, visit, start)


def _divmod(number: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of a number >= 0."""
    if by == 1:
        return number, jnp.int32(0)
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a·b, summed in float32."""
    return plgpu.dot(a, b)
