"""What one program does: walk through a list, tile by tile."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sparse_attention.kernel_lists import (
    KeyLists,
    QueryLists,
    divide,
    unpack_entry,
)
from pallas_kernels.block_sparse_attention.triton.tuning import Tiles

_LOG2E = math.log2(math.e)
_HIDDEN = -1e30
"""Added to the scores of keys that are not valid: finite, so that no difference of it is NaN."""
_LOWEST = _HIDDEN / 2
"""Below any score and above any that is hidden."""


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


@dataclass(frozen=True)
class Tile:
    """Tokens of one row and head.

    Attributes:
      row: of the batch.
      head: of the row.
      token: [tokens] int32, their places in the row.
      valid: [tokens] bool, tokens that are valid.
    """

    row: Any
    head: Any
    token: jax.Array
    valid: jax.Array

    def load(self, ref: Any, launch: Launch) -> jax.Array:
        """The tile of [R, S, H, D], zeros where it is not valid: [tokens, D]."""
        return plgpu.load(self._of(ref, launch), mask=self.valid[:, None], other=0.0)

    def store(self, ref: Any, launch: Launch, value: jax.Array) -> None:
        """Writes [tokens, D], where tokens exist; those that are not valid become zeros."""
        value = jnp.where(self.valid[:, None], value, 0.0).astype(ref.dtype)
        exists = self.token < ref.shape[1]
        plgpu.store(self._of(ref, launch), value, mask=exists[:, None])

    def load_scalars(self, ref: Any) -> jax.Array:
        """The tile of [R, H, S], zeros where it is not valid: [tokens]."""
        return plgpu.load(ref.at[self.row, self.head, self.token], mask=self.valid, other=0.0)

    def store_scalars(self, ref: Any, value: jax.Array) -> None:
        """Writes [tokens], where tokens exist."""
        place = ref.at[self.row, self.head, self.token]
        plgpu.store(place, value, mask=self.token < ref.shape[2])

    def hidden(self) -> jax.Array:
        """[tokens] float32: 0, or what hides the scores of tokens that are not valid."""
        return jnp.where(self.valid, 0.0, _HIDDEN)

    def _of(self, ref: Any, launch: Launch) -> Any:
        channel = jnp.arange(launch.width)
        return ref.at[self.row, self.token[:, None], self.head, channel[None, :]]


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
    own = plgpu.load(lists.query_tokens.at[row, block])
    queries = _tile((row, head), [(block, own)], tile, size, launch.query_block)
    q = queries.load(q_ref, launch)

    def step(keys: Tile, carry: Any) -> Any:
        top, total, acc = carry
        scores = _product(q, keys.load(k_ref, launch).T) * (launch.scale * _LOG2E)
        scores += keys.hidden()[None, :]
        higher = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - higher[:, None])
        faded = jnp.exp2(top - higher)
        v = keys.load(v_ref, launch)
        acc = acc * faded[:, None] + _product(weights.astype(v.dtype), v)
        return higher, total * faded + weights.sum(axis=1), acc

    start = (
        jnp.full((size,), _LOWEST, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, launch.width), jnp.float32),
    )
    walk = Walk(lists.entry, (row, head, block), 0, plgpu.load(lists.count.at[row, head, block]))
    top, total, acc = walk.fold(step, start, launch.tiles.key, launch.key_block)
    some = total != 0  # NaN stays NaN
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
    own = plgpu.load(lists.query_tokens.at[row, block])
    queries = _tile((row, head), [(block, own)], tile, size, launch.query_block)
    q, dout = queries.load(q_ref, launch), queries.load(dout_ref, launch)
    lse, delta = queries.load_scalars(lse_ref) * _LOG2E, queries.load_scalars(delta_ref)

    def step(keys: Tile, dq: jax.Array) -> jax.Array:
        k = keys.load(k_ref, launch)
        scores = _product(q, k.T) * (launch.scale * _LOG2E)
        weights = jnp.exp2(scores + (keys.hidden()[None, :] - lse[:, None]))
        dweights = _product(dout, keys.load(v_ref, launch).T)
        dscores = weights * (dweights - delta[:, None])
        return dq + _product(dscores.astype(k.dtype), k)

    start = jnp.zeros((size, launch.width), jnp.float32)
    walk = Walk(lists.entry, (row, head, block), 0, plgpu.load(lists.count.at[row, head, block]))
    dq = walk.fold(step, start, launch.tiles.key, launch.key_block)
    queries.store(dq_ref, launch, dq * launch.scale)


def dkv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    lists: KeyLists,
    dk_ref: Any,
    dv_ref: Any,
    *,
    launch: Launch,
) -> None:
    """The gradients of a tile of keys and values."""
    size = launch.tiles.key
    row, head, block, tile = _place(lists.order, launch, launch.key_block, size)
    own = plgpu.load(lists.key_tokens.at[row, block])
    keys = _tile((row, head), [(block, own)], tile, size, launch.key_block)
    k, v = keys.load(k_ref, launch), keys.load(v_ref, launch)

    def step(queries: Tile, carry: Any) -> Any:
        # Queries that are not valid need no hiding: all that is loaded of them is 0.
        dk, dv = carry
        q, dout = queries.load(q_ref, launch), queries.load(dout_ref, launch)
        lse, delta = queries.load_scalars(lse_ref) * _LOG2E, queries.load_scalars(delta_ref)
        weights = jnp.exp2(_product(k, q.T) * (launch.scale * _LOG2E) - lse[None, :])
        dv = dv + _product(weights.astype(dout.dtype), dout)
        dscores = weights * (_product(v, dout.T) - delta[None, :])
        return dk + _product(dscores.astype(q.dtype), q), dv

    zeros = jnp.zeros((size, launch.width), jnp.float32)
    first = plgpu.load(lists.offset.at[row, head, block])
    count = plgpu.load(lists.offset.at[row, head, block + 1]) - first
    walk = Walk(lists.entry, (row, head), first, count)
    dk, dv = walk.fold(step, (zeros, zeros), launch.tiles.query, launch.query_block)
    keys.store(dk_ref, launch, dk * launch.scale)
    keys.store(dv_ref, launch, dv)


def _place(order_ref: Any, launch: Launch, block: int, tile: int) -> tuple[Any, Any, Any, Any]:
    """Row, head, block and tile of this program: heads in turn, each head's longest list first."""
    parts, blocks = block // tile, order_ref.shape[2]
    of_head, number = divide(pl.program_id(0), parts * blocks)
    row, head = divide(of_head, launch.heads)
    place, tile = divide(number, parts)
    return row, head, plgpu.load(order_ref.at[row, head, place]), tile


