"""A block of Wan's transformer, and the head that follows the last one."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from alload_jax.models.common.attention import attention
from alload_jax.models.common.fan_out import fan_out
from alload_jax.models.common.feed_forward import FeedForward
from alload_jax.models.common.gated_add import gated_add
from alload_jax.models.common.linear import Linear
from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.parts import (
    ATTENTION,
    CROSS_ATTENTION,
    HEAD,
    LINEAR,
    NORM,
    SELF_ATTENTION,
)
from alload_jax.models.common.query_key import project_heads
from alload_jax.models.common.remat import LINEAR_OUTPUT, NORM_OUTPUT
from alload_jax.models.common.rotary import RotaryTable
from alload_jax.models.common.segments import AttentionSegments, PackedMetadata, SplitRows
from alload_jax.models.common.single_row import split_single_row
from alload_jax.models.common.sparse_attention import RowsOfLayer, SparseSelfAttention
from alload_jax.models.common.tile_layout import TileLayout
from alload_jax.models.wan.config import WanConfig
from alload_jax.planning.analytic import keeps_feed_forward
from alload_jax.planning.remat import RematPolicy
from pallas_kernels import Segmentation, layernorm_modulate, residual_layernorm_modulate


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


class Attention(nnx.Module):
    """Multi-head attention with RMSNorm over the full width of queries and keys."""

    def __init__(self, config: WanConfig, *, with_image: bool = False, rngs: nnx.Rngs):
        dim, dtype = config.dim, config.compute_dtype

        def linear() -> Linear:
            return Linear(dim, dim, dtype=dtype, rngs=rngs)

        def norm() -> nnx.RMSNorm | None:
            if not config.qk_norm:
                return None
            return nnx.RMSNorm(dim, epsilon=config.eps, dtype=dtype, rngs=rngs)

        self.num_heads = config.num_heads
        self.implementation = config.attention
        self.norm_implementation = config.norm
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.query_norm, self.key_norm = norm(), norm()
        self.image_key = linear() if with_image else None
        self.image_value = linear() if with_image else None
        self.image_key_norm = norm() if with_image else None

    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        *,
        image: jax.Array | None = None,
        segments: AttentionSegments | None = None,
        image_segments: AttentionSegments | None = None,
        sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """x: [B, S, D] attends to context: [B, T, D] and to image: [B, N, D] → [B, S, D]."""
        query, key, value = self.heads(x, context, None, sharding)
        mixed = self.attend(query, key, value, segments=segments, sharding=sharding)
        if image is not None:
            assert self.image_key is not None
            assert self.image_value is not None
            heads = self._projection(sharding)
            key = heads(image, self.image_key, self.image_key_norm)
            value = heads(image, self.image_value)
            to_image = self.attend(query, key, value, segments=image_segments, sharding=sharding)
            mixed = mixed + to_image
        return self.project(mixed, sharding)

    def heads(
        self,
        x: jax.Array,
        context: jax.Array,
        rotary: RotaryTable | None,
        sharding: NamedSharding | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query of x: [B, S, D], key and value of context: [B, T, D], as `attention` takes them."""
        heads = self._projection(sharding)
        if x is context:
            of_query, of_key, of_value = fan_out(x, 3)
        else:
            of_query, (of_key, of_value) = x, fan_out(context, 2)
        return (
            heads(of_query, self.query, self.query_norm, rotary),
            heads(of_key, self.key, self.key_norm, rotary),
            heads(of_value, self.value),
        )

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        segments: AttentionSegments | SplitRows | None,
        sharding: NamedSharding | None,
    ) -> jax.Array:
        """Dense `attention` with this module's implementation."""
        return attention(
            *(query, key, value),
            segments=segments,
            implementation=self.implementation,
            sharding=sharding,
        )

    def _projection(self, sharding: NamedSharding | None) -> Callable[..., jax.Array]:
        return partial(
            project_heads,
            num_heads=self.num_heads,
            norm_implementation=self.norm_implementation,
            sharding=sharding,
        )

    def project(self, mixed: jax.Array, sharding: NamedSharding | None) -> jax.Array:
        """The output of all heads, [B, S, num_heads, head_dim] → [B, S, D]."""
        with jax.named_scope(LINEAR):
            y = split_single_row(self.out, sharding, mixed.reshape(*mixed.shape[:2], -1))
            return checkpoint_name(y, LINEAR_OUTPUT)


