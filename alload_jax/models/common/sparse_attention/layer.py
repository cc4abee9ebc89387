"""The self-attention of a layer: dense or sparse, as its state says."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.remat import BLOCK_LISTS
from alload_jax.models.common.rotary import RotaryTable
from alload_jax.models.common.sparse_attention import switching
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.sparse_attention.layout import TileLayout, from_tiles, to_tiles
from alload_jax.models.common.sparse_attention.profile import Profile, profile, sample_attention
from alload_jax.models.common.sparse_attention.selectors import SelectorInputs, make_selector
from alload_jax.models.common.sparse_attention.switching import Switch
from alload_jax.sharding.mesh import TENSOR
from pallas_kernels.block_sparse_attention import (
    BlockLists,
    block_sparse_attention,
    full_lists,
    top_k_blocks,
)


class RowsOfLayer(NamedTuple):
    """What the attention of a layer is given.

    Attributes:
      x: [R, S, width], input of the attention.
      heads: query, key and value, [R, S, num_heads, head_dim] each.
      rotary: table that queries and keys were rotated by, [S, ...] or [R, S, ...].
      layout: tiles of the rows; None for rows whose attention is always dense.
      samples: shape of the auxiliary values, (R,), or (R, M) for packed rows.
      sharding: of the rows over a mesh of Auto axes.
    """

    x: jax.Array
    heads: tuple[jax.Array, jax.Array, jax.Array]
    rotary: RotaryTable
    layout: TileLayout | None
    samples: tuple[int, ...]
    sharding: NamedSharding | None


class SparseSelfAttention(nnx.Module):
    """Attention of a layer's queries to its keys, after projection and rotation."""

    def __init__(
        self, config: SparseAttentionConfig, width: int, num_heads: int, *, rngs: nnx.Rngs
    ):
        self.config = config
        self.switch = Switch(config, num_heads)
        self.selector = make_selector(config, width, num_heads, rngs)

    def __call__(
        self, rows: RowsOfLayer, dense: Callable[..., jax.Array]
    ) -> tuple[jax.Array, Auxiliary]:
        """Attends, and measures every few steps.

        Args:
          rows: the layer's input.
          dense: computes dense attention from query, key and value.

        Returns:
          [R, S, num_heads, head_dim]; auxiliary values of each sample.
        """
        heads = rows.heads
        if rows.layout is None:
            return dense(*heads), self._auxiliary(rows, None)
        step, layer = self.switch.step[...], self.switch.layer[...]
        layout = rows.layout.of_rows(len(rows.x))
        tokens = rows.x.shape[:2]
        rotary = tuple(jnp.broadcast_to(x, (*tokens, x.shape[-1])) for x in rows.rotary)
        inputs = SelectorInputs(rows.x, heads[0], heads[1], layout, rotary, step, layer)
        found = self._profile(inputs)
        output = jax.lax.cond(
            self.switch.sparse[...],
            lambda heads: self._sparse(inputs, heads, rows.sharding),
            lambda heads: dense(*heads),
            heads,
        )
        return output, self._auxiliary(rows, found)

    def _profile(self, inputs: SelectorInputs) -> tuple[jax.Array, Profile] | None:
        """Whether this step measures, and what it finds; None where nothing ever does."""
        config = self.config
        if config.forced is not None and config.selector != "predictor":
            return None
        rows, _, num_heads, _ = inputs.query.shape

        def measure(inputs: SelectorInputs) -> Profile:
            inputs = _in_tiles(inputs)
            sample = sample_attention(inputs.query, inputs.key, inputs.layout, inputs.step, config)
            trained = config.selector == "predictor"
            return profile(sample, self.selector(inputs), config.coverage, trained)

        def nothing(inputs: SelectorInputs) -> Profile:
            per_head = jnp.zeros((rows, num_heads))
            return Profile(per_head, per_head, jnp.zeros(rows))

        due = inputs.step % config.profile_every == 0
        return due, jax.lax.cond(due, measure, nothing, inputs)

    def _sparse(
        self,
        inputs: SelectorInputs,
        heads: tuple[jax.Array, jax.Array, jax.Array],
        sharding: NamedSharding | None,
    ) -> jax.Array:
        inputs = _in_tiles(inputs)
        query, key, value = (to_tiles(each, inputs.layout) for each in heads)
        lists = self._lists(inputs)
        if sharding is not None:
            heads_axis = TENSOR if TENSOR in sharding.mesh.shape else None
            spec = jax.P(sharding.spec[0], None, heads_axis, None)
            sharding = NamedSharding(sharding.mesh, spec)
        output = block_sparse_attention(query, key, value, lists, sharding=sharding)
        return from_tiles(output, inputs.layout)

    def _lists(self, inputs: SelectorInputs) -> BlockLists:
        """The chosen blocks, named so that a recomputed layer cannot choose otherwise."""
        layout, num_heads = inputs.layout, inputs.query.shape[2]
        size, blocks = layout.block, layout.blocks
        if self.config.selector == "all":
            return full_lists(layout.tokens, layout.tokens, num_heads, size, size)
        number = jnp.ceil(self.switch.density[...] * blocks).astype(jnp.int32)
        most = min(blocks, math.ceil(self.config.longest_density * blocks))
        lists = top_k_blocks(
            self.selector(inputs),
            jnp.clip(number, 1, most),
            layout.block_segments,
            layout.tokens,
            layout.tokens,
            k_max=most,
            query_block=size,
            key_block=size,
        )
        return jax.tree.map(lambda each: checkpoint_name(each, BLOCK_LISTS), lists)

    def _auxiliary(self, rows: RowsOfLayer, found: tuple[jax.Array, Profile] | None) -> Auxiliary:
        samples, num_heads = rows.samples, rows.heads[0].shape[2]
        per_head, none = jnp.zeros((*samples, num_heads)), jnp.zeros(samples)
        due, measured = found or (jnp.zeros((), bool), Profile(per_head, per_head, none))
        auxiliary = {
            switching.PROFILED: jnp.broadcast_to(due.astype(jnp.float32), samples),
            switching.SPARSITY: measured.sparsity,
            switching.RECALL: measured.recall,
        }
        if self.config.selector == "predictor":
            auxiliary[switching.PREDICTOR_LOSS] = measured.loss
        return auxiliary


def _in_tiles(inputs: SelectorInputs) -> SelectorInputs:
    """With queries and keys in tiles, and nothing that a gradient passes through."""
    inputs = jax.tree.map(jax.lax.stop_gradient, inputs)
    query, key = (to_tiles(each, inputs.layout) for each in (inputs.query, inputs.key))
    return inputs._replace(query=query, key=key)
