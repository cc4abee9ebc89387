"""The Triton kernels of block-sparse attention, and their calls.

A program takes a tile of queries (forward, dq) or of keys (dk and dv) and walks through its list,
so that each result is summed up by one program in a fixed order: nothing is atomic, and equal
inputs give equal bits. dk and dv need the inverted lists, which XLA sorts. Programs take the
longest lists of a head first, and heads one after another, so that a head's keys stay in L2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import PyTree

from pallas_kernels.block_sparse_attention.api import (
    NAME,
    AttentionInputs,
    AttentionOperands,
    AttentionOptions,
    Pass,
)
from pallas_kernels.block_sparse_attention.block_lists import (
    BlockLists,
    InvertedLists,
    ProgramLists,
    divide,
    key_lists,
    query_lists,
    unpack_entry,
)
from pallas_kernels.op import Ref


@dataclass(frozen=True)
class TritonTiles:
    """What a program works on.

    Attributes:
      query: tokens of a tile of queries. In dk and dv it may be more than a block: listed blocks.
      key: tokens of a tile of keys. In the forward and dq it may likewise be several blocks.
      num_warps: warps of a program.
      num_stages: tiles that are loaded ahead, plus one.
    """

    query: int
    key: int
    num_warps: int
    num_stages: int


_TILES: dict[tuple[Pass, int], TritonTiles] = {
    ("forward", 64): TritonTiles(64, 32, 4, 3),
    ("forward", 128): TritonTiles(128, 64, 4, 3),
    ("dq", 64): TritonTiles(64, 64, 4, 2),
    ("dq", 128): TritonTiles(64, 64, 4, 2),
    ("dkv", 64): TritonTiles(64, 64, 4, 2),
    ("dkv", 128): TritonTiles(64, 64, 4, 2),
}
"""For each kernel and block of queries."""


def tiles_for(kernel: Pass, query_block: int) -> TritonTiles:
    """The tiles that were measured as fastest."""
    return _TILES[kernel, query_block]


_LOG2E = math.log2(math.e)
_HIDDEN = -1e30
"""Added to the scores of keys that are not valid: finite, so that no difference of it is NaN."""
_LOWEST = _HIDDEN / 2
"""Below any score and above any that is hidden."""


@dataclass(frozen=True)
class TritonLaunch:
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
    tiles: TritonTiles


@dataclass(frozen=True)
class ListedTile:
    """Tokens of one row and head.

    Attributes:
      row: of the batch.
      head: of the row.
      token: [tokens] int32, their places in the row.
      valid: [tokens] bool, tokens that are valid.
    """

    row: jax.Array
    head: jax.Array
    token: jax.Array
    valid: jax.Array

    def load(self, ref: Ref, launch: TritonLaunch) -> jax.Array:
        """The tile of [R, S, H, D], zeros where it is not valid: [tokens, D]."""
        return plgpu.load(self._of(ref, launch), mask=self.valid[:, None], other=0.0)

    def store(self, ref: Ref, launch: TritonLaunch, value: jax.Array) -> None:
        """Writes [tokens, D], where tokens exist; those that are not valid become zeros."""
        value = jnp.where(self.valid[:, None], value, 0.0).astype(ref.dtype)
        exists = self.token < ref.shape[1]
        plgpu.store(self._of(ref, launch), value, mask=exists[:, None])

    def load_scalars(self, ref: Ref) -> jax.Array:
        """The tile of [R, H, S], zeros where it is not valid: [tokens]."""
        return plgpu.load(ref.at[self.row, self.head, self.token], mask=self.valid, other=0.0)

    def store_scalars(self, ref: Ref, value: jax.Array) -> None:
        """Writes [tokens], where tokens exist."""
        scalars = ref.at[self.row, self.head, self.token]
        plgpu.store(scalars, value, mask=self.token < ref.shape[2])

    def hidden(self) -> jax.Array:
        """[tokens] float32: 0, or what hides the scores of tokens that are not valid."""
        return jnp.where(self.valid, 0.0, _HIDDEN)

    def _of(self, ref: Ref, launch: TritonLaunch) -> Ref:
        channel = jnp.arange(launch.width)
        return ref.at[self.row, self.token[:, None], self.head, channel[None, :]]


def forward_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    lists: ProgramLists,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    launch: TritonLaunch,
) -> None:
    """The output and the statistics of a tile of queries."""
    size = launch.tiles.query
    queries, block = _own_tile(lists, launch, launch.query_block, size)
    q = queries.load(q_ref, launch)

    def step(keys: ListedTile, carry: PyTree) -> PyTree:
        row_max, row_sum, acc = carry
        scores = plgpu.dot(q, keys.load(k_ref, launch).T) * (launch.scale * _LOG2E)
        scores += keys.hidden()[None, :]
        new_max = jnp.maximum(row_max, scores.max(axis=1))
        weights = jnp.exp2(scores - new_max[:, None])
        rescale = jnp.exp2(row_max - new_max)
        v = keys.load(v_ref, launch)
        acc = acc * rescale[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_max, row_sum * rescale + weights.sum(axis=1), acc

    start = (
        jnp.full((size,), _LOWEST, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, launch.width), jnp.float32),
    )
    row_max, row_sum, acc = _walk_keys(lists, queries, block, launch).fold(step, start)
    some = row_sum != 0  # NaN stays NaN
    row_sum = jnp.where(some, row_sum, 1.0)
    queries.store(out_ref, launch, acc / row_sum[:, None])
    lse = (row_max + jnp.log2(row_sum)) / _LOG2E
    queries.store_scalars(lse_ref, jnp.where(some & queries.valid, lse, -jnp.inf))


def dq_kernel(
    inputs: AttentionInputs, lists: ProgramLists, dq_ref: Ref, *, launch: TritonLaunch
) -> None:
    """The gradient of a tile of queries."""
    size = launch.tiles.query
    queries, block = _own_tile(lists, launch, launch.query_block, size)
    q, dout, lse, delta = _load_queries(queries, inputs, launch)

    def step(keys: ListedTile, dq: jax.Array) -> jax.Array:
        k = keys.load(inputs.k, launch)
        scores = plgpu.dot(q, k.T) * (launch.scale * _LOG2E)
        weights = jnp.exp2(scores + (keys.hidden()[None, :] - lse[:, None]))
        dweights = plgpu.dot(dout, keys.load(inputs.v, launch).T)
        dscores = weights * (dweights - delta[:, None])
        return dq + plgpu.dot(dscores.astype(k.dtype), k)

    start = jnp.zeros((size, launch.width), jnp.float32)
    dq = _walk_keys(lists, queries, block, launch).fold(step, start)
    queries.store(dq_ref, launch, dq * launch.scale)


def dkv_kernel(
    inputs: AttentionInputs,
    lists: ProgramLists,
    dk_ref: Ref,
    dv_ref: Ref,
    *,
    launch: TritonLaunch,
) -> None:
    """The gradients of a tile of keys and values."""
    size = launch.tiles.key
    keys, block = _own_tile(lists, launch, launch.key_block, size)
    k, v = keys.load(inputs.k, launch), keys.load(inputs.v, launch)

    def step(queries: ListedTile, carry: PyTree) -> PyTree:
        # Queries that are not valid need no hiding: all that is loaded of them is 0.
        dk, dv = carry
        q, dout, lse, delta = _load_queries(queries, inputs, launch)
        weights = jnp.exp2(plgpu.dot(k, q.T) * (launch.scale * _LOG2E) - lse[None, :])
        dv = dv + plgpu.dot(weights.astype(dout.dtype), dout)
        dscores = weights * (plgpu.dot(v, dout.T) - delta[None, :])
        return dk + plgpu.dot(dscores.astype(q.dtype), q), dv

    zeros = jnp.zeros((size, launch.width), jnp.float32)
    of_head = (keys.row, keys.head)
    first = plgpu.load(lists.extent.at[*of_head, block])
    count = plgpu.load(lists.extent.at[*of_head, block + 1]) - first
    tiles = (launch.tiles.query, launch.query_block)
    dk, dv = TritonWalk(lists.entry, of_head, first, count, *tiles).fold(step, (zeros, zeros))
    keys.store(dk_ref, launch, dk * launch.scale)
    keys.store(dv_ref, launch, dv)


def _own_tile(
    lists: ProgramLists, launch: TritonLaunch, block: int, size: int
) -> tuple[ListedTile, jax.Array]:
    """This program's tile, and its block: heads in turn, each head's longest list first."""
    parts, blocks = block // size, lists.order.shape[2]
    of_head, number = divide(pl.program_id(0), parts * blocks)
    row, head = divide(of_head, launch.heads)
    place, part = divide(number, parts)
    own = plgpu.load(lists.order.at[row, head, place])
    tokens = plgpu.load(lists.own_tokens.at[row, own])
    return _tile((row, head), [(own, tokens)], part, size, block), own


def _load_queries(
    queries: ListedTile, inputs: AttentionInputs, launch: TritonLaunch
) -> tuple[jax.Array, ...]:
    """q, dout, lse in base 2 and delta of a tile."""
    q, dout = queries.load(inputs.q, launch), queries.load(inputs.dout, launch)
    lse, delta = queries.load_scalars(inputs.lse) * _LOG2E, queries.load_scalars(inputs.delta)
    return q, dout, lse, delta


def _walk_keys(
    lists: ProgramLists, queries: ListedTile, block: jax.Array, launch: TritonLaunch
) -> "TritonWalk":
    """Through the list of a block of queries."""
    of_block = (queries.row, queries.head, block)
    count = plgpu.load(lists.extent.at[*of_block])
    return TritonWalk(lists.entry, of_block, 0, count, launch.tiles.key, launch.key_block)


def _tile(
    of_head: tuple[jax.Array, jax.Array],
    blocks: Sequence[tuple[jax.Array, jax.Array]],
    part: jax.Array | int,
    size: int,
    block: int,
) -> ListedTile:
    """A part of a block, or several whole blocks.

    Args:
      of_head: row and head.
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
    return ListedTile(*of_head, start + within, within < left)


