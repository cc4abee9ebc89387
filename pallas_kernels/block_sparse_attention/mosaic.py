"""The Mosaic GPU kernels of block-sparse attention, and their calls.

As in the Triton kernels, a program takes a tile of queries (forward, dq) or of keys (dk and dv)
and walks through its list, and nothing is atomic. The listed tiles are copied into shared memory by
the tensor memory accelerator while tensor cores multiply those that came before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
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
from pallas_kernels.lowering import lowered_once
from pallas_kernels.mosaic_rows import load
from pallas_kernels.op import Ref


@dataclass(frozen=True)
class MosaicTiles:
    """What a program, one group of 128 threads, works on.

    Attributes:
      own: tokens of its own tile, 64 or 128.
      listed: tokens of a tile of the list, 64 or 128.
      slots: tiles in shared memory at a time, of k and of v (of q and of dout in dk and dv).
    """

    own: int
    listed: int
    slots: tuple[int, int]


_TILES: dict[tuple[Pass, int], MosaicTiles] = {
    ("forward", 128): MosaicTiles(64, 128, (1, 1)),
    ("forward", 64): MosaicTiles(64, 64, (1, 1)),
    ("dq", 128): MosaicTiles(64, 64, (2, 2)),
    ("dq", 64): MosaicTiles(64, 64, (2, 1)),
    ("dkv", 128): MosaicTiles(64, 64, (2, 2)),
    ("dkv", 64): MosaicTiles(64, 64, (3, 3)),
}
"""For each kernel and D."""


def tiles_for(kernel: Pass, width: int, listed_block: int) -> MosaicTiles:
    """The tiles that were measured as fastest, at most the blocks that lists name."""
    best = _TILES[kernel, width]
    return MosaicTiles(best.own, min(best.listed, listed_block), best.slots)


MATRIX = plgpu.Layout.WGMMA
"""How a matrix lies in the registers of a group of threads: as tensor cores leave it."""
ROWS, COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)
"""How a vector with a number for each row, or each column, of a matrix lies there."""


@dataclass(frozen=True)
class MosaicLaunch:
    """What all programs of a kernel know.

    Attributes:
      heads: H.
      width: D.
      own_block: tokens of a block of what programs take: of queries, of keys in dk and dv.
      listed_block: tokens of a block of what the lists name.
      scale: factor of the scores, > 0.
      tiles: of the kernel.
    """

    heads: int
    width: int
    own_block: int
    listed_block: int
    scale: float
    tiles: MosaicTiles


@dataclass(frozen=True)
class Own:
    """The tile of a program.

    Attributes:
      row: of the batch.
      head: of the row.
      block: that holds the tile.
      start: its first token.
      skipped: tokens of the block before it.
      size: its tokens.
    """

    row: jax.Array
    head: jax.Array
    block: jax.Array
    start: jax.Array
    skipped: jax.Array
    size: int

    @property
    def tokens(self) -> tuple[PyTree, ...]:
        """Its place in [R, S, H, D]."""
        return self.row, pl.ds(self.start, self.size), self.head

    @property
    def scalars(self) -> tuple[PyTree, ...]:
        """Its place in [R, H, S]."""
        return self.row, self.head, pl.ds(self.start, self.size)

    def only_valid(self, value: jax.Array, tokens: jax.Array) -> jax.Array:
        """[size, D] with zeros for the tokens of the block from the given number on."""
        row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=MATRIX)
        return jnp.where(row + self.skipped < tokens, value, 0.0)


def own_tile(lists: ProgramLists, launch: MosaicLaunch) -> Own:
    """The tile of this program: heads in turn, each head's longest list first."""
    size = launch.tiles.own
    parts, blocks = launch.own_block // size, lists.order.shape[2]
    of_head, number = divide(lax.axis_index("program"), parts * blocks)
    row, head = divide(of_head, launch.heads)
    place, part = divide(number, parts)
    block, skipped = lists.order[row, head, place], part * size
    return Own(row, head, block, block * launch.own_block + skipped, skipped, size)


