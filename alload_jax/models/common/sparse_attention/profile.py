"""Measures where the attention of some blocks of queries lies, and how well a selector finds it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.sparse_attention.layout import TileLayout
from pallas_kernels.block_sparse_attention import PooledScores, scores_of

_COSINE, _NORM = 0.95, 0.05
"""Weights of the two parts of the predictor's loss (DSV, section 4.1)."""
_LEAST = 1e-6
"""Masses are taken to be at least this; the logarithm of less says nothing."""


class Sample(NamedTuple):
    """Attention of sampled blocks of queries, by blocks of keys.

    Attributes:
      block: [Q] int32, the sampled blocks of queries.
      mass: [R, num_heads, Q, N] float32, share of a block's attention that each block of keys
        holds, mean over its queries; a row's sum is 1, or 0 for blocks without a query.
      usable: [R, Q, N] bool, blocks of keys of the same sample.
    """

    block: jax.Array
    mass: jax.Array
    usable: jax.Array


class Profile(NamedTuple):
    """What one measurement found, means over the sampled blocks of queries.

    Attributes:
      sparsity: [R, num_heads], share of the blocks of keys that are not critical.
      recall: [R, num_heads], attention that the selector's best blocks hold over what the best
        blocks hold, as many as are critical.
      loss: [R], the predictor's loss; 0 for scores that are not trained.
    """

    sparsity: jax.Array
    recall: jax.Array
    loss: jax.Array


def sample_attention(
    query: jax.Array,
    key: jax.Array,
    layout: TileLayout,
    step: jax.Array,
    config: SparseAttentionConfig,
) -> Sample:
    """Exact attention of evenly spaced blocks of queries, others in each measurement.

    Args:
      query: [R, N·block, num_heads, head_dim], in tiles.
      key: [R, N·block, num_heads, head_dim], in tiles.
      layout: of the tiles.
      step: int32 scalar, training step.
      config: its `profile_blocks` and `profile_every`.
    """
    query, key = jax.lax.stop_gradient((query, key))
    blocks, size = layout.blocks, layout.block
    number = min(config.profile_blocks, blocks)
    chosen = (jnp.arange(number) * blocks // number + step // config.profile_every) % blocks
    within = jnp.arange(size)
    valid = (within < layout.tokens[..., None]).reshape(len(query), -1)

    def of_block(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = jax.lax.dynamic_slice_in_dim(query, block * size, size, axis=1)
        queries = within < layout.tokens[:, block, None]
        usable = (layout.segments == layout.segments[:, block, None]) & (layout.segments >= 0)
        seen = valid & jnp.repeat(usable, size, axis=1)
        logits = jnp.einsum("rshd,rthd->rhst", own, key, preferred_element_type=jnp.float32)
        logits = jnp.where(seen[:, None, None], logits / math.sqrt(query.shape[-1]), -jnp.inf)
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
        total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        by_block = (weights / total).reshape(*logits.shape[:3], blocks, size).sum(axis=-1)
        counted = queries[:, None, :, None]
        mean = jnp.where(counted, by_block, 0).sum(axis=2) / jnp.maximum(counted.sum(axis=2), 1)
        return mean, usable & (layout.tokens > 0)

    mass, usable = jax.lax.map(of_block, chosen)
    return Sample(chosen, jnp.moveaxis(mass, 0, 2), jnp.moveaxis(usable, 0, 1))


def profile(
    sample: Sample, scores: PooledScores | jax.Array, coverage: float, trained: bool
) -> Profile:
    """What a sample says about sparsity and about a selector.

    Args:
      sample: attention of some blocks of queries.
      scores: the selector's, of all blocks.
      coverage: share of the attention that critical blocks hold.
      trained: whether the scores are trained to predict the attention.
    """
    mass, usable = sample.mass, sample.usable[:, None]
    found = scores_of(scores, sample.block)
    falling = jnp.sort(mass, axis=-1, descending=True)
    before = jnp.cumsum(falling, axis=-1) - falling
    critical = ((before < coverage) & (falling > 0)).sum(axis=-1)
    some = mass.sum(axis=-1) > 0
    share = critical / jnp.maximum(usable.sum(axis=-1), 1)
    order = jnp.argsort(jnp.where(usable, -found, jnp.inf), axis=-1)
    chosen = jnp.arange(mass.shape[-1]) < critical[..., None]
    held = jnp.where(chosen, jnp.take_along_axis(mass, order, axis=-1), 0).sum(axis=-1)
    best = jnp.where(chosen, falling, 0).sum(axis=-1)
    loss = _prediction_loss(found, mass, usable) if trained else jnp.zeros_like(share)
    return Profile(
        sparsity=_mean_where(1 - share, some, axis=2),
        recall=_mean_where(held / jnp.maximum(best, _LEAST), some, axis=2),
        loss=_mean_where(loss, some, axis=(1, 2)),
    )


def _prediction_loss(found: jax.Array, mass: jax.Array, usable: jax.Array) -> jax.Array:
    """0.95·(1 − cosine) + 0.05·relative error of scores and log-masses, [R, num_heads, Q].

    Both are taken relative to their mean over the usable blocks, which no choice depends on.
    """
    target = jnp.log(jnp.maximum(jax.lax.stop_gradient(mass), _LEAST))
    found, target = (_centred(each, usable) for each in (found, target))
    sizes = [jnp.sqrt((each**2).sum(axis=-1) + _LEAST) for each in (found, target)]
    cosine = (found * target).sum(axis=-1) / (sizes[0] * sizes[1])
    error = jnp.sqrt(((found - target) ** 2).sum(axis=-1) + _LEAST) / sizes[1]
    return _COSINE * (1 - cosine) + _NORM * error


def _centred(x: jax.Array, usable: jax.Array) -> jax.Array:
    mean = jnp.where(usable, x, 0).sum(axis=-1) / jnp.maximum(usable.sum(axis=-1), 1)
    return jnp.where(usable, x - mean[..., None], 0)


def _mean_where(x: jax.Array, some: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    return jnp.where(some, x, 0).sum(axis=axis) / jnp.maximum(some.sum(axis=axis), 1)
