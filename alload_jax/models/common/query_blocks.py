"""Splits long rows of queries for attention to few keys, so that cuDNN's backward fills a GPU."""

import jax
import jax.numpy as jnp

_KEY_BLOCK = 128
"""Keys of a block in cuDNN's backward."""
_LEAST_PARTS = 528
"""Blocks of keys times rows and heads that fill a GPU: four for each of 132 multiprocessors."""
_FEW_KEYS = 8
"""Queries for each key from which on they are split."""


def query_blocks(query: jax.Array, key: jax.Array, shards: int = 1) -> int:
    """Into how many blocks of queries attention to few keys is split.

    cuDNN's backward divides its work by blocks of keys, rows and heads. A long row's
    cross-attention has so few of them that most of a GPU would wait.

    Args:
      query: [B, S, num_heads, head_dim].
      key: [B, T, num_heads, head_dim].
      shards: devices that the rows are split over.
    """
    rows, queries, heads, _ = query.shape
    keys = key.shape[1]
    parts = max(1, rows // shards) * heads * -(-keys // _KEY_BLOCK)
    wanted = -(-_LEAST_PARTS // parts)
    if keys % 2 or queries < _FEW_KEYS * keys:
        return 1
    fitting = [
        blocks
        for blocks in range(1, 2 * wanted + 1)
        if queries % (2 * blocks) == 0 and queries // blocks >= keys
    ]
    enough = [blocks for blocks in fitting if blocks >= wanted]
    return min(enough, default=max(fitting, default=1))


def in_query_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, blocks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of which each has a block of queries and all keys: [B·blocks, S / blocks, ...]."""
    if blocks == 1:
        return query, key, value
    rows, queries, *heads = query.shape
    shape = (rows * blocks, queries // blocks, *heads)
    repeated_key, repeated_value = (jnp.repeat(part, blocks, axis=0) for part in (key, value))
    return query.reshape(shape), repeated_key, repeated_value