@dataclass(frozen=True)
class MosaicWalk:
    """The list of a program, cut into tiles.

    Attributes:
      own: the program's tile.
      entry: the packed block at a place in the list; places beyond its end must do no harm.
      blocks: how many the list has.
      launch: of the kernel.
    """

    own: Own
    entry: Callable[[jax.Array], jax.Array]
    blocks: jax.Array
    launch: MosaicLaunch

    @property
    def count(self) -> jax.Array:
        """How many tiles there are."""
        return self.blocks * self._parts

    @property
    def size(self) -> int:
        """Tokens of a tile."""
        return self.launch.tiles.listed

    @property
    def _parts(self) -> int:
        return self.launch.listed_block // self.size

    def entry_of(self, number: jax.Array) -> jax.Array:
        """The packed block that holds a tile."""
        return self.entry(divide(number, self._parts)[0])

    def start_and_valid(self, number: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first token of a tile, and how many of it are valid."""
        block, tokens = unpack_entry(entry)
        skipped = divide(number, self._parts)[1] * self.size
        return block * self.launch.listed_block + skipped, tokens - skipped

    def fold(
        self, step: Callable[..., PyTree], start: PyTree, rings: Sequence["TileRing"]
    ) -> PyTree:
        """Folds step(valid, slots, fetch, carry) over the tiles.

        Entries are loaded some tiles before their copies begin, so that no program waits for them.

        Args:
          step: takes the tile's valid tokens, its slot in each ring, a function that begins to fill
            a ring's slot anew, to call once it was read, and the carry.
          start: the first carry.
          rings: the buffers that tiles go through.
        """
        length = max(ring.slots for ring in rings) + 2
        entries = tuple(self.entry_of(jnp.int32(number)) for number in range(length))
        for ring in rings:
            for number in range(ring.slots):
                ring.fetch(self, jnp.int32(number), entries[number])

        def one(number: jax.Array, carry: PyTree) -> PyTree:
            entries, carry = carry
            _, valid = self.start_and_valid(number, entries[0])
            slots = [lax.rem(number, jnp.int32(ring.slots)) for ring in rings]

            def fetch(ring: TileRing) -> None:
                ring.fetch(self, number + ring.slots, entries[ring.slots])

            carry = step(valid, slots, fetch, carry)
            return (*entries[1:], self.entry_of(number + length)), carry

        return lax.fori_loop(0, self.count, one, (entries, start))[1]


@dataclass(frozen=True)
class TileRing:
    """Buffers in shared memory that the tiles of a list go through.

    Attributes:
      sources: references to [R, S, H, D] or [R, H, S].
      buffers: of each source, [slots, ...].
      barrier: which says that a slot's copies have arrived.
      slots: how many.
    """

    sources: Sequence[Ref]
    buffers: Sequence[Ref]
    barrier: Ref
    slots: int

    def fetch(self, walk: MosaicWalk, number: jax.Array, entry: jax.Array) -> None:
        """Begins to copy a tile into its slot, if the list has it."""
        row, head = walk.own.row, walk.own.head

        @pl.when(number < walk.count)
        def _() -> None:
            slot = lax.rem(number, jnp.int32(self.slots))
            start, _ = walk.start_and_valid(number, entry)
            tokens = pl.ds(start, walk.size)
            for source, buffer in zip(self.sources, self.buffers, strict=True):
                of = (row, head, tokens) if len(source.shape) == 3 else (row, tokens, head)
                plgpu.copy_gmem_to_smem(source.at[of], buffer.at[slot], self.barrier.at[slot])

    def wait(self, slot: jax.Array, valid: jax.Array) -> None:
        """Until a tile is there; of matrices, the tokens that are not valid become zeros.

        What is not valid may be anything, and 0·NaN is NaN.
        """
        plgpu.barrier_wait(self.barrier.at[slot])
        matrices = [buffer.at[slot] for buffer in self.buffers if len(buffer.shape) == 3]
        size = matrices[0].shape[0]

        @pl.when(valid < size)
        def _() -> None:
            for matrix in matrices:
                value = load(matrix, MATRIX)
                row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=MATRIX)
                matrix[...] = jnp.where(row < valid, value, jnp.zeros_like(value))
            plgpu.commit_smem()


def only_valid_scores(scores: jax.Array, valid: jax.Array) -> jax.Array:
    """[own, listed] with −inf for the listed tokens from the given number on."""

    def hidden(scores: jax.Array) -> jax.Array:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX)
        return jnp.where(column < valid, scores, -jnp.inf)

    return lax.cond(valid < scores.shape[1], hidden, lambda scores: scores, scores)


def zeros(rows: int, columns: int) -> jax.Array:
    """A matrix in registers, float32."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), MATRIX)


def of_rows(rows: int, value: float) -> jax.Array:
    """A vector in registers with a number for each row of a matrix, float32."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROWS)


def across(vector: jax.Array, matrix: jax.Array) -> jax.Array:
    """A number for each row, in all columns of a matrix."""
    return lax.broadcast_in_dim(vector, matrix.shape, [0])


def down(vector: jax.Array, matrix: jax.Array) -> jax.Array:
    """A number for each column, in all rows of a matrix."""
    return lax.broadcast_in_dim(vector, matrix.shape, [1])


# ---------------------------------------------------------------- kernels

LOG2E = math.log2(math.e)
_LOWEST = -1e30
"""Below any score, and finite: differences of it are 0, not NaN."""
Slots = Sequence[jax.Array]
Fetch = Callable[[TileRing], None]


def forward_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    lists: ProgramLists,
    out_ref: Ref,
    lse_ref: Ref,
    scratch: Sequence[Ref],
    *,
    launch: MosaicLaunch,
) -> None:
    """The output and the statistics of a tile of queries."""
    q_tile, lse_tile, arrived, *buffers = scratch
    own = own_tile(lists, launch)
    plgpu.copy_gmem_to_smem(q_ref.at[own.tokens], q_tile, arrived)
    keys, values = _rings((k_ref,), (v_ref,), buffers, launch)
    plgpu.barrier_wait(arrived)
    factor = launch.scale * LOG2E

    def step(valid: jax.Array, slots: Slots, fetch: Fetch, carry: PyTree) -> PyTree:
        row_max, row_sum, acc = carry
        key_slot, value_slot = slots
        keys.wait(key_slot, valid)
        scores = _product(q_tile, keys.buffers[0].at[key_slot].transpose((1, 0)))
        fetch(keys)
        scores = only_valid_scores(scores, valid)
        new_max = jnp.maximum(row_max, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - across(new_max, scores))
        rescale = jnp.exp2(row_max - new_max)
        acc = acc * across(rescale, acc)
        row_sum = row_sum * rescale + weights.sum(axis=1)
        values.wait(value_slot, valid)
        v = values.buffers[0].at[value_slot]
        acc = _sum(acc, lambda ref: plgpu.wgmma(ref, weights.astype(q_ref.dtype), v))
        fetch(values)
        return new_max, row_sum, acc

    size = launch.tiles.own
    start = (of_rows(size, _LOWEST), of_rows(size, 0.0), zeros(size, launch.width))
    walk = _query_walk(lists, own, launch)
    row_max, row_sum, acc = walk.fold(step, start, (keys, values))
    some = row_sum != 0  # NaN stays NaN
    row_sum = jnp.where(some, row_sum, 1.0)
    out = acc * across(1.0 / row_sum, acc)
    out = own.only_valid(out, lists.own_tokens[own.row, own.block])
    q_tile[...] = out.astype(q_ref.dtype)
    lse_tile[...] = jnp.where(some, row_max / LOG2E + jnp.log(row_sum), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_tile, out_ref.at[own.tokens])
    plgpu.copy_smem_to_gmem(lse_tile, lse_ref.at[own.scalars])
    plgpu.wait_smem_to_gmem(0)


def dq_kernel(
    inputs: AttentionInputs,
    lists: ProgramLists,
    dq_ref: Ref,
    scratch: Sequence[Ref],
    *,
    launch: MosaicLaunch,
) -> None:
    """The gradient of a tile of queries; lse is in base 2."""
    q_tile, dout_tile, lse_tile, delta_tile, arrived, *buffers = scratch
    own = own_tile(lists, launch)
    plgpu.copy_gmem_to_smem(inputs.q.at[own.tokens], q_tile, arrived)
    plgpu.copy_gmem_to_smem(inputs.dout.at[own.tokens], dout_tile, arrived)
    plgpu.copy_gmem_to_smem(inputs.lse.at[own.scalars], lse_tile, arrived)
    plgpu.copy_gmem_to_smem(inputs.delta.at[own.scalars], delta_tile, arrived)
    keys, values = _rings((inputs.k,), (inputs.v,), buffers, launch)
    plgpu.barrier_wait(arrived)
    lse, delta = (load(each, ROWS) for each in (lse_tile, delta_tile))

    def step(valid: jax.Array, slots: Slots, fetch: Fetch, dq: jax.Array) -> jax.Array:
        for ring, slot in zip((keys, values), slots, strict=True):
            ring.wait(slot, valid)
        k, v = keys.buffers[0].at[slots[0]], values.buffers[0].at[slots[1]]

        def products(scores_ref: Ref, dweights_ref: Ref) -> jax.Array:
            plgpu.wgmma(scores_ref, q_tile, k.transpose((1, 0)))
            plgpu.wgmma(dweights_ref, dout_tile, v.transpose((1, 0)))
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            scores = only_valid_scores(scores, valid)
            weights = jnp.exp2(scores * (launch.scale * LOG2E) - across(lse, scores))
            return weights * (dweights_ref[...] - across(delta, scores))

        shape = (launch.tiles.own, launch.tiles.listed)
        dscores = pl.run_scoped(products, *(plgpu.ACC(shape, jnp.float32) for _ in range(2)))
        fetch(values)
        dq = _sum(dq, lambda ref: plgpu.wgmma(ref, dscores.astype(inputs.q.dtype), k))
        fetch(keys)
        return dq

    walk = _query_walk(lists, own, launch)
    dq = walk.fold(step, zeros(launch.tiles.own, launch.width), (keys, values))
    dq = own.only_valid(dq * launch.scale, lists.own_tokens[own.row, own.block])
    q_tile[...] = dq.astype(inputs.q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_tile, dq_ref.at[own.tokens])
    plgpu.wait_smem_to_gmem(0)


def dkv_kernel(
    inputs: AttentionInputs,
    lists: ProgramLists,
    dk_ref: Ref,
    dv_ref: Ref,
    scratch: Sequence[Ref],
    *,
    launch: MosaicLaunch,
) -> None:
    """The gradients of a tile of keys and values; lse is in base 2."""
    k_tile, v_tile, arrived, *buffers = scratch
    own = own_tile(lists, launch)
    plgpu.copy_gmem_to_smem(inputs.k.at[own.tokens], k_tile, arrived)
    plgpu.copy_gmem_to_smem(inputs.v.at[own.tokens], v_tile, arrived)
    sources = ((inputs.q, inputs.lse), (inputs.dout, inputs.delta))
    queries, douts = _rings(*sources, buffers, launch)
    plgpu.barrier_wait(arrived)

    def step(valid: jax.Array, slots: Slots, fetch: Fetch, carry: PyTree) -> PyTree:
        # Queries that are not valid need no hiding: all that there is of them is 0.
        for ring, slot in zip((queries, douts), slots, strict=True):
            ring.wait(slot, valid)
        q, lse_tile = (each.at[slots[0]] for each in queries.buffers)
        dout, delta_tile = (each.at[slots[1]] for each in douts.buffers)

        def products(refs: Sequence[Ref]) -> None:
            scores_ref, dweights_ref, dk_ref, dv_ref = refs
            plgpu.wgmma(scores_ref, k_tile, q.transpose((1, 0)))
            plgpu.wgmma(dweights_ref, v_tile, dout.transpose((1, 0)))
            lse = load(lse_tile, COLUMNS)
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            weights = jnp.exp2(scores * (launch.scale * LOG2E) - down(lse, scores))
            plgpu.wgmma(dv_ref, weights.astype(inputs.q.dtype), dout)
            delta = load(delta_tile, COLUMNS)
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=1)
            dscores = weights * (dweights - down(delta, scores))
            plgpu.wgmma(dk_ref, dscores.astype(inputs.q.dtype), q)

        nothing = zeros(launch.tiles.own, launch.tiles.listed)
        sums = (nothing, nothing, *carry)
        *_, dk, dv = pl.run_state(products)(tuple(plgpu.ACC.init(each) for each in sums))
        fetch(queries)
        fetch(douts)
        return dk, dv

    begin = lists.extent[own.row, own.head, own.block]
    last = lists.entry.shape[2] - 1
    walk = MosaicWalk(
        own,
        lambda place: lists.entry[own.row, own.head, jnp.minimum(begin + place, last)],
        lists.extent[own.row, own.head, own.block + 1] - begin,
        launch,
    )
    nothing = zeros(launch.tiles.own, launch.width)
    dk, dv = walk.fold(step, (nothing, nothing), (queries, douts))
    tokens = lists.own_tokens[own.row, own.block]
    k_tile[...] = own.only_valid(dk * launch.scale, tokens).astype(inputs.k.dtype)
    v_tile[...] = own.only_valid(dv, tokens).astype(inputs.v.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[own.tokens])
    plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[own.tokens])
    plgpu.wait_smem_to_gmem(0)


def _rings(
    first: Sequence[Ref], second: Sequence[Ref], buffers: Sequence[Ref], launch: MosaicLaunch
) -> tuple[TileRing, TileRing]:
    """The two rings of a kernel, from their sources and, in turn, their buffers and barriers."""
    split = len(first) + 1
    (*some, barrier), (*others, other_barrier) = buffers[:split], buffers[split:]
    one, two = launch.tiles.slots
    ring = TileRing(first, some, barrier, one)
    return ring, TileRing(second, others, other_barrier, two)


def _query_walk(lists: ProgramLists, own: Own, launch: MosaicLaunch) -> MosaicWalk:
    """Through the list of a tile of queries."""
    last = lists.entry.shape[3] - 1
    return MosaicWalk(
        own,
        lambda place: lists.entry[own.row, own.head, own.block, jnp.minimum(place, last)],
        lists.extent[own.row, own.head, own.block],
        launch,
    )


def _product(a: Ref, b: Ref) -> jax.Array:
    """a·b of tiles in shared memory, in float32."""

    def run(ref: Ref) -> jax.Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _sum(acc: jax.Array, add: Callable[[Ref], None]) -> jax.Array:
    """The accumulator after a product was added to it."""
    return pl.run_state(add)(plgpu.ACC.init(acc))


_TOKENS = 8
"""Copies into shared memory need lengths that this divides."""


def forward(
    operands: AttentionOperands, options: AttentionOptions, tiles: MosaicTiles | None = None
) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]; no operand may be empty.

    Args:
      operands: of the call.
      options: of the call.
      tiles: of the kernel; None for those that were measured as fastest.
    """
    call = _call("forward", operands.q, operands.blocks, options, tiles)
    tokens = operands.q.shape[1]
    q, k, v = (_padded(each) for each in (call.positive(operands.q), operands.k, operands.v))
    lists = query_lists(operands.blocks)
    own, scalars = call.tile(call.launch.tiles.own), call.scalars(call.launch.tiles.own)
    scratch = (own, scalars, plgpu.Barrier(), *call.rings())
    rows, heads, n_query = operands.blocks.counts.shape
    padded_tokens = n_query * operands.blocks.query_block
    statistics = jax.ShapeDtypeStruct((rows, heads, padded_tokens), jnp.float32)
    out, lse = call.run(forward_kernel, (q, k, v), lists, [q, statistics], scratch)
    lse = jnp.where(_valid_queries(operands.blocks), lse, -jnp.inf)
    return out[:, :tokens], lse[..., :tokens]


def query_gradient(
    inputs: AttentionInputs,
    blocks: BlockLists,
    options: AttentionOptions,
    tiles: MosaicTiles | None = None,
) -> jax.Array:
    """The gradient of q; `tiles` as in `forward`."""
    call = _call("dq", inputs.q, blocks, options, tiles)
    padded = call.padded(inputs, blocks)
    own, scalars = call.tile(call.launch.tiles.own), call.scalars(call.launch.tiles.own)
    barrier = plgpu.Barrier(num_arrivals=4)
    scratch = (own, own, scalars, scalars, barrier, *call.rings())
    (dq,) = call.run(dq_kernel, (padded,), query_lists(blocks), [padded.q], scratch)
    return call.positive(dq[:, : inputs.q.shape[1]])


def key_gradients(
    inputs: AttentionInputs,
    blocks: BlockLists,
    inverted: InvertedLists,
    options: AttentionOptions,
    tiles: MosaicTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v; `tiles` as in `forward`."""
    call = _call("dkv", inputs.q, blocks, options, tiles)
    padded, own = call.padded(inputs, blocks), call.tile(call.launch.tiles.own)
    scratch = (own, own, plgpu.Barrier(num_arrivals=2), *call.rings(with_scalars=True))
    lists = key_lists(blocks, inverted)
    dk, dv = call.run(dkv_kernel, (padded,), lists, [padded.k, padded.v], scratch)
    tokens = inputs.k.shape[1]
    return dk[:, :tokens], dv[:, :tokens]


class _Call(NamedTuple):
    """A kernel to run.

    Attributes:
      kernel: which one.
      launch: what its programs know.
      dtype: of q, k and v.
      negative: whether the scale is: the kernels are given −q and −scale instead.
    """

    kernel: Pass
    launch: MosaicLaunch
    dtype: jnp.dtype
    negative: bool

    def positive(self, of_q: jax.Array) -> jax.Array:
        """q, or its gradient, for a scale > 0."""
        return -of_q if self.negative else of_q

    def padded(self, inputs: AttentionInputs, blocks: BlockLists) -> AttentionInputs:
        """The inputs as kernels take them: for a scale > 0, with lse in base 2."""
        q, k, v, dout, *scalars = inputs
        missing = blocks.query_tokens.shape[1] * blocks.query_block - q.shape[1]
        q = self.positive(q)
        lse, delta = (jnp.pad(each, ((0, 0), (0, 0), (0, missing))) for each in scalars)
        return AttentionInputs._make((*map(_padded, (q, k, v, dout)), lse * LOG2E, delta))

    def tile(self, *size: int) -> PyTree:
        """Shared memory for [*size, D]."""
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((*size, self.launch.width), self.dtype, transforms=transforms)

    def scalars(self, *size: int) -> PyTree:
        """Shared memory for [*size] float32."""
        return plgpu.SMEM(size, jnp.float32)

    def rings(self, with_scalars: bool = False) -> list[PyTree]:
        """Buffers and barrier of both `TileRing`s."""
        scratch, listed = [], self.launch.tiles.listed
        for slots in self.launch.tiles.slots:
            buffers = [self.tile(slots, listed)]
            buffers += [self.scalars(slots, listed)] if with_scalars else []
            barrier = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=slots)
            scratch += [*buffers, barrier]
        return scratch

    def run(
        self,
        body: Callable[..., None],
        arrays: tuple[PyTree, ...],
        lists: ProgramLists,
        results: Sequence[jax.Array | jax.ShapeDtypeStruct],
        scratch: Sequence[PyTree],
    ) -> list[jax.Array]:
        """Runs a kernel with a program for each tile of each head."""
        given, tree = jax.tree.flatten((*arrays, lists))
        rows, heads, blocks = lists.order.shape

        def flat(*refs: Ref) -> None:
            first, last = len(given), len(given) + len(results)
            of_arrays = jax.tree.unflatten(tree, refs[:first])
            body(*of_arrays, *refs[first:last], refs[last:], launch=self.launch)

        parts = self.launch.own_block // self.launch.tiles.own
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results]
        name = f"{NAME}_{self.kernel}"
        run = plgpu.kernel(
            flat,
            out_type=shapes,
            scratch_types=list(scratch),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            grid=(rows * heads * blocks * parts,),
            grid_names=("program",),
            kernel_name=name,
        )
        return lowered_once(name, f"{self.launch} {shapes} {scratch}", run, given)


def _call(
    kernel: Pass,
    q: jax.Array,
    blocks: BlockLists,
    options: AttentionOptions,
    tiles: MosaicTiles | None,
) -> _Call:
    own_block, listed_block = blocks.query_block, blocks.key_block
    if kernel == "dkv":
        own_block, listed_block = listed_block, own_block
    tiles = tiles or tiles_for(kernel, q.shape[3], listed_block)
    scale = abs(options.scale)
    launch = MosaicLaunch(q.shape[2], q.shape[3], own_block, listed_block, scale, tiles)
    return _Call(kernel, launch, q.dtype, options.scale < 0)


def _valid_queries(blocks: BlockLists) -> jax.Array:
    """[R, 1, nQ·query_block] bool."""
    within = jnp.arange(blocks.query_block) < blocks.query_tokens[..., None]
    return within.reshape(within.shape[0], 1, -1)


def _padded(x: jax.Array) -> jax.Array:
    """[R, S, H, D] with a length that copies can take."""
    missing = -x.shape[1] % _TOKENS
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x