@dataclass(frozen=True)
class TritonWalk:
    """A list that a program goes through, in tiles.

    Attributes:
      entries: reference to the entries of all lists.
      place: row, head and, if the lists are apart, which list.
      first: the list's first entry there.
      count: of its entries.
      size: tokens of a tile.
      block: tokens of a listed block.
    """

    entries: Ref
    place: tuple[jax.Array, ...]
    first: jax.Array | int
    count: jax.Array
    size: int
    block: int

    def fold(self, step: Callable[[ListedTile, PyTree], PyTree], start: PyTree) -> PyTree:
        """Folds `step` over the tiles."""
        if self.size <= self.block:
            tile_of, count = self._part, self.count * (self.block // self.size)
        else:
            several = self.size // self.block
            tile_of, count = self._blocks, lax.div(self.count + (several - 1), several)
        return lax.fori_loop(0, count, lambda number, carry: step(tile_of(number), carry), start)

    def _part(self, number: jax.Array) -> ListedTile:
        entry, part = divide(number, self.block // self.size)
        packed = plgpu.load(self._at(entry))
        return self._tile([unpack_entry(packed)], part)

    def _blocks(self, number: jax.Array) -> ListedTile:
        """Several blocks of the list; those past its end have no valid tokens."""
        several, blocks = self.size // self.block, []
        for which in range(several):
            entry = number * several + which
            packed = plgpu.load(self._at(entry), mask=entry < self.count, other=0)
            blocks.append(unpack_entry(packed))
        return self._tile(blocks, 0)

    def _tile(
        self, blocks: Sequence[tuple[jax.Array, jax.Array]], part: jax.Array | int
    ) -> ListedTile:
        row, head, *_ = self.place
        return _tile((row, head), blocks, part, self.size, self.block)

    def _at(self, entry: jax.Array) -> Ref:
        return self.entries.at[*self.place, self.first + entry]


def forward(
    operands: AttentionOperands, options: AttentionOptions, tiles: TritonTiles | None = None
) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]; no operand may be empty.

    Args:
      operands: of the call.
      options: of the call.
      tiles: of the kernel; None for those that were measured as fastest.
    """
    q, k, v, blocks = operands
    rows, tokens, heads, _ = q.shape
    statistics = jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32)
    run = _call("forward", forward_kernel, q, blocks, options, tiles, [q, statistics])
    out, lse = run(q, k, v, query_lists(blocks))
    return out, lse


def query_gradient(
    inputs: AttentionInputs,
    blocks: BlockLists,
    options: AttentionOptions,
    tiles: TritonTiles | None = None,
) -> jax.Array:
    """The gradient of q; `tiles` as in `forward`."""
    run = _call("dq", dq_kernel, inputs.q, blocks, options, tiles, [inputs.q])
    (dq,) = run(inputs, query_lists(blocks))
    return dq


def key_gradients(
    inputs: AttentionInputs,
    blocks: BlockLists,
    inverted: InvertedLists,
    options: AttentionOptions,
    tiles: TritonTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v; `tiles` as in `forward`."""
    run = _call("dkv", dkv_kernel, inputs.q, blocks, options, tiles, [inputs.k, inputs.v])
    dk, dv = run(inputs, key_lists(blocks, inverted))
    return dk, dv


def _call(
    kernel: Pass,
    body: Callable[..., None],
    q: jax.Array,
    blocks: BlockLists,
    options: AttentionOptions,
    tiles: TritonTiles | None,
    results: Sequence[jax.Array | jax.ShapeDtypeStruct],
) -> Callable[..., list[jax.Array]]:
    """A kernel with a program for each tile of each head, as a function of its arrays."""
    rows, _, heads, width = q.shape
    tiles = tiles or tiles_for(kernel, blocks.query_block)
    launch = TritonLaunch(heads, width, blocks.query_block, blocks.key_block, options.scale, tiles)
    if kernel == "dkv":
        programs = blocks.key_tokens.shape[1] * (blocks.key_block // tiles.key)
    else:
        programs = blocks.query_tokens.shape[1] * (blocks.query_block // tiles.query)
    return pl.pallas_call(
        partial(body, launch=launch),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results],
        grid=(rows * heads * programs,),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=options.interpret,
        name=f"{NAME}_{kernel}",
    )
