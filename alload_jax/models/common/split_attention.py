"""Attention over samples that are split between the ranks of a context group.

All-to-alls exchange a rank's split tokens of all heads for all split tokens of some heads and back,
as in DeepSpeed-Ulysses (arXiv 2309.14509). This applies to the first A tokens of each rank's row;
the other tokens attend on their own rank.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from alload_jax.models.common.segments import AttentionSegments, SplitRows
from alload_jax.sharding.mesh import CONTEXT

Within = Callable[[jax.Array, jax.Array, jax.Array, AttentionSegments], jax.Array]
"""(query, key, value, segments) → output, on one device."""


def split_packed(
    within: Within, query: jax.Array, key: jax.Array, value: jax.Array, split: SplitRows
) -> jax.Array:
    """Computes softmax(query·keyᵀ/√head_dim)·value within whole and split segments.

    It must run inside `shard_map`.

    Args:
      within: attention on packed rows of one device.
      query, key, value: [1, T, num_heads, head_dim], the row of one rank; num_heads is divisible by
        the context axis.
      split: positions of the segments.

    Returns:
      [1, T, num_heads, head_dim] in the query's dtype.
    """
    count = split.split_tokens
    q, k, v = (tokens_together(x[:, :count]) for x in (query, key, value))
    outputs = [heads_together(within(q, k, v, split.within_split()))]
    if count < query.shape[1]:
        q, k, v = (x[:, count:] for x in (query, key, value))
        outputs.append(within(q, k, v, split.within_whole()))
    return jnp.concatenate(outputs, axis=1)


def tokens_together(x: jax.Array) -> jax.Array:
    """[1, A, num_heads, head_dim] on each rank → [1, c·A, num_heads / c, head_dim]."""
    return jax.lax.all_to_all(x, CONTEXT, split_axis=2, concat_axis=1, tiled=True)


def heads_together(x: jax.Array) -> jax.Array:
    """Inverts `tokens_together`."""
    return jax.lax.all_to_all(x, CONTEXT, split_axis=1, concat_axis=2, tiled=True)
