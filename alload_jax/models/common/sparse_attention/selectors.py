"""Says which blocks of keys matter to a block of queries, and how sparse attention is.

A selector gives every token features, for each head. The score of two blocks is the product of
their mean features.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.attention import sum_of_parts
from alload_jax.models.common.parts import split_single_row
from alload_jax.models.common.segments import TileLayout, whole_blocks
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.sublayers import RotaryTable, apply_rotary
from pallas_kernels.block_sparse_attention import PooledScores, scores_of


class Features(NamedTuple):
    """Of each token as a query and as a key, [R, S, num_heads, F] each."""

    query: jax.Array
    key: jax.Array


class PartOfGroup(NamedTuple):
    """The queries of some ranks of a context group, whose keys are those of the group.

    Attributes:
      layout: of the blocks that hold them.
      first: int32, number of the first of these blocks among the group's.
      exchanged: static, how many neighbouring ranks exchange heads and have these queries together.
    """

    layout: TileLayout
    first: jax.Array
    exchanged: int

    def cut(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an array of all blocks of the group."""
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.layout.blocks, axis)

    def of_group(self, totals: jax.Array, blocks: int) -> jax.Array:
        """Sums of the group's blocks from those of each part's, [1, N, ...]."""
        whole = jnp.zeros((1, blocks, *totals.shape[2:]), totals.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(whole, totals, self.first, axis=1)
        return sum_of_parts(whole, self.exchanged)


class Predictor(nnx.Module):
    """Low-rank projections of the layer's input (DSV, section 4.1), rotated by position.

    Attention depends on positions through the rotation of queries and keys alone. Projections are
    therefore rotated too, at evenly spaced frequencies of the model's.
    """

    def __init__(self, width: int, num_heads: int, rank: int, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        linear = partial(nnx.Linear, width, num_heads * rank, use_bias=False, dtype=dtype)
        self.query, self.key = linear(rngs=rngs), linear(rngs=rngs)

    def __call__(
        self, x: jax.Array, rotary: RotaryTable, sharding: NamedSharding | None
    ) -> Features:
        """Features of all tokens, differentiable in the projections alone.

        Args:
          x: [R, S, width], input of the layer's attention.
          rotary: cosines and sines of the tokens' positions, [S, head_dim // 2] or
            [R, S, head_dim // 2] each.
          sharding: of the rows over a mesh of Auto axes.
        """
        x = jax.lax.stop_gradient(x)
        pairs = self.query.out_features // (2 * self.num_heads)
        columns = jnp.arange(pairs) * rotary[0].shape[-1] // pairs
        tables = [jnp.broadcast_to(part[..., columns], (*x.shape[:2], pairs)) for part in rotary]

        def features(linear: nnx.Linear) -> jax.Array:
            def of_tokens(x: jax.Array, *rotary: jax.Array) -> jax.Array:
                return apply_rotary(linear(x).reshape(*x.shape[:2], self.num_heads, -1), rotary)

            return split_single_row(of_tokens, sharding, x, *tables)

        return Features(features(self.query), features(self.key))


def block_scores(
    config: SparseAttentionConfig,
    features: Features | None,
    layout: TileLayout,
    heads: jax.Array,
    key: jax.Array,
    part: PartOfGroup | None = None,
) -> PooledScores | jax.Array:
    """Scores of all pairs of blocks, as `top_k_blocks` takes them.

    Args:
      config: its selector.
      features: of the tokens, in the order of the rows.
      layout: of the tiles.
      heads: [H] int32, the number of each head in the layer.
      key: of random scores.
      part: which queries the features are of; None for those of the rows.
    """
    if features is not None:
        tokens = jnp.maximum(layout.tokens, 1)[..., None, None]
        queries = layout if part is None else part.layout
        asking, asked = (
            whole_blocks(x, tiles).sum(axis=2, dtype=jnp.float32)
            for x, tiles in zip(features, (queries, layout), strict=True)
        )
        if part is not None:
            asking = part.of_group(asking, layout.blocks)
        return PooledScores(asking / tokens, asked / tokens)
    rows, blocks = layout.tokens.shape
    if config.selector == "all":
        nothing = jnp.zeros((rows, blocks, len(heads), 1))
        return PooledScores(nothing, nothing)

    def random(row: jax.Array, head: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, row), head)
        return jax.random.uniform(own, (blocks, blocks), jnp.float32)

    of_row = jax.vmap(random, (None, 0))
    return jax.vmap(of_row, (0, None))(jnp.arange(rows), heads)


_COSINE, _NORM = 0.95, 0.05
"""Weights of the two parts of the predictor's loss (DSV, section 4.1)."""
_LEAST = 1e-6
"""Masses are taken to be at least this; the logarithm of less says nothing."""


class Sample(NamedTuple):
    """Attention of sampled blocks of queries, by blocks of keys.

    Attributes:
      block: [R, Q] int32, the sampled blocks of queries.
      mass: [R, num_heads, Q, N] float32, share of a block's attention that each block of keys
        holds, mean over its queries; a row's sum is 1, or 0 for blocks without a query.
      usable: [R, Q, N] bool, blocks of keys of the same segment.
    """

    block: jax.Array
    mass: jax.Array
    usable: jax.Array


class Profile(NamedTuple):
    """What one measurement found of each segment, means over its sampled blocks of queries.

    Attributes:
      found: [R, M] float32, 1 for segments of which a block was sampled, else 0, as their values.
      sparsity: [R, M, num_heads], share of the blocks of keys that are not critical.
      recall: [R, M, num_heads], attention that the selector's best blocks hold over what the best
        blocks hold, as many as are critical.
      loss: [R, M, num_heads], the predictor's loss; 0 for scores that are not trained.
    """

    found: jax.Array
    sparsity: jax.Array
    recall: jax.Array
    loss: jax.Array


def sample_attention(
    query: jax.Array,
    key: jax.Array,
    layout: TileLayout,
    measured: jax.Array,
    config: SparseAttentionConfig,
) -> Sample:
    """Exact attention of evenly spaced blocks of queries, others in each measurement.

    Args:
      query: [R, N, block, num_heads, head_dim], in tiles.
      key: [R, N, block, num_heads, head_dim], in tiles.
      layout: of the tiles.
      measured: int32 scalar, number of measurements before this one.
      config: its `profile_blocks`.
    """
    number = min(config.profile_blocks, layout.blocks)

    def of_row(query: jax.Array, key: jax.Array, tokens: jax.Array, segments: jax.Array) -> Sample:
        used = jnp.maximum(jnp.sum(tokens > 0), 1)
        chosen = (jnp.arange(number) * used // number + measured) % used
        within = jnp.arange(query.shape[1])

        def of_block(block: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Mass [num_heads, N] and usable blocks [N] of a block of queries."""
            usable = (segments == segments[block]) & (segments >= 0) & (tokens > 0)
            seen = usable[:, None] & (within < tokens[:, None])
            logits = jnp.einsum(
                "shd,nthd->hsnt", query[block], key, preferred_element_type=jnp.float32
            )
            logits = jnp.where(seen, logits / math.sqrt(query.shape[-1]), -jnp.inf)
            top = jnp.max(logits, axis=(-2, -1), keepdims=True)
            weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0)).sum(axis=-1)
            total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
            by_block = weights / total
            counted = (within < tokens[block])[None, :, None]
            mean = jnp.where(counted, by_block, 0).sum(axis=1) / jnp.maximum(tokens[block], 1)
            return mean, usable

        return Sample(chosen, *jax.lax.map(of_block, chosen))

    query, key = jax.lax.stop_gradient((query, key))
    sample = jax.vmap(of_row)(query, key, layout.tokens, layout.segments)
    return sample._replace(mass=jnp.moveaxis(sample.mass, 1, 2))


def profile(
    sample: Sample,
    scores: PooledScores | jax.Array,
    segments: jax.Array,
    config: SparseAttentionConfig,
) -> Profile:
    """What a sample says about sparsity and about a selector.

    Args:
      sample: attention of some blocks of queries.
      scores: the selector's, of all blocks.
      segments: [R, Q, M] bool, the segment of each sampled block.
      config: its `coverage`, and whether its selector is trained.
    """
    mass, usable = sample.mass, sample.usable[:, None]

    found = jax.vmap(lambda row, block: scores_of(jax.tree.map(lambda x: x[None], row), block)[0])(
        scores, sample.block
    )
    falling = jnp.sort(mass, axis=-1, descending=True)
    before = jnp.cumsum(falling, axis=-1) - falling
    critical = ((before < config.coverage) & (falling > 0)).sum(axis=-1)
    share = critical / jnp.maximum(usable.sum(axis=-1), 1)
    order = jnp.argsort(jnp.where(usable, -found, jnp.inf), axis=-1)
    chosen = jnp.arange(mass.shape[-1]) < critical[..., None]
    held = jnp.where(chosen, jnp.take_along_axis(mass, order, axis=-1), 0).sum(axis=-1)
    best = jnp.where(chosen, falling, 0).sum(axis=-1)
    recall = held / jnp.maximum(best, _LEAST)
    trained = config.selector == "predictor"
    loss = _prediction_loss(found, mass, usable) if trained else jnp.zeros_like(share)
    counted = segments & (mass.sum(axis=(1, 3)) > 0)[..., None]
    number = counted.sum(axis=1)

    def mean(value: jax.Array) -> jax.Array:
        """[R, num_heads, Q] → [R, M, num_heads]."""
        total = jnp.where(counted[:, None], value[..., None], 0).sum(axis=2)
        return jnp.moveaxis(total / jnp.maximum(number, 1)[:, None], 1, 2)

    return Profile((number > 0).astype(jnp.float32), mean(1 - share), mean(recall), mean(loss))


def _prediction_loss(found: jax.Array, mass: jax.Array, usable: jax.Array) -> jax.Array:
    """0.95·(1 − cosine) + 0.05·relative error of scores and log-masses, [R, num_heads, Q].

    Both are taken relative to their mean over the usable blocks, which no choice depends on.
    """

    def centred(x: jax.Array) -> jax.Array:
        mean = jnp.where(usable, x, 0).sum(axis=-1) / jnp.maximum(usable.sum(axis=-1), 1)
        return jnp.where(usable, x - mean[..., None], 0)

    found = centred(found)
    target = centred(jnp.log(jnp.maximum(jax.lax.stop_gradient(mass), _LEAST)))
    sizes = [jnp.sqrt((each**2).sum(axis=-1) + _LEAST) for each in (found, target)]
    cosine = (found * target).sum(axis=-1) / (sizes[0] * sizes[1])
    error = jnp.sqrt(((found - target) ** 2).sum(axis=-1) + _LEAST) / sizes[1]
    return _COSINE * (1 - cosine) + _NORM * error
