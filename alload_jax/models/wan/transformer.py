"""Wan's diffusion transformer, for latents of any number of frames, height and width."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.embedding import (
    ImageEmbedding,
    TimestepEmbedding,
    condition_embedding,
)
from alload_jax.models.common.layers import apply_layers
from alload_jax.models.common.output import Output, by_sample
from alload_jax.models.common.parts import BLOCKS, EMBEDDING
from alload_jax.models.common.patches import patchify, unpatchify
from alload_jax.models.common.rotary import RotaryTable, grid_positions, rotary_table
from alload_jax.models.common.segments import PADDING, PackedMetadata
from alload_jax.models.common.sparse_attention import number_layers
from alload_jax.models.common.tile_layout import ClipTiles, TileLayout, clip_tiles
from alload_jax.models.wan.block import Block, Context, Head
from alload_jax.models.wan.config import WanConfig
from pallas_kernels import segmentation


class WanTransformer(nnx.Module):
    """The transformer. Parameters are float32; those of the blocks are stacked over layers."""

    def __init__(self, config: WanConfig, *, rngs: nnx.Rngs):
        self.config = config
        dim, dtype = config.dim, config.compute_dtype
        patch = math.prod(config.patch_size)
        self.patch_embedding = nnx.Linear(patch * config.in_channels, dim, dtype=dtype, rngs=rngs)
        self.time_embedding = TimestepEmbedding(dim, config.freq_dim, rngs=rngs)
        self.condition_embedding = condition_embedding(config, dim, rngs=rngs)
        self.image_embedding = (
            ImageEmbedding(config.image, dim, dtype=dtype, rngs=rngs) if config.image else None
        )
        self.blocks = nnx.vmap(lambda keys: Block(config, rngs=keys))(rngs.split(config.num_layers))
        if config.sparse_attention is not None:
            assert self.blocks.sparse_attention is not None
            switch = self.blocks.sparse_attention.switch
            number_layers(switch, config.sparse_attention, config.num_layers)
        self.head = Head(config, patch * config.latent_channels, rngs=rngs)

    def __call__(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: jax.Array,
        image: jax.Array | None = None,
        sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """Returns the velocity of `forward`."""
        return self.forward(latents, timestep, condition, image, sharding).velocity

    def forward(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: jax.Array,
        image: jax.Array | None = None,
        sharding: NamedSharding | None = None,
        first_frame_timestep: jax.Array | None = None,
    ) -> Output:
        """See `Model.forward`.

        Args:
          latents: [B, frames, height, width, in_channels], multiples of the patch size.
          timestep: [B] float32, 0 (data) to 1000 (noise), or [B, S] for one per token.
          condition: [B, L] int32 classes, `num_classes` for the null class; or text embeddings
            [B, L, text.dim] if the config has `text`.
          image: [B, N, image.dim] image embeddings, if the config has `image`.
          sharding: sharding of rows over a mesh of Auto axes, which kernels need.
          first_frame_timestep: [B] float32, timestep of the first latent frame if it differs (Wan
            2.2's 5B model keeps a given first frame at 0).

        Raises:
          ValueError: an image is given but the config has none, or it is missing.
        """
        self._check_image(image)
        patch = self.config.patch_size
        tokens = patchify(latents, patch)
        frames, height, width = latents.shape[1:4]
        grid = (frames // patch[0], height // patch[1], width // patch[2])
        head_dim = self.config.head_dim
        positions, tiles = grid_positions(*grid), self._tiles(grid)
        if tiles is not None:
            # Nothing but attention depends on the order, so that layers need not move tokens.
            positions, tokens = positions[tiles.order], tokens[:, tiles.order]
            timestep = timestep[:, tiles.order] if timestep.ndim == 2 else timestep
        rotary = rotary_table(positions, grid, head_dim)
        frames_of_token = None
        if first_frame_timestep is not None:
            timestep = jnp.stack([first_frame_timestep, timestep], axis=-1)
            later = (positions[:, 0] > 0).astype(jnp.int32)
            frames_of_token = jnp.broadcast_to(later, tokens.shape[:2])
        velocity, auxiliary = self.transform(
            *(tokens, timestep, condition, image, rotary, sharding),
            layout=None if tiles is None else tiles.layout,
            modulated=frames_of_token,
        )
        if tiles is not None:
            velocity = velocity[:, tiles.place]
        shape = (*latents.shape[:-1], self.config.latent_channels)
        return Output(unpatchify(velocity.astype(jnp.float32), shape, patch), auxiliary)

    def forward_packed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        metadata: PackedMetadata,
        timestep: jax.Array,
        condition: jax.Array,
        image: jax.Array | None = None,
        sharding: NamedSharding | None = None,
        first_frame_timestep: jax.Array | None = None,
    ) -> Output:
        """See `Model.forward_packed`; it computes the same function of each sample as `forward`.

        Raises:
          NotImplementedError: attention cannot run on packed rows.
          ValueError: an image is given but the config has none, or it is missing.
        """
        self._check_image(image)
        modulated = metadata.tokens.ids
        if first_frame_timestep is not None:
            # Each segment has two rows of the modulation table: its first frame, and the others.
            pairs = jnp.stack([first_frame_timestep, timestep], axis=-1)
            timestep = pairs.reshape(len(pairs), -1)
            of_token = 2 * modulated + (positions[..., 0] > 0)
            modulated = jnp.where(modulated == PADDING, PADDING, of_token)
        head_dim = self.config.head_dim
        rotary = rotary_table(positions, metadata.grid, head_dim)
        velocity, auxiliary = self.transform(
            tokens, timestep, condition, image, rotary, sharding, metadata, modulated=modulated
        )
        return Output(velocity.astype(jnp.float32), auxiliary)

    def _check_image(self, image: jax.Array | None) -> None:
        if (image is None) != (self.image_embedding is None):
            raise ValueError(
                f"image is {'missing' if image is None else 'given'}, but model.image is "
                f"{self.config.image}; give image embeddings if and only if it is set"
            )

    def _tiles(self, grid: tuple[int, int, int]) -> ClipTiles | None:
        """Tiles of samples of a size in tokens; None where attention is always dense."""
        sparse = self.config.sparse_attention
        if sparse is None or math.prod(grid) < sparse.min_tokens:
            return None
        return clip_tiles(grid, sparse.block)

    def transform(
        self,
        tokens: jax.Array,
        timestep: jax.Array,
        condition: jax.Array,
        image: jax.Array | None,
        rotary: RotaryTable,
        sharding: NamedSharding | None = None,
        packed: PackedMetadata | None = None,
        layout: TileLayout | None = None,
        modulated: jax.Array | None = None,
    ) -> Output:
        """Applies the transformer to tokens [B, S, patch_dim].

        Args:
          tokens, timestep, condition, image: see `Model.forward` and `Model.forward_packed`.
          rotary: rotary table of the tokens.
          sharding: sharding of rows over a mesh of Auto axes.
          packed: positions of the segments; None if every row is one sample.
          layout: tiles of sparse self-attention in rows of one sample each.
          modulated: [B, S] int32, which timestep of its row a token has, or PADDING; None if a row
            has one timestep, or one per token.

        Returns:
          velocity [B, S, output patch_dim] in the compute dtype; auxiliary values by sample.
        """
        with jax.named_scope(EMBEDDING):
            x = self.patch_embedding(tokens).astype(self.config.stream_dtype)
            time, modulation = self.time_embedding(timestep)
            if self.image_embedding is not None:
                assert image is not None
                image = self.image_embedding(image).reshape(len(tokens), -1, self.config.dim)
            segments = None if packed is None else packed.condition
            embedded = self.condition_embedding(condition, segments)
        by_segment = None
        if modulated is not None:
            by_segment = segmentation(modulated, timestep.shape[1], self.config.dim, sharding)
        context = Context(
            *(modulation, embedded, image, rotary, sharding, packed, by_segment, layout)
        )
        with jax.named_scope(BLOCKS):
            policies, scan = self.config.policies, self.config.scan_layers
            x, stacked = apply_layers(self.blocks, x, context, policies=policies, scan=scan)
        auxiliary = by_sample(stacked, sample_axes=1 if packed is None else 2)
        return Output(self.head(x, time, sharding, by_segment), auxiliary)
