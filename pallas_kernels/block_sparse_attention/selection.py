"""Which blocks of keys matter to each block of queries: pooling, scores, the best of each.

Nothing here is differentiated: gradients stop at the choice.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention.block_lists import BlockLists


class PooledScores(NamedTuple):
    """Scores of pairs of blocks, queries·keysᵀ, which are never held all at once.

    Attributes:
      queries: [R, nQ, H, D], a vector for each block of queries.
      keys: [R, nK, H, D], a vector for each block of keys.
    """

    queries: jax.Array
    keys: jax.Array


class BlockSegments(NamedTuple):
    """Segments of blocks: blocks of different segments never meet.

    Attributes:
      queries: [R, nQ] int32, the segment of each block of queries; negative for padding.
      keys: [R, nK] int32, likewise of keys.
    """

    queries: jax.Array
    keys: jax.Array


@partial(jax.jit, static_argnames="block")
def pool_blocks(x: jax.Array, tokens: jax.Array, *, block: int) -> jax.Array:
    """Mean of each block over its valid tokens.

    Args:
      x: [R, S, H, D].
      tokens: [R, N] integers, valid tokens of each block, which are its first.
      block: tokens of a block; N = ⌈S/block⌉.

    Returns:
      [R, N, H, D] float32, 0 for blocks without a valid token; no gradient.

    Raises:
      ValueError: the shapes do not fit.
    """
    rows, length, heads, width = x.shape
    if tokens.shape != (rows, -(-length // block)):
        raise ValueError(
            f"pool_blocks: tokens is {tokens.shape}; for x {x.shape} in blocks of {block} it must "
            f"be {(rows, -(-length // block))}"
        )
    x = jax.lax.stop_gradient(x)
    padded = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    blocks = padded.reshape(rows, -1, block, heads, width)
    valid = jnp.arange(block) < tokens[..., None]
    total = jnp.where(valid[..., None, None], blocks, 0).sum(axis=2, dtype=jnp.float32)
    return total / jnp.maximum(tokens, 1)[..., None, None]


@partial(jax.jit, static_argnames=("k_max", "query_block", "key_block", "own"))
def top_k_blocks(
    scores: PooledScores | jax.Array,
    k: jax.Array | int,
    segments: BlockSegments,
    query_tokens: jax.Array,
    key_tokens: jax.Array,
    *,
    k_max: int,
    query_block: int = 64,
    key_block: int = 64,
    own: bool = True,
) -> BlockLists:
    """The lists of the k best blocks of keys in the segment of each block of queries.

    Memory is O(nQ·k_max) beside what is given: pooled scores are computed for some blocks of
    queries at a time.

    Args:
      scores: pooled, or [R, H, nQ, nK].
      k: most blocks of a list, for all heads, or integers [H] or [R, H]; at least 1 and at most
        k_max. A list is no longer than its segment has blocks of keys.
      segments: of the blocks.
      query_tokens: [R, nQ] int32, valid tokens of each block of queries.
      key_tokens: [R, nK] int32, valid tokens of each block of keys.
      k_max: length that lists may have.
      query_block: tokens of a block of queries.
      key_block: tokens of a block of keys.
      own: whether a list begins with the block of keys that holds the first of its own tokens, as
        in self-attention.

    Returns:
      The blocks of highest score, the lower number among equals; no gradient. Lists are ascending
      behind their own block, so that programs that run at the same time read the same keys.
    """
    scores, k = jax.lax.stop_gradient((scores, k))
    rows, n_query = query_tokens.shape
    n_key = key_tokens.shape[1]
    heads = scores.queries.shape[2] if isinstance(scores, PooledScores) else scores.shape[1]
    most = min(k_max, n_key)
    k = jnp.broadcast_to(jnp.asarray(k, jnp.int32), (rows, heads))[..., None]
    usable = jnp.where(key_tokens > 0, segments.keys, -1)

    def of_chunk(chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Lists [R, H, C, k_max] and counts [R, H, C] of the blocks of queries [C]."""
        place = jnp.minimum(chunk, n_query - 1)
        if isinstance(scores, PooledScores):
            queries = scores.queries[:, place]
            found = jnp.einsum("rqhd,rkhd->rhqk", queries, scores.keys)
        else:
            found = scores[:, :, place]
        segment = jnp.where(query_tokens > 0, segments.queries, -1)[:, place]
        same = (segment[..., None] == usable[:, None, :]) & (segment >= 0)[..., None]
        found = jnp.where(same[:, None], found.astype(jnp.float32), -jnp.inf)
        if own:
            mine = place * query_block // key_block
            is_own = jnp.arange(n_key) == mine[:, None]
            found = jnp.where(is_own & same[:, None], jnp.inf, found)
        _, index = jax.lax.top_k(found, most)
        count = jnp.minimum(same.sum(axis=-1, dtype=jnp.int32)[:, None], k)
        count = jnp.minimum(count, most)
        return _ascending(index.astype(jnp.int32), count, first=int(own)), count

    size = max(1, min(n_query, n_query * most // n_key))
    chunks = jnp.arange(-(-n_query // size) * size).reshape(-1, size)
    index, count = jax.lax.map(of_chunk, chunks)
    index = jnp.moveaxis(index, 0, 2).reshape(rows, heads, -1, most)[:, :, :n_query]
    count = jnp.moveaxis(count, 0, 2).reshape(rows, heads, -1)[:, :, :n_query]
    return BlockLists(
        jnp.pad(index, ((0, 0), (0, 0), (0, 0), (0, k_max - most))),
        count,
        query_tokens,
        key_tokens,
        query_block,
        key_block,
    )


def _ascending(index: jax.Array, count: jax.Array, first: int) -> jax.Array:
    """Lists [..., k] of lengths [...], ascending behind the first entries, then zeros."""
    valid = jnp.arange(index.shape[-1]) < count[..., None]
    rest = jnp.where(valid, index, jnp.iinfo(jnp.int32).max)[..., first:]
    ordered = jnp.concatenate([index[..., :first], jnp.sort(rest, axis=-1)], axis=-1)
    return jnp.where(valid, ordered, 0)
