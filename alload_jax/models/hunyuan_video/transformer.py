"""HunyuanVideo's diffusion transformer, for latents of any number of frames, height and width."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.joint_rows import bucketed_joint_rows, packed_joint_rows
from alload_jax.models.common.layers import apply_layers
from alload_jax.models.common.output import Output, by_sample
from alload_jax.models.common.parts import BLOCKS, EMBEDDING
from alload_jax.models.common.patches import patchify, unpatchify
from alload_jax.models.common.rotary import RotaryTable, grid_positions, rotary_table
from alload_jax.models.common.segments import PackedMetadata
from alload_jax.models.common.sparse_attention import number_layers
from alload_jax.models.common.tile_layout import Grid, TileLayout, joint_clip_layout
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
        if config.sparse_attention is not None:
            assert self.blocks.sparse_attention is not None
            switch = self.blocks.sparse_attention.switch
            number_layers(switch, config.sparse_attention, config.num_layers)
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
        found = self._transform(
            patchify(latents, patch), timestep, condition, rotary, sharding, grid
        )
        shape = (*latents.shape[:-1], self.config.latent_channels)
        return found._replace(velocity=unpatchify(found.velocity, shape, patch))

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
        return self._transform(tokens, timestep, condition, rotary, sharding, metadata)

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
        samples: PackedMetadata | Grid,
    ) -> Output:
        """Velocity [B, S, output patch_dim] float32 of tokens [B, S, patch_dim].

        Args:
          tokens, timestep, condition: see `Model.forward` and `Model.forward_packed`.
          rotary: rotary table of the tokens.
          sharding: sharding of rows over a mesh of Auto axes.
          samples: positions of the segments, or the size in tokens of rows of one sample each.
        """
        dtype = self.config.stream_dtype
        packed = samples if isinstance(samples, PackedMetadata) else None
        of_samples = timestep[:, None] if packed is None else timestep
        with jax.named_scope(EMBEDDING):
            embedded, segments = self.condition_embedding(condition, of_samples, packed, sharding)
            x = Streams(self.patch_embedding(tokens).astype(dtype), embedded.astype(dtype))
            time = nnx.silu(self.time_embedding(timestep))
        by_segment: list[Segmentation | None] = [None, None]
        if isinstance(samples, PackedMetadata):
            assert segments is not None
            rows = packed_joint_rows(samples, segments, sharding)
            both, slots, dim = (samples.tokens, segments), timestep.shape[1], self.config.dim
            by_segment = [segmentation(each.ids, slots, dim, sharding) for each in both]
        else:
            layout = self._layout(samples, *embedded.shape[:2])
            rows = bucketed_joint_rows(tokens.shape[1], segments, layout)
        context = Context(time, rotary, rows, tuple(by_segment), sharding)
        with jax.named_scope(BLOCKS):
            policies, scan = self.config.policies, self.config.scan_layers
            x, stacked = apply_layers(self.blocks, x, context, policies=policies, scan=scan)
        auxiliary = by_sample(stacked, sample_axes=1 if packed is None else 2)
        return Output(self.head(x.video, context).astype(jnp.float32), auxiliary)

    def _layout(self, grid: Grid, rows: int, condition_tokens: int) -> TileLayout | None:
        """Tiles of rows of a sample each; None where attention is always dense."""
        sparse = self.config.sparse_attention
        if sparse is None or math.prod(grid) < sparse.min_tokens:
            return None
        return joint_clip_layout(grid, sparse.block, condition_tokens).of_rows(rows)