def _tile(
    place: tuple[Any, Any], blocks: Sequence[tuple[Any, Any]], part: Any, size: int, block: int
) -> Tile:
    """A part of a block, or several whole blocks.

    Args:
      place: row and head.
      blocks: number and valid tokens of each block.
      part: which part of a block; 0 for whole blocks.
      size: tokens of the tile.
      block: tokens of a block.
    """
    within = jnp.arange(size)
    (number, tokens), *others = blocks
    start = number * block + part * size
    left = tokens - part * size
    for which, (number, tokens) in enumerate(others, 1):
        # Places within the tile, which begins `which` blocks before this block.
        begun = within >= which * block
        start = jnp.where(begun, (number - which) * block, start)
        left = jnp.where(begun, tokens + which * block, left)
    return Tile(*place, start + within, within < left)


@dataclass(frozen=True)
class Walk:
    """A list that a program goes through.

    Attributes:
      entries: reference to the entries of all lists.
      place: row, head and, if the lists are apart, which list.
      first: the list's first entry there.
      count: of its entries.
    """

    entries: Any
    place: tuple[Any, ...]
    first: Any
    count: Any

    def fold(self, step: Callable[[Tile, Any], Any], start: Any, size: int, block: int) -> Any:
        """Folds `step` over tiles of `size` tokens of the listed blocks of `block` tokens."""
        if size <= block:
            parts = block // size
            return lax.fori_loop(
                *(0, self.count * parts),
                lambda number, carry: step(self._part(number, parts, size, block), carry),
                start,
            )
        several = size // block
        return lax.fori_loop(
            *(0, lax.div(self.count + (several - 1), several)),
            lambda number, carry: step(self._blocks(number, several, block), carry),
            start,
        )

    def _part(self, number: Any, parts: int, size: int, block: int) -> Tile:
        entry, part = divide(number, parts)
        packed = plgpu.load(self._at(entry))
        return _tile(self.place[:2], [unpack_entry(packed)], part, size, block)

    def _blocks(self, number: Any, several: int, block: int) -> Tile:
        """Several blocks of the list; those past its end have no valid tokens."""
        found = []
        for which in range(several):
            entry = number * several + which
            packed = plgpu.load(self._at(entry), mask=entry < self.count, other=0)
            found.append(unpack_entry(packed))
        return _tile(self.place[:2], found, 0, several * block, block)

    def _at(self, entry: Any) -> Any:
        return self.entries.at[*self.place, self.first + entry]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a·b, summed in float32."""
    return plgpu.dot(a, b)
