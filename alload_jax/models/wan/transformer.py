"""Wan's diffusion transformer, for latents of any size, and its config."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from typing_extensions import override

from alload_jax.errors import InputError, require_fields
from alload_jax.models.common import parts
from alload_jax.models.common.attention import attention
from alload_jax.models.common.config import TransformerConfig
from alload_jax.models.common.embedding import (
    TIMESTEP_SCALE,
    ClassEmbedding,
    ImageEmbedding,
    TextEmbedding,
    TimestepEmbedding,
)
from alload_jax.models.common.layers import StackedTransformer, apply_layers
from alload_jax.models.common.segments import (
    PADDING,
    PackedMetadata,
    TileLayout,
    clip_layout,
    clip_tiles,
    to_tokens,
)
from alload_jax.models.common.sparse_attention.layer import RowsOfLayer, SparseSelfAttention
from alload_jax.models.common.sublayers import (
    AttentionProjections,
    FeedForward,
    NormOptions,
    RotaryTable,
    gated_add,
    grid_positions,
    rotary_table,
)
from alload_jax.planning.analytic import keeps_feed_forward
from alload_jax.planning.remat import RematPolicy
from pallas_kernels import (
    Segmentation,
    layernorm_modulate,
    residual_layernorm_modulate,
    segmentation,
)

_LEAST_SIGMA = 0.05
"""The distance to predicted data counts as the velocity over at least this noise level."""


@dataclass(frozen=True)
class WanConfig(TransformerConfig):
    """Shape and arithmetic of the transformer; `TransformerConfig` has the other fields.

    Attributes:
      family: `wan`.
      qk_norm: whether queries and keys get an RMSNorm over their full width.
      cross_norm: whether an affine LayerNorm precedes cross-attention.
      freq_dim: width of the timestep's sinusoidal embedding.
      eps: epsilon of every norm.
      prediction: what the last layer gives: the velocity, as in Wan; or the data x̂₀, of which the
        velocity is (x_σ − x̂₀) / max(σ, 0.05) (arXiv 2511.13720). For patches of pixels, which have
        about as many values as `dim`: noise fills all of them, and a picture few.
      position_embedding: whether tokens begin with a linear map of the cosines and sines of their
        positions. Rotary attention knows distances only: where a token of mere noise is, it
        cannot tell. For small models that learn from scratch; Wan has none.
    """

    family: Literal["wan"] = "wan"
    qk_norm: bool = True
    cross_norm: bool = True
    freq_dim: int = 256
    eps: float = 1e-6
    prediction: Literal["velocity", "data"] = "velocity"
    position_embedding: bool = False

    later_fields: ClassVar[dict[str, object]] = {
        "family": "wan",
        "text": None,
        "image": None,
        "out_channels": None,
        "qk_norm": True,
        "cross_norm": True,
        "sparse_attention": None,
        "prediction": "velocity",
        "position_embedding": False,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prediction not in ("velocity", "data"):
            raise InputError(f"model.prediction is {self.prediction!r}; choose velocity or data")
        if self.prediction == "data" and self.given_channels:
            raise InputError(
                f"model.prediction is data, but {self.given_channels} of model.in_channels are "
                "given ones; set it to velocity"
            )
        require_fields(
            "model.",
            self,
            "freq_dim",
            lambda value: value >= 2 and value % 2 == 0,
            "even, and at least 2",
        )
        if self.image and not self.text:
            raise InputError("model.image is set without model.text; set both, or neither")

    @property
    @override
    def predicts_velocity(self) -> bool:
        return self.prediction == "velocity"


class Context(NamedTuple):
    """Inputs that all blocks share.

    Attributes:
      modulation: [B, 6, D] float32; [B, S, 6, D] for a timestep per token; [B, M, 6, D] for the
        segments of packed rows.
      condition: [B, L, D] embedded text or classes.
      image: [B, N, D] embedded image, in packed rows [R, M·N, D]; or None.
      rotary: rotary table for the queries and keys of self-attention.
      sharding: sharding of x over a mesh of Auto axes, which kernels need.
      packed: positions of the segments; None if every row is one sample.
      segmentation: tokens of equal modulation, for the norms; None if a row, or each token, has
        its own.
      layout: tiles of sparse self-attention in rows of one sample each; None for dense attention.
      remat: what the layer keeps for the backward pass.
    """

    modulation: jax.Array
    condition: jax.Array
    image: jax.Array | None
    rotary: RotaryTable
    sharding: NamedSharding | None
    packed: PackedMetadata | None = None
    segmentation: Segmentation | None = None
    layout: TileLayout | None = None
    remat: RematPolicy = "none"


class Attention(AttentionProjections):
    """Attention with RMSNorm over the full width of queries and keys."""

    def __init__(self, config: WanConfig, *, with_image: bool = False, rngs: nnx.Rngs):
        dim, dtype = config.dim, config.compute_dtype
        norm_width = dim if config.qk_norm else None
        super().__init__(config, norm_width=norm_width, eps=config.eps, rngs=rngs)
        self.implementation = config.attention
        self.image_key = parts.Linear(dim, dim, dtype=dtype, rngs=rngs) if with_image else None
        self.image_value = parts.Linear(dim, dim, dtype=dtype, rngs=rngs) if with_image else None
        self.image_key_norm = (
            nnx.RMSNorm(dim, epsilon=config.eps, dtype=dtype, rngs=rngs)
            if with_image and config.qk_norm
            else None
        )

    def to_condition(self, x: jax.Array, context: Context) -> jax.Array:
        """x: [B, S, D] attends to the condition and to the image → [B, S, D]."""
        sharding, packed, image = context.sharding, context.packed, context.image
        attend = partial(attention, implementation=self.implementation, sharding=sharding)
        to_text = to_image = None
        if packed is not None:
            to_text = packed.to_condition()
            to_image = None if image is None else packed.to_equal_parts(image.shape[1])
        query, key, value = self.heads(x, context.condition, None, sharding)
        mixed = attend(query, key, value, to_text)
        if image is not None:
            assert self.image_key is not None
            assert self.image_value is not None
            key = self.projected(image, self.image_key, self.image_key_norm, None, sharding)
            value = self.projected(image, self.image_value, None, None, sharding)
            mixed = mixed + attend(query, key, value, to_image)
        return self.output(mixed, sharding)


class Block(nnx.Module):
    """Self-attention, cross-attention to the condition and feed-forward, modulated by the timestep.

    The order of norms, gates and plain additions is Wan 2.1's. The residual stream has the
    config's `stream_dtype`; the inputs of attention and feed-forward have its `compute_dtype`.
    """

    def __init__(self, config: WanConfig, *, rngs: nnx.Rngs):
        self.dtype = config.compute_dtype
        self.norm_options: NormOptions = {"eps": config.eps, "implementation": config.norm}
        self.modulation = nnx.Param(jnp.zeros((6, config.dim), jnp.float32))
        self.self_attention = Attention(config, rngs=rngs)
        self.cross_norm = (
            parts.layer_norm(config.dim, config.eps, dtype=self.dtype, rngs=rngs)
            if config.cross_norm
            else None
        )
        self.cross_attention = Attention(config, with_image=config.image is not None, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        # Last, so that all other parameters are drawn as without it.
        self.sparse_attention = (
            SparseSelfAttention(config, rngs=rngs) if config.sparse_attention else None
        )

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, parts.Auxiliary]:
        """x: [B, S, D] in `stream_dtype` → output like x, and the layer's auxiliary values."""
        with jax.named_scope(parts.NORM):
            shift1, scale1, gate1, shift2, scale2, gate2 = jnp.unstack(
                self.modulation[...] + context.modulation, axis=-2
            )
        sharding = context.sharding
        options = self.norm_options | {"sharding": sharding}
        if context.segmentation is not None:
            options["segment_ids"] = context.segmentation
        with jax.named_scope(parts.NORM):
            x, y = residual_layernorm_modulate(x, None, None, scale1, shift1, **options)
            y = checkpoint_name(y.astype(self.dtype), parts.NORM_OUTPUT)
        y, auxiliary = self._self_attention(y, context)
        x, y = self._before_cross_attention(x, y, gate1, options)
        y = checkpoint_name(y, parts.NORM_OUTPUT)
        with jax.named_scope(parts.CROSS_ATTENTION):
            y = self.cross_attention.to_condition(y, context)
        with jax.named_scope(parts.NORM):
            x, y = residual_layernorm_modulate(x, y, None, scale2, shift2, **options)
            y = checkpoint_name(y, parts.NORM_OUTPUT)
        y = self.feed_forward(y, sharding, output_kept=keeps_feed_forward(context.remat))
        return gated_add(x, y, gate2, options), auxiliary

    @jax.named_scope(parts.SELF_ATTENTION)
    def _self_attention(self, y: jax.Array, context: Context) -> tuple[jax.Array, parts.Auxiliary]:
        """y: [B, S, D] attends to itself, dense or sparse."""
        module, packed, sharding = self.self_attention, context.packed, context.sharding
        rows = RowsOfLayer(
            x=y,
            heads=module.heads(y, y, context.rotary, sharding),
            rotary=context.rotary,
            samples=context.layout if packed is None else packed,
            segments=None if packed is None else packed.within_tokens(),
            slots=0 if packed is None else packed.tokens.offset.shape[1],
            implementation=module.implementation,
            sharding=sharding,
        )
        if self.sparse_attention is None:
            return module.output(rows.dense(), sharding), {}
        with jax.named_scope(parts.ATTENTION):
            mixed, auxiliary = self.sparse_attention(rows)
        return module.output(mixed, sharding), auxiliary

    @jax.named_scope(parts.NORM)
    def _before_cross_attention(
        self, x: jax.Array, y: jax.Array, gate: jax.Array, options: NormOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Computes h = x + gate·y and its affine norm, a modulation by (weight − 1, bias)."""
        by_segment = "segment_ids" in options
        if self.cross_norm is None:
            h = gated_add(x, y, gate, options)
            return h, h.astype(self.dtype)
        weight, bias = self.cross_norm.scale, self.cross_norm.bias
        assert weight is not None
        assert bias is not None
        rows = gate.shape if by_segment else (x.shape[0], x.shape[-1])
        # A frozen norm may be bfloat16; the kernels want float32.
        scale = jnp.broadcast_to(weight[...].astype(jnp.float32) - 1.0, rows)
        shift = jnp.broadcast_to(bias[...].astype(jnp.float32), rows)
        if gate.shape == rows:
            return residual_layernorm_modulate(x, y, gate, scale, shift, **options)
        # The fused sum needs one layout, but each token has a gate and all share one affine norm.
        h = gated_add(x, y, gate, {})
        return h, layernorm_modulate(h, scale, shift, **options).astype(self.dtype)


class Head(nnx.Module):
    """Modulated norm and projection from tokens to patches."""

    def __init__(self, config: WanConfig, patch_dim: int, *, rngs: nnx.Rngs):
        self.dtype = config.compute_dtype
        self.norm_options: NormOptions = {"eps": config.eps, "implementation": config.norm}
        self.modulation = nnx.Param(jnp.zeros((2, config.dim), jnp.float32))
        self.out = nnx.Linear(
            config.dim, patch_dim, dtype=self.dtype, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    @jax.named_scope(parts.HEAD)
    def __call__(
        self,
        x: jax.Array,
        time: jax.Array,
        sharding: NamedSharding | None = None,
        segment_ids: Segmentation | None = None,
    ) -> jax.Array:
        """x: [B, S, D]; time: [B, D], [B, S, D] or [B, M, D] float32 → [B, S, patch_dim]."""
        shift, scale = jnp.unstack(self.modulation[...] + time[..., None, :], axis=-2)
        options = self.norm_options | {"sharding": sharding, "segment_ids": segment_ids}
        y = layernorm_modulate(x, scale, shift, **options)
        return self.out(y.astype(self.dtype))


class WanTransformer(StackedTransformer):
    """The transformer. Parameters are float32; those of the blocks are stacked over layers."""

    config: WanConfig

    def __init__(self, config: WanConfig, *, rngs: nnx.Rngs):
        self.config = config
        dim, dtype = config.dim, config.compute_dtype
        patch = math.prod(config.patch_size)
        self.patch_embedding = nnx.Linear(patch * config.in_channels, dim, dtype=dtype, rngs=rngs)
        self.position_embedding = (
            nnx.Linear(config.head_dim, dim, dtype=dtype, rngs=rngs)
            if config.position_embedding
            else None
        )
        self.time_embedding = TimestepEmbedding(dim, config.freq_dim, modulations=6, rngs=rngs)
        self.condition_embedding = (
            TextEmbedding(config.text, dim, dtype=dtype, rngs=rngs)
            if config.text
            else ClassEmbedding(config.num_classes, dim, dtype=dtype, rngs=rngs)
        )
        self.image_embedding = (
            ImageEmbedding(config.image, dim, dtype=dtype, rngs=rngs) if config.image else None
        )
        self.blocks = self.draw_blocks(Block, rngs)
        self.head = Head(config, patch * config.latent_channels, rngs=rngs)

    def forward(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: jax.Array,
        image: jax.Array | None = None,
        sharding: NamedSharding | None = None,
        first_frame_timestep: jax.Array | None = None,
    ) -> parts.Output:
        """See `Model.forward`; a timestep may also be [B, S], one per token.

        Wan 2.2's 5B model keeps a given first frame at a timestep of 0.

        Raises:
          ValueError: an image is given but the config has none, or it is missing.
        """
        patch = self.config.patch_size
        tokens = parts.patchify(latents, patch)
        grid = self.grid_of(latents)
        positions, block = grid_positions(*grid), self.block_of_tiles(grid)
        by_frame = first_frame_timestep is not None
        layout, place = clip_layout(grid, block) if block and by_frame else None, None
        if block and not by_frame:
            # Nothing but attention depends on the order, so that layers need not move tokens. A
            # first frame with modulations of its own must stay together for the norms.
            layout, order, place = clip_tiles(grid, block)
            positions, tokens = positions[order], tokens[:, order]
            timestep = timestep[:, order] if timestep.ndim == 2 else timestep
        rotary = rotary_table(positions, grid, self.config.head_dim)
        modulated = None
        if first_frame_timestep is not None:
            timestep = jnp.stack([first_frame_timestep, timestep], axis=-1)
            later = jnp.broadcast_to(positions[:, 0] > 0, tokens.shape[:2]).astype(jnp.int32)
            modulated = segmentation(later, 2, self.config.dim, sharding)
        velocity, auxiliary = self.transform(
            tokens=tokens,
            timestep=timestep,
            condition=condition,
            image=image,
            rotary=rotary,
            sharding=sharding,
            layout=layout,
            modulated=modulated,
        )
        if place is not None:
            velocity = velocity[:, place]
        shape = (*latents.shape[:-1], self.config.latent_channels)
        return parts.Output(parts.unpatchify(velocity.astype(jnp.float32), shape, patch), auxiliary)

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
    ) -> parts.Output:
        """See `Model.forward_packed`; it computes the same function of each sample as `forward`.

        Raises:
          NotImplementedError: attention cannot run on packed rows.
          ValueError: an image is given but the config has none, or it is missing.
        """
        ids, contiguous = metadata.tokens.ids, True
        if first_frame_timestep is not None:
            # Split samples are in the order of tiles, which mix their first frame with later ones.
            contiguous = metadata.split is None or metadata.split.tiles is None
            # Each segment has two rows of the modulation table: its first frame, and the others.
            pairs = jnp.stack([first_frame_timestep, timestep], axis=-1)
            timestep = pairs.reshape(len(pairs), -1)
            ids = jnp.where(ids == PADDING, PADDING, 2 * ids + (positions[..., 0] > 0))
        rows, width = timestep.shape[1], self.config.dim
        modulated = segmentation(ids, rows, width, sharding, contiguous=contiguous)
        rotary = rotary_table(positions, metadata.grid, self.config.head_dim)
        velocity, auxiliary = self.transform(
            tokens, timestep, condition, image, rotary, sharding, metadata, modulated=modulated
        )
        return parts.Output(velocity.astype(jnp.float32), auxiliary)

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
        modulated: Segmentation | None = None,
    ) -> parts.Output:
        """Applies the transformer to tokens [B, S, patch_dim].

        Args:
          tokens, timestep, condition, image: see `Model.forward` and `Model.forward_packed`.
          rotary: rotary table of the tokens.
          sharding: sharding of rows over a mesh of Auto axes.
          packed: positions of the segments; None if every row is one sample.
          layout: tiles of sparse self-attention in rows of one sample each.
          modulated: which timestep of its row a token has, or PADDING; None if a row has one
            timestep, or one per token.

        Returns:
          velocity [B, S, output patch_dim], in the compute dtype if the model predicts it, float32
          if it predicts the data; auxiliary values by sample.
        """
        if (image is None) != (self.image_embedding is None):
            raise ValueError(
                f"image is {'missing' if image is None else 'given'}, but model.image is "
                f"{self.config.image}; give image embeddings if and only if it is set"
            )
        with jax.named_scope(parts.EMBEDDING):
            x = self.patch_embedding(tokens)
            if self.position_embedding is not None:
                x = x + self.position_embedding(jnp.concatenate(rotary, axis=-1))
            x = x.astype(self.config.stream_dtype)
            time = self.time_embedding(timestep)
            modulation = self.time_embedding.modulated(time)
            if image is not None and self.image_embedding is not None:
                image = self.image_embedding(image).reshape(len(tokens), -1, self.config.dim)
            segments = None if packed is None else packed.condition
            embedded = self.condition_embedding(condition, segments)
        context = Context(
            modulation=modulation,
            condition=embedded,
            image=image,
            rotary=rotary,
            sharding=sharding,
            packed=packed,
            segmentation=modulated,
            layout=layout,
        )
        axes = 1 if packed is None else 2
        x, auxiliary = apply_layers(self.blocks, x, context, self.config, axes)
        predicted = self.head(x, time, sharding, modulated)
        if not self.config.predicts_velocity:
            # The velocity leads from the noisy tokens to the predicted data.
            sigma = timestep / TIMESTEP_SCALE
            if modulated is not None:
                sigma = to_tokens(sigma, modulated.ids)
            sigma = sigma.reshape(*sigma.shape, *(1,) * (tokens.ndim - sigma.ndim))
            distance = tokens.astype(jnp.float32) - predicted.astype(jnp.float32)
            predicted = distance / jnp.maximum(sigma, _LEAST_SIGMA)
        return parts.Output(predicted, auxiliary)
