"""What says which blocks of keys matter to a block of queries."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from alload_jax.models.common.rotary import RotaryTable, apply_rotary
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.sparse_attention.layout import TileLayout, to_tiles
from pallas_kernels.block_sparse_attention import PooledScores, pool_blocks


class SelectorInputs(NamedTuple):
    """What a selector may look at; no gradient reaches it.

    Attributes:
      x: [R, S, width], input of the layer's attention, in the order of the row.
      query: [R, N·block, num_heads, head_dim], in tiles.
      key: [R, N·block, num_heads, head_dim], in tiles.
      layout: of the tiles.
      rotary: cosines and sines of the tokens' positions, [R, S, head_dim // 2] each.
      step: int32 scalar, training step.
      layer: int32 scalar, number of the layer.
    """

    x: jax.Array
    query: jax.Array
    key: jax.Array
    layout: TileLayout
    rotary: RotaryTable
    step: jax.Array
    layer: jax.Array


class Selector(Protocol):
    """Scores pairs of blocks; those with the highest score are attended to."""

    def __call__(self, inputs: SelectorInputs) -> PooledScores | jax.Array:
        """Scores as `top_k_blocks` takes them: pooled, or [R, num_heads, N, N]."""
        ...


def make_selector(
    config: SparseAttentionConfig, width: int, num_heads: int, rngs: nnx.Rngs
) -> Selector:
    """The selector of a layer.

    Args:
      config: its config.
      width: of the layer's input.
      num_heads: of its attention.
      rngs: for the predictor's initial projections.
    """
    if config.selector == "predictor":
        return Predictor(width, num_heads, config.rank, rngs=rngs)
    return random_scores if config.selector == "random" else pooled_scores


def pooled_scores(inputs: SelectorInputs) -> PooledScores:
    """Products of mean queries and mean keys (as VSA's coarse stage, arXiv 2505.13389)."""
    tokens, block = inputs.layout.tokens, inputs.layout.block
    pooled = (pool_blocks(x, tokens, block=block) for x in (inputs.query, inputs.key))
    return PooledScores(*pooled)


def random_scores(inputs: SelectorInputs) -> jax.Array:
    """Scores that mean nothing, others in each step and layer: a control."""
    key = jax.random.fold_in(jax.random.key(0), inputs.step)
    rows, _, heads, _ = inputs.query.shape
    blocks = inputs.layout.blocks
    return jax.random.uniform(
        jax.random.fold_in(key, inputs.layer), (rows, heads, blocks, blocks), jnp.float32
    )


class Predictor(nnx.Module):
    """Low-rank projections of the layer's input (DSV, section 4.1), rotated by position.

    Projections are linear, so that the mean input of a block is projected in place of its tokens.
    Attention depends on positions through the rotation of queries and keys alone. Projections are
    therefore rotated too, by the mean rotation of a block's tokens, at evenly spaced frequencies.
    """

    def __init__(self, width: int, num_heads: int, rank: int, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.query = nnx.Linear(width, num_heads * rank, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(width, num_heads * rank, use_bias=False, rngs=rngs)

    def __call__(self, inputs: SelectorInputs) -> PooledScores:
        """Products of projected mean inputs; differentiable in the projections alone."""
        mean = _pooled(inputs.x, inputs.layout)
        pairs = self.query.out_features // (2 * self.num_heads)
        columns = jnp.arange(pairs) * inputs.rotary[0].shape[-1] // pairs
        rotary = tuple(_pooled(part[..., columns], inputs.layout) for part in inputs.rotary)

        def heads(linear: nnx.Linear) -> jax.Array:
            y = linear(mean).reshape(*mean.shape[:2], self.num_heads, -1)
            return apply_rotary(y, rotary)

        return PooledScores(heads(self.query), heads(self.key))


def _pooled(x: jax.Array, layout: TileLayout) -> jax.Array:
    """Means over blocks, [R, S, C] → [R, N, C]; no gradient."""
    tiles = to_tiles(jax.lax.stop_gradient(x), layout)
    return pool_blocks(tiles[:, :, None], layout.tokens, block=layout.block)[:, :, 0]
