"""The Triton kernel that scores pairs of blocks and chooses the best, and its call.

A program takes some blocks of queries of a head. It looks for the k-th highest score bit by bit, by
counting the scores that are as high, and writes the numbers of the blocks in their order: no scores
are sorted, and none leave the program. Scores of up to `_HELD` tiles stay in registers; those of
longer rows are computed again for each bit.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import PyTree

from pallas_kernels.block_sparse_attention.block_lists import divide
from pallas_kernels.block_sparse_attention.selection import (
    HELD_BLOCKS,
    NAME,
    PooledScores,
    SelectionOperands,
    SelectionOptions,
    between_infinities,
)
from pallas_kernels.op import Ref

_KEYS, WARPS = 128, 8
"""Blocks of keys of a tile of scores; warps of a program."""
_HELD = HELD_BLOCKS // _KEYS
"""Tiles of scores, at most, that a program keeps."""
_QUERIES, _MORE_QUERIES = 16, 64
"""Blocks of queries of a program that keeps the scores, and of one that computes them again."""
_LOWEST = jnp.iinfo(jnp.int32).min


def choose(operands: SelectionOperands, options: SelectionOptions) -> tuple[jax.Array, jax.Array]:
    """The lists of pooled scores, [R, H, nQ, most] int32, and their lengths, [R, H, nQ]."""
    scores = operands.scores
    assert isinstance(scores, PooledScores)
    (rows, n_query, heads, width), n_key = scores.queries.shape, scores.keys.shape[1]
    queries = _QUERIES if pl.cdiv(n_key, _KEYS) <= _HELD else _MORE_QUERIES
    tiles = pl.cdiv(n_query, queries)
    size = (rows, heads, n_query)
    launch = _Launch(heads, queries, tiles, n_query, n_key, width, options)
    empty = jnp.zeros((*size, options.most), jnp.int32)
    return pl.pallas_call(
        partial(_kernel, launch=launch),
        out_shape=(
            jax.ShapeDtypeStruct(empty.shape, jnp.int32),
            jax.ShapeDtypeStruct(size, jnp.int32),
        ),
        grid=(rows * heads * tiles,),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        input_output_aliases={5: 0},
        interpret=options.interpret,
        name=NAME,
    )(*scores, operands.k, operands.asking, operands.usable, empty)


class _Launch(NamedTuple):
    """What all programs know: sizes, and the options."""

    heads: int
    queries: int
    tiles: int
    n_query: int
    n_key: int
    width: int
    options: SelectionOptions


def _kernel(
    q_ref: Ref,
    k_ref: Ref,
    most_ref: Ref,
    asking_ref: Ref,
    usable_ref: Ref,
    zeros_ref: Ref,
    index_ref: Ref,
    count_ref: Ref,
    *,
    launch: _Launch,
) -> None:
    """The lists of some blocks of queries of one head."""
    del zeros_ref  # `index_ref` begins as it is
    pair, tile = divide(pl.program_id(0), launch.tiles)
    row, head = divide(pair, launch.heads)
    queries = launch.queries
    query = tile * queries + jnp.arange(queries)
    exists, channel = query < launch.n_query, jnp.arange(launch.width)
    q = plgpu.load(
        q_ref.at[row, query[:, None], head, channel[None, :]], mask=exists[:, None], other=0.0
    )
    asking = plgpu.load(asking_ref.at[row, query], mask=exists, other=-1)
    k = plgpu.load(most_ref.at[row, head, query], mask=exists, other=0)
    of_query, of_key = launch.options.sizes
    own = lax.div(query * of_query, jnp.int32(of_key))

    def ranked(number: jax.Array | int) -> jax.Array:
        """Ranks of a tile of keys, the lowest for what may not be chosen: [queries, keys]."""
        key = number * _KEYS + jnp.arange(_KEYS)
        here = key < launch.n_key
        keys = plgpu.load(
            k_ref.at[row, key[:, None], head, channel[None, :]], mask=here[:, None], other=0.0
        )
        segment = plgpu.load(usable_ref.at[row, key], mask=here, other=-2)
        allowed = asking[:, None] == segment[None, :]
        rank = rank_of(plgpu.dot(q, keys.T))
        if launch.options.own:
            rank = jnp.where(key[None, :] == own[:, None], jnp.iinfo(jnp.int32).max, rank)
        return jnp.where(allowed, rank, _LOWEST)

    fold = _folds(launch, ranked)
    none = jnp.zeros((queries, _KEYS), jnp.int32)

    def counted(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """For how many keys of each query it holds, by their ranks."""
        return fold(lambda _, rank, total: total + holds(rank), none).sum(axis=1)

    k = jnp.minimum(k, counted(lambda rank: rank != _LOWEST))

    def search(carry: _Search) -> _Search:
        """One bit of the k-th highest rank, seen as unsigned."""
        bit, found, exact = carry
        tried = jnp.where(exact, found, found | lax.shift_left(jnp.int32(1), bit))
        least = tried ^ _LOWEST
        count = counted(lambda rank: rank >= least[:, None])
        return bit - 1, jnp.where(count >= k, tried, found), exact | (count == k)

    def goes_on(carry: _Search) -> jax.Array:
        bit, _, exact = carry
        return (bit >= 0) & (jnp.min(exact.astype(jnp.int32)) == 0)

    # A list of none is found at once: nothing is above the highest.
    start = (jnp.int32(31), jnp.where(k == 0, -1, 0), k == 0)
    least = lax.while_loop(goes_on, search, start)[1] ^ _LOWEST

    equals = k - counted(lambda rank: rank > least[:, None])
    first = jnp.zeros(queries, jnp.int32)
    if launch.options.own:
        first = plgpu.load(usable_ref.at[row, own], mask=own < launch.n_key, other=-2)
        first = ((first == asking) & (k > 0)).astype(jnp.int32)

    def write(number: jax.Array | int, rank: jax.Array, carry: PyTree) -> PyTree:
        place, seen = carry
        key = number * _KEYS + jnp.arange(_KEYS)
        equal = (rank == least[:, None]).astype(jnp.int32)
        nth = seen[:, None] + jnp.cumsum(equal, axis=1)
        chosen = (rank > least[:, None]) | ((equal == 1) & (nth <= equals[:, None]))
        is_own = (key[None, :] == own[:, None]) & launch.options.own
        later = (chosen & ~is_own).astype(jnp.int32)
        to = jnp.where(is_own, 0, place[:, None] + jnp.cumsum(later, axis=1) - 1)
        # What is not written has a place beyond: an interpreter would write what was there.
        to = jnp.where(chosen, to, launch.options.most)
        written = jnp.broadcast_to(key[None, :], to.shape)
        plgpu.store(index_ref.at[row, head, query[:, None], to], written, mask=chosen)
        return place + later.sum(axis=1), seen + equal.sum(axis=1)

    fold(write, (first, jnp.zeros(queries, jnp.int32)))
    plgpu.store(count_ref.at[row, head, query], k, mask=exists)


def rank_of(score: jax.Array) -> jax.Array:
    """float32 → int32 in the same order, NaN lowest, 0 and −0 equal; above the lowest int32."""
    bits = lax.bitcast_convert_type(between_infinities(score), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


_Search = tuple[jax.Array, jax.Array, jax.Array]
"""The bit to try next, the rank so far, and whether it is known to be exact."""
Fold = Callable[[Callable[..., PyTree], PyTree], PyTree]


def _folds(launch: _Launch, ranked: Callable[..., jax.Array]) -> Fold:
    """A fold of (number of tile, ranks, carry) → carry over the tiles of keys in their order."""
    count = pl.cdiv(launch.n_key, _KEYS)
    if count > _HELD:
        return lambda step, start: lax.fori_loop(
            0, count, lambda n, carry: step(n, ranked(n), carry), start
        )
    held = [ranked(n) for n in range(count)]

    def fold(step: Callable[..., PyTree], carry: PyTree) -> PyTree:
        for number, rank in enumerate(held):
            carry = step(number, rank, carry)
        return carry

    return fold