class Block(nnx.Module):
    """Self-attention, cross-attention to the condition and feed-forward, modulated by the timestep.

    The order of norms, gates and plain additions is Wan 2.1's. The residual stream has the
    config's `stream_dtype`; the inputs of attention and feed-forward have its `compute_dtype`.
    """

    def __init__(self, config: WanConfig, *, rngs: nnx.Rngs):
        self.dtype = config.compute_dtype
        self.norm_options: dict[str, Any] = {"eps": config.eps, "implementation": config.norm}
        self.modulation = nnx.Param(jnp.zeros((6, config.dim), jnp.float32))
        self.self_attention = Attention(config, rngs=rngs)
        self.cross_norm = (
            nnx.LayerNorm(
                config.dim, epsilon=config.eps, use_fast_variance=False, dtype=self.dtype, rngs=rngs
            )
            if config.cross_norm
            else None
        )
        self.cross_attention = Attention(config, with_image=config.image is not None, rngs=rngs)
        self.feed_forward = FeedForward(
            config.dim,
            config.ffn_dim,
            implementation=config.norm,
            dtype=self.dtype,
            rngs=rngs,
        )
        sparse = config.sparse_attention
        # Last, so that all other parameters are drawn as without it.
        self.sparse_attention = (
            SparseSelfAttention(sparse, config.dim, config.num_heads, self.dtype, rngs=rngs)
            if sparse
            else None
        )

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, Auxiliary]:
        """x: [B, S, D] in `stream_dtype` → output like x, and the layer's auxiliary values."""
        with jax.named_scope(NORM):
            shift1, scale1, gate1, shift2, scale2, gate2 = jnp.unstack(
                self.modulation[...] + context.modulation, axis=-2
            )
        packed, sharding = context.packed, context.sharding
        options = self.norm_options | {"sharding": sharding}
        if context.segmentation is not None:
            options["segment_ids"] = context.segmentation
        with jax.named_scope(NORM):
            x, y = residual_layernorm_modulate(x, None, None, scale1, shift1, **options)
            y = checkpoint_name(y.astype(self.dtype), NORM_OUTPUT)
        y, auxiliary = self._self_attention(y, context)
        x, y = self._before_cross_attention(x, y, gate1, options)
        y = checkpoint_name(y, NORM_OUTPUT)
        with jax.named_scope(CROSS_ATTENTION):
            y = self.cross_attention(
                y,
                context.condition,
                image=context.image,
                segments=None if packed is None else packed.to_condition(),
                image_segments=_to_image(context),
                sharding=sharding,
            )
        with jax.named_scope(NORM):
            x, y = residual_layernorm_modulate(x, y, None, scale2, shift2, **options)
            y = checkpoint_name(y, NORM_OUTPUT)
        y = self.feed_forward(y, sharding, output_kept=keeps_feed_forward(context.remat))
        return gated_add(x, y, gate2, options), auxiliary

    @jax.named_scope(SELF_ATTENTION)
    def _self_attention(self, y: jax.Array, context: Context) -> tuple[jax.Array, Auxiliary]:
        """y: [B, S, D] attends to itself, dense or sparse."""
        module, packed, sharding = self.self_attention, context.packed, context.sharding
        if self.sparse_attention is None:
            segments = None if packed is None else packed.within_tokens()
            heads = module.heads(y, y, context.rotary, sharding)
            mixed = module.attend(*heads, segments=segments, sharding=sharding)
            return module.project(mixed, sharding), {}
        rows = RowsOfLayer(
            x=y,
            heads=module.heads(y, y, context.rotary, sharding),
            rotary=context.rotary,
            layout=context.layout,
            packed=packed,
            implementation=module.implementation,
            sharding=sharding,
        )
        with jax.named_scope(ATTENTION):
            mixed, auxiliary = self.sparse_attention(rows)
        return module.project(mixed, sharding), auxiliary

    @jax.named_scope(NORM)
    def _before_cross_attention(
        self, x: jax.Array, y: jax.Array, gate: jax.Array, options: dict[str, Any]
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


def _to_image(context: Context) -> AttentionSegments | None:
    """Packed tokens attend to the image of their segment; None for rows of one sample each."""
    if context.packed is None or context.image is None:
        return None
    return context.packed.to_equal_parts(context.image.shape[1])


class Head(nnx.Module):
    """Modulated norm and projection from tokens to patches."""

    def __init__(self, config: WanConfig, patch_dim: int, *, rngs: nnx.Rngs):
        self.dtype = config.compute_dtype
        self.norm_options: dict[str, Any] = {"eps": config.eps, "implementation": config.norm}
        self.modulation = nnx.Param(jnp.zeros((2, config.dim), jnp.float32))
        self.out = nnx.Linear(
            config.dim, patch_dim, dtype=self.dtype, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    @jax.named_scope(HEAD)
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
