"""What one program does: walk through a list, tile by tile."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_sparse_attention.kernel_lists import KeyLists, QueryLists
from pallas_kernels.block_sparse_attention.mosaic.tiles import (
    COLUMNS,
    ROWS,
    Launch,
    Own,
    Ring,
    Walk,
    across,
    down,
    of_rows,
    only_valid_scores,
    own_tile,
    zeros,
)

LOG2E = math.log2(math.e)
_LOWEST = -1e30
"""Below any score, and finite: differences of it are 0, not NaN."""


def forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    lists: QueryLists,
    out_ref: Any,
    lse_ref: Any,
    scratch: tuple[Any, ...],
    *,
    launch: Launch,
) -> None:
    """The output and the statistics of a tile of queries."""
    q_tile, lse_tile, arrived, *buffers = scratch
    own = own_tile(lists.order, launch)
    plgpu.copy_gmem_to_smem(q_ref.at[own.tokens], q_tile, arrived)
    keys, values = _rings((k_ref,), (v_ref,), buffers, launch)
    plgpu.barrier_wait(arrived)
    factor = launch.scale * LOG2E

    def step(valid: Any, slots: Any, fetch: Callable[[Ring], None], carry: Any) -> Any:
        top, total, acc = carry
        key_slot, value_slot = slots
        keys.wait(key_slot, valid)
        scores = _product(q_tile, _transposed(keys.buffers[0].at[key_slot]))
        fetch(keys)
        scores = only_valid_scores(scores, valid)
        higher = jnp.maximum(top, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - across(higher, scores))
        faded = jnp.exp2(top - higher)
        acc = acc * across(faded, acc)
        total = total * faded + weights.sum(axis=1)
        values.wait(value_slot, valid)
        v = values.buffers[0].at[value_slot]
        acc = _sum(acc, lambda ref: plgpu.wgmma(ref, weights.astype(q_ref.dtype), v))
        fetch(values)
        return higher, total, acc

    size = launch.tiles.own
    start = (of_rows(size, _LOWEST), of_rows(size, 0.0), zeros(size, launch.width))
    walk = _query_walk(lists, own, launch)
    top, total, acc = walk.fold(step, start, (keys, values))
    some = total != 0  # NaN stays NaN
    total = jnp.where(some, total, 1.0)
    out = acc * across(1.0 / total, acc)
    out = own.only_valid(out, lists.query_tokens[own.row, own.block])
    q_tile[...] = out.astype(q_ref.dtype)
    lse_tile[...] = jnp.where(some, top / LOG2E + jnp.log(total), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_tile, out_ref.at[own.tokens])
    plgpu.copy_smem_to_gmem(lse_tile, lse_ref.at[own.scalars])
    plgpu.wait_smem_to_gmem(0)


def dq_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    lists: QueryLists,
    dq_ref: Any,
    scratch: tuple[Any, ...],
    *,
    launch: Launch,
) -> None:
    """The gradient of a tile of queries; lse is in base 2."""
    q_tile, dout_tile, lse_tile, delta_tile, arrived, *buffers = scratch
    own = own_tile(lists.order, launch)
    plgpu.copy_gmem_to_smem(q_ref.at[own.tokens], q_tile, arrived)
    plgpu.copy_gmem_to_smem(dout_ref.at[own.tokens], dout_tile, arrived)
    plgpu.copy_gmem_to_smem(lse_ref.at[own.scalars], lse_tile, arrived)
    plgpu.copy_gmem_to_smem(delta_ref.at[own.scalars], delta_tile, arrived)
    keys, values = _rings((k_ref,), (v_ref,), buffers, launch)
    plgpu.barrier_wait(arrived)
    lse, delta = (plgpu.load(each, (), layout=ROWS) for each in (lse_tile, delta_tile))

    def step(valid: Any, slots: Any, fetch: Callable[[Ring], None], dq: Any) -> Any:
        for ring, slot in zip((keys, values), slots, strict=True):
            ring.wait(slot, valid)
        k, v = keys.buffers[0].at[slots[0]], values.buffers[0].at[slots[1]]

        def products(scores_ref: Any, dweights_ref: Any) -> jax.Array:
            plgpu.wgmma(scores_ref, q_tile, _transposed(k))
            plgpu.wgmma(dweights_ref, dout_tile, _transposed(v))
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            scores = only_valid_scores(scores, valid)
            weights = jnp.exp2(scores * (launch.scale * LOG2E) - across(lse, scores))
            return weights * (dweights_ref[...] - across(delta, scores))

        shape = (launch.tiles.own, launch.tiles.listed)
        dscores = pl.run_scoped(products, *(plgpu.ACC(shape, jnp.float32) for _ in range(2)))
        fetch(values)
        dq = _sum(dq, lambda ref: plgpu.wgmma(ref, dscores.astype(q_ref.dtype), k))
        fetch(keys)
        return dq

    walk = _query_walk(lists, own, launch)
    dq = walk.fold(step, zeros(launch.tiles.own, launch.width), (keys, values))
    dq = own.only_valid(dq * launch.scale, lists.query_tokens[own.row, own.block])
    q_tile[...] = dq.astype(q_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_tile, dq_ref.at[own.tokens])
    plgpu.wait_smem_to_gmem(0)


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
    scratch: tuple[Any, ...],
    *,
    launch: Launch,
) -> None:
    """The gradients of a tile of keys and values; lse is in base 2."""
    k_tile, v_tile, arrived, *buffers = scratch
    own = own_tile(lists.order, launch)
    plgpu.copy_gmem_to_smem(k_ref.at[own.tokens], k_tile, arrived)
    plgpu.copy_gmem_to_smem(v_ref.at[own.tokens], v_tile, arrived)
    queries, douts = _rings((q_ref, lse_ref), (dout_ref, delta_ref), buffers, launch)
    plgpu.barrier_wait(arrived)

    def step(valid: Any, slots: Any, fetch: Callable[[Ring], None], carry: Any) -> Any:
        # Queries that are not valid need no hiding: all that there is of them is 0.
        for ring, slot in zip((queries, douts), slots, strict=True):
            ring.wait(slot, valid)
        q, lse_tile = (each.at[slots[0]] for each in queries.buffers)
        dout, delta_tile = (each.at[slots[1]] for each in douts.buffers)

        def products(refs: tuple[Any, ...]) -> None:
            scores_ref, dweights_ref, dk_ref, dv_ref = refs
            plgpu.wgmma(scores_ref, k_tile, _transposed(q))
            plgpu.wgmma(dweights_ref, v_tile, _transposed(dout))
            lse = plgpu.load(lse_tile, (), layout=COLUMNS)
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            weights = jnp.exp2(scores * (launch.scale * LOG2E) - down(lse, scores))
            plgpu.wgmma(dv_ref, weights.astype(q_ref.dtype), dout)
            delta = plgpu.load(delta_tile, (), layout=COLUMNS)
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=1)
            dscores = weights * (dweights - down(delta, scores))
            plgpu.wgmma(dk_ref, dscores.astype(q_ref.dtype), q)

        nothing = zeros(launch.tiles.own, launch.tiles.listed)
        sums = (nothing, nothing, *carry)
        *_, dk, dv = pl.run_state(products)(tuple(plgpu.ACC.init(each) for each in sums))
        fetch(queries)
        fetch(douts)
        return dk, dv

    begin = lists.offset[own.row, own.head, own.block]
    last = lists.entry.shape[2] - 1
    walk = Walk(
        own,
        lambda place: lists.entry[own.row, own.head, jnp.minimum(begin + place, last)],
        lists.offset[own.row, own.head, own.block + 1] - begin,
        launch,
    )
    nothing = zeros(launch.tiles.own, launch.width)
    dk, dv = walk.fold(step, (nothing, nothing), (queries, douts))
    tokens = lists.key_tokens[own.row, own.block]
    k_tile[...] = own.only_valid(dk * launch.scale, tokens).astype(k_ref.dtype)
    v_tile[...] = own.only_valid(dv, tokens).astype(v_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[own.tokens])
    plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[own.tokens])
    plgpu.wait_smem_to_gmem(0)


def _rings(
    first: tuple[Any, ...], second: tuple[Any, ...], buffers: list[Any], launch: Launch
) -> tuple[Ring, Ring]:
    """The two rings of a kernel, from their sources and, in turn, their buffers and barriers."""
    split = len(first) + 1
    (*some, barrier), (*others, other_barrier) = buffers[:split], buffers[split:]
    one, two = launch.tiles.slots
    return Ring(first, tuple(some), barrier, one), Ring(second, tuple(others), other_barrier, two)


def _query_walk(lists: QueryLists, own: Own, launch: Launch) -> Walk:
    """Through the list of a tile of queries."""
    last = lists.entry.shape[3] - 1
    return Walk(
        own,
        lambda place: lists.entry[own.row, own.head, own.block, jnp.minimum(place, last)],
        lists.count[own.row, own.head, own.block],
        launch,
    )


def _transposed(tile: Any) -> Any:
    return plgpu.transpose_ref(tile, (1, 0))


def _product(a: Any, b: Any) -> jax.Array:
    """a·b of tiles in shared memory, in float32."""

    def run(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _sum(acc: jax.Array, add: Callable[[Any], None]) -> jax.Array:
    """The accumulator after a product was added to it."""
    return pl.run_state(add)(plgpu.ACC.init(acc))
