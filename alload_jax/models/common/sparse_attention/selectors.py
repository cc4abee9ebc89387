"""What says which blocks of keys matter to a block of queries.

A selector gives every token features, for each head. The score of two blocks is the product of
their mean features.
"""

from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.rotary import RotaryTable, apply_rotary
from alload_jax.models.common.single_row import split_single_row
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.tile_layout import TileLayout, whole_blocks
from pallas_kernels.block_sparse_attention import PooledScores


class Features(NamedTuple):
    """Of each token as a query and as a key, [R, S, num_heads, F] each."""

    query: jax.Array
    key: jax.Array


class TokensOfLayer(NamedTuple):
    """What a selector may look at; no gradient reaches it.

    Attributes:
      x: [R, S, width], input of the layer's attention.
      query: [R, S, num_heads, head_dim], normed and rotated.
      key: [R, S, num_heads, head_dim], likewise.
      rotary: cosines and sines of the tokens' positions, [S, head_dim // 2] or
        [R, S, head_dim // 2] each.
      sharding: of the rows over a mesh of Auto axes.
    """

    x: jax.Array
    query: jax.Array
    key: jax.Array
    rotary: RotaryTable
    sharding: NamedSharding | None


class Selector(Protocol):
    """Gives the features of a layer's tokens; None where scores do not depend on them."""

    def __call__(self, tokens: TokensOfLayer) -> Features | None:
        """Features of all tokens."""
        ...


def make_selector(
    config: SparseAttentionConfig, width: int, num_heads: int, dtype: jnp.dtype, rngs: nnx.Rngs
) -> Selector:
    """The selector of a layer.

    Args:
      config: its config.
      width: of the layer's input.
      num_heads: of its attention.
      dtype: in which features are computed.
      rngs: for the predictor's initial projections.
    """
    if config.selector == "predictor":
        return Predictor(width, num_heads, config.rank, dtype, rngs=rngs)
    return own_heads if config.selector == "pooled" else no_features


def own_heads(tokens: TokensOfLayer) -> Features:
    """Queries and keys themselves (as VSA's coarse stage, arXiv 2505.13389)."""
    return Features(*jax.lax.stop_gradient((tokens.query, tokens.key)))


def no_features(tokens: TokensOfLayer) -> None:
    """Of the controls."""


class Predictor(nnx.Module):
    """Low-rank projections of the layer's input (DSV, section 4.1), rotated by position.

    Attention depends on positions through the rotation of queries and keys alone. Projections are
    therefore rotated too, at evenly spaced frequencies of the model's.
    """

    def __init__(self, width: int, num_heads: int, rank: int, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        linear = partial(nnx.Linear, width, num_heads * rank, use_bias=False, dtype=dtype)
        self.query, self.key = linear(rngs=rngs), linear(rngs=rngs)

    def __call__(self, tokens: TokensOfLayer) -> Features:
        """See `Selector`; differentiable in the projections alone."""
        x = jax.lax.stop_gradient(tokens.x)
        pairs = self.query.out_features // (2 * self.num_heads)
        columns = jnp.arange(pairs) * tokens.rotary[0].shape[-1] // pairs
        rotary = [
            jnp.broadcast_to(part[..., columns], (*x.shape[:2], pairs)) for part in tokens.rotary
        ]

        def features(linear: nnx.Linear) -> jax.Array:
            def of_tokens(x: jax.Array, *rotary: jax.Array) -> jax.Array:
                return apply_rotary(linear(x).reshape(*x.shape[:2], self.num_heads, -1), rotary)

            return split_single_row(of_tokens, tokens.sharding, x, *rotary)

        return Features(features(self.query), features(self.key))


def block_scores(
    config: SparseAttentionConfig,
    features: Features | None,
    layout: TileLayout,
    heads: jax.Array,
    key: jax.Array,
) -> PooledScores | jax.Array:
    """Scores of all pairs of blocks, as `top_k_blocks` takes them.

    Args:
      config: its selector.
      features: of the tokens, in the order of the rows.
      layout: of the tiles.
      heads: [H] int32, the number of each head in the layer.
      key: of random scores.
    """
    if features is not None:
        pooled = (_means(each, layout) for each in features)
        return PooledScores(*pooled)
    rows, blocks = layout.tokens.shape
    if config.selector == "all":
        nothing = jnp.zeros((rows, blocks, len(heads), 1))
        return PooledScores(nothing, nothing)

    def random(row: jax.Array, head: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, row), head)
        return jax.random.uniform(own, (blocks, blocks), jnp.float32)

    of_row = jax.vmap(random, (None, 0))
    return jax.vmap(of_row, (0, None))(jnp.arange(rows), heads)


def _means(features: jax.Array, layout: TileLayout) -> jax.Array:
    """[R, S, H, F] → [R, N, H, F] float32; differentiable."""
    total = whole_blocks(features, layout).sum(axis=2, dtype=jnp.float32)
    return total / jnp.maximum(layout.tokens, 1)[..., None, None]
