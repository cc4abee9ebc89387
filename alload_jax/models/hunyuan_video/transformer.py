"""HunyuanVideo's diffusion transformer, for latents of any number of frames, height and width."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.joint_rows import bucketed_joint_rows, packed_joint_rows
from alload_jax.models.common.output import Output
from alload_jax.models.common.patches import patchify, unpatchify
from alload_jax.models.common.remat import rematerialise
from alload_jax.models.common.rotary import RotaryTable, grid_positions, rotary_table
from alload_jax.models.common.segments import PackedMetadata
from alload_jax.models.hunyuan_video.block import Block, Context, Head, Streams
from alload_jax.models.hunyuan_video.config import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.embedding import ConditionEmbedding, TimeEmbedding
from pallas_kernels import Segmentation, segmentation


class HunyuanVideoTransformer(nnx.Module):
    """The transformer. Parameters are float32; those of the blocks are stacked over layers."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        self.config = config
        dim, dtype = config.dim, config.compute_dtype
        volume = math.prod(config.patch_size)
        self.patch_embedding = nnx.Linear(volume * config.in_channels, dim, dtype=dtype, rngs=rngs)
        self.time_embedding = TimeEmbedding(dim, rngs=rngs)
        self.condition_embedding = ConditionEmbedding(config, rngs=rngs)
        self.blocks = nnx.vmap(lambda keys: Block(config, rngs=keys))(rngs.split(config.num_layers))
        self.head = Head(config, volume, rngs=rngs)

    def __call__(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: Any,
        sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """Returns the velocity of `forward`."""
        return self.forward(latents, timestep, condition, sharding).velocity

    def forward(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: Any,
        sharding: NamedSharding | None = None,
    ) -> Output:
        """See `Model.forward`; with text, the condition is `ConditionTokens` by name."""
        patch = self.config.patch_size
        frames, height, width = latents.shape[1:4]
        grid = (frames // patch[0], height // patch[1], width // patch[2])
        rotary = self._rotary(grid_positions(*grid), grid)
        velocity = self._transform(
            patchify(latents, patch), timestep, condition, rotary, sharding, None
        )
        shape = (*latents.shape[:-1], self.config.latent_channels)
        return Output(unpatchify(velocity, shape, patch), {})

    def forward_packed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        metadata: PackedMetadata,
        timestep: jax.Array,
        condition: Any,
        sharding: NamedSharding | None = None,
    ) -> Output:
        """See `Model.forward_packed`; it computes the same function of each sample as `forward`.

        Behind the tokens of each sample the rows have room for those of its condition.

        Raises:
          NotImplementedError: attention cannot run on packed rows.
        """
        rotary = self._rotary(positions, metadata.grid)
        velocity = self._transform(tokens, timestep, condition, rotary, sharding, metadata)
        return Output(velocity, {})

    def _rotary(self, positions: jax.Array, limits: tuple[int, int, int]) -> RotaryTable:
        config = self.config
        theta, sizes = config.rotary_theta, config.rotary_sizes
        return rotary_table(positions, limits, config.head_dim, theta, sizes)

    def _transform(
        self,
        tokens: jax.Array,
        timestep: jax.Array,
        condition: Any,
        rotary: RotaryTable,
        sharding: NamedSharding | None,
        packed: PackedMetadata | None,
    ) -> jax.Array:
        """Velocity [B, S, output patch_dim] float32 of tokens [B, S, patch_dim]."""
        dtype = self.config.stream_dtype
        by_sample = timestep[:, None] if packed is None else timestep
        embedded, segments = self.condition_embedding(condition, by_sample, packed, sharding)
        by_segment: list[Segmentation | None] = [None, None]
        if packed is None:
            rows = bucketed_joint_rows(tokens.shape[1], segments)
        else:
            assert segments is not None
            rows = packed_joint_rows(packed, segments, sharding)
            both, slots, dim = (packed.tokens, segments), timestep.shape[1], self.config.dim
            by_segment = [segmentation(each.ids, slots, dim, sharding) for each in both]
        time = nnx.silu(self.time_embedding(timestep))
        context = Context(time, rotary, rows, tuple(by_segment), sharding)
        x = Streams(self.patch_embedding(tokens).astype(dtype), embedded.astype(dtype))
        graph, layers = nnx.split(self.blocks)

        def apply_layer(x: Streams, layer: nnx.State) -> tuple[Streams, None]:
            return nnx.merge(graph, layer)(x, context), None

        x, _ = jax.lax.scan(rematerialise(apply_layer, self.config.remat), x, layers)
        return self.head(x.video, context).astype(jnp.float32)
