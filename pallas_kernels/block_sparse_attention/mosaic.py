"""The Mosaic GPU kernels of block-sparse attention, and their calls.

As in the Triton kernels, a program takes a tile of queries (forward, dq) or of keys (dk and dv)
and walks through its list, and nothing is atomic. The listed tiles are copied into shared memory by
the tensor memory accelerator while tensor cores multiply those that came before.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import PyTree

from pallas_kernels.block_sparse_attention.block_lists import (
    BlockLists,
    InvertedLists,
    ProgramLists,
    key_lists,
    query_lists,
)
from pallas_kernels.block_sparse_attention.mosaic_tiles import (
    COLUMNS,
    ROWS,
    MosaicLaunch,
    MosaicTiles,
    MosaicWalk,
    Own,
    TileRing,
    across,
    down,
    of_rows,
    only_valid_scores,
    own_tile,
    tiles_for,
    zeros,
)
from pallas_kernels.block_sparse_attention.operands import (
    NAME,
    AttentionInputs,
    AttentionOperands,
    AttentionOptions,
    Pass,
)
from pallas_kernels.mosaic_rows import load
from pallas_kernels.op import Ref

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
        return plgpu.kernel(
            flat,
            out_type=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results],
            scratch_types=list(scratch),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            grid=(rows * heads * blocks * parts,),
            grid_names=("program",),
            kernel_name=f"{NAME}_{self.kernel}",
        )(*given)


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
