"""A diffusion transformer of Wan 2.1's kind, for latents of any number of frames, height, width."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.errors import InputError
from alload_jax.models.attention import AttentionImplementation, attention
from alload_jax.models.embedding import ClassEmbedding, TimestepEmbedding
from alload_jax.models.patches import patchify, unpatchify
from alload_jax.models.remat import RematPolicy, rematerialise
from alload_jax.models.rotary import apply_rotary, grid_positions, rotary_table
from pallas_kernels import layernorm_modulate, residual_layernorm_modulate
from pallas_kernels.layernorm_modulate import Implementation as NormImplementation

RotaryTable = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class DiTConfig:
    """Shape and arithmetic of the transformer.

    Attributes:
      dim: width of the residual stream.
      ffn_dim: width of the feed-forward layer.
      num_heads: attention heads; `dim / num_heads` must be even.
      num_layers: transformer blocks.
      in_channels: channels of the latents.
      patch_size: latent (frames, height, width) that make one token.
      num_classes: classes of the condition.
      freq_dim: size of the timestep's sinusoid.
      eps: of every norm.
      dtype: of the computation; parameters are float32. `auto` is bfloat16 on a GPU, else float32.
      attention: implementation of attention; `auto` is cuDNN where it can run.
      norm: implementation of the modulated norms: `triton` (our kernels, GPU only), `xla`, or
        `auto`, whichever was measured as faster on this device.
      remat: what blocks keep for the backward pass.
    """

    dim: int = 128
    ffn_dim: int = 512
    num_heads: int = 4
    num_layers: int = 4
    in_channels: int = 1
    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_classes: int = 10
    freq_dim: int = 256
    eps: float = 1e-6
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: AttentionImplementation = "auto"
    norm: NormImplementation = "auto"
    remat: RematPolicy = "none"

    def __post_init__(self) -> None:
        for name in ("dim", "ffn_dim", "num_heads", "num_layers", "in_channels", "num_classes"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.patch_size) < 1:
            raise InputError(f"model.patch_size is {self.patch_size}; each must be at least 1")
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise InputError(
                f"model.dim is {self.dim} with model.num_heads {self.num_heads}; "
                "dim / num_heads must be a whole, even number"
            )
        if self.freq_dim < 2 or self.freq_dim % 2:
            raise InputError(f"model.freq_dim is {self.freq_dim}; it must be even")

    def architecture(self) -> dict[str, Any]:
        """The fields that the parameters depend on, as JSON values."""
        free = ("dtype", "attention", "norm", "remat")
        fields = {k: v for k, v in vars(self).items() if k not in free}
        return fields | {"patch_size": list(self.patch_size)}

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations on this process's default backend."""
        if self.dtype == "auto":
            return jnp.dtype("bfloat16" if jax.default_backend() == "gpu" else "float32")
        return jnp.dtype(self.dtype)


class Attention(nnx.Module):
    """Multi-head attention with RMSNorm over the full width of queries and keys."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        dim, dtype = config.dim, config.compute_dtype
        self.num_heads = config.num_heads
        self.implementation = config.attention
        self.query = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.key = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.query_norm = nnx.RMSNorm(dim, epsilon=config.eps, dtype=dtype, rngs=rngs)
        self.key_norm = nnx.RMSNorm(dim, epsilon=config.eps, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, context: jax.Array, rotary: RotaryTable | None = None
    ) -> jax.Array:
        """x: [B, S, D] attends to context: [B, T, D] → [B, S, D]."""
        query = self._split(self.query_norm(self.query(x)))
        key = self._split(self.key_norm(self.key(context)))
        value = self._split(self.value(context))
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        mixed = attention(query, key, value, implementation=self.implementation)
        return self.out(mixed.reshape(x.shape))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.num_heads, -1)


class FeedForward(nnx.Module):
    """Linear, GELU (tanh form), linear."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        dtype = config.compute_dtype
        self.hidden = nnx.Linear(config.dim, config.ffn_dim, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(config.ffn_dim, config.dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, D] → [B, S, D]."""
        return self.out(nnx.gelu(self.hidden(x), approximate=True))


class Block(nnx.Module):
    """Self-attention, cross-attention to the condition, feed-forward; modulated by the timestep.

    The order of norms, gates and plain additions is Wan 2.1's.
    """

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.norm_options: dict[str, Any] = {"eps": config.eps, "implementation": config.norm}
        self.modulation = nnx.Param(jnp.zeros((6, config.dim), jnp.float32))
        self.self_attention = Attention(config, rngs=rngs)
        self.cross_norm = nnx.LayerNorm(
            config.dim, epsilon=config.eps, dtype=config.compute_dtype, rngs=rngs
        )
        self.cross_attention = Attention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        modulation: jax.Array,
        condition: jax.Array,
        rotary: RotaryTable,
        sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """x: [B, S, D]; modulation: [B, 6, D] float32; condition: [B, L, D] → [B, S, D]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.unstack(
            self.modulation[...] + modulation, axis=1
        )
        # The affine norm is a modulation too: by (weight − 1, bias), alike for every row.
        weight, bias = self.cross_norm.scale, self.cross_norm.bias
        assert weight is not None
        assert bias is not None
        cross_scale = jnp.broadcast_to(weight[...] - 1.0, shift1.shape)
        cross_shift = jnp.broadcast_to(bias[...], shift1.shape)
        options = self.norm_options | {"sharding": sharding}
        y = layernorm_modulate(x, scale1, shift1, **options)
        y = self.self_attention(y, y, rotary)
        x, y = residual_layernorm_modulate(x, y, gate1, cross_scale, cross_shift, **options)
        y = self.cross_attention(y, condition)
        x, y = residual_layernorm_modulate(x, y, None, scale2, shift2, **options)
        return _gated_add(x, self.feed_forward(y), gate2)


class Head(nnx.Module):
    """Modulated norm and projection from tokens back to patches."""

    def __init__(self, config: DiTConfig, patch_dim: int, *, rngs: nnx.Rngs):
        self.norm_options: dict[str, Any] = {"eps": config.eps, "implementation": config.norm}
        self.modulation = nnx.Param(jnp.zeros((2, config.dim), jnp.float32))
        self.out = nnx.Linear(
            config.dim,
            patch_dim,
            dtype=config.compute_dtype,
            kernel_init=nnx.initializers.zeros,
            rngs=rngs,
        )

    def __call__(
        self, x: jax.Array, time: jax.Array, sharding: NamedSharding | None = None
    ) -> jax.Array:
        """x: [B, S, D]; time: [B, D] float32 → [B, S, patch_dim]."""
        shift, scale = jnp.unstack(self.modulation[...] + time[:, None], axis=1)
        y = layernorm_modulate(x, scale, shift, sharding=sharding, **self.norm_options)
        return self.out(y)


class DiT(nnx.Module):
    """The transformer. Its parameters are float32; those of the blocks are stacked over layers."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        self.config = config
        frames, height, width = config.patch_size
        patch_dim = frames * height * width * config.in_channels
        self.patch_embedding = nnx.Linear(
            patch_dim, config.dim, dtype=config.compute_dtype, rngs=rngs
        )
        self.time_embedding = TimestepEmbedding(config.dim, config.freq_dim, rngs=rngs)
        self.condition_embedding = ClassEmbedding(
            config.num_classes, config.dim, dtype=config.compute_dtype, rngs=rngs
        )
        self.blocks = nnx.vmap(lambda keys: Block(config, rngs=keys))(rngs.split(config.num_layers))
        self.head = Head(config, patch_dim, rngs=rngs)

    def __call__(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        labels: jax.Array,
        sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """Predicts the velocity of the flow.

        Args:
          latents: [B, frames, height, width, channels], each a multiple of the patch.
          timestep: [B] float32, 0 (data) to 1000 (noise).
          labels: [B, L] int32 classes; `num_classes` means none.
          sharding: how rows are split over a mesh of Auto axes; kernels need to know.

        Returns:
          [B, frames, height, width, channels] float32.
        """
        patch = self.config.patch_size
        tokens = patchify(latents, patch)
        grid = [size // step for size, step in zip(latents.shape[1:4], patch, strict=True)]
        rotary = rotary_table(grid_positions(*grid), self.config.dim // self.config.num_heads)
        velocity = self.transform(tokens, timestep, labels, rotary, sharding)
        return unpatchify(velocity.astype(jnp.float32), latents.shape, patch)

    def transform(
        self,
        tokens: jax.Array,
        timestep: jax.Array,
        labels: jax.Array,
        rotary: RotaryTable,
        sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """The transformer on tokens: [B, S, patch_dim] → [B, S, patch_dim]."""
        x = self.patch_embedding(tokens)
        time, modulation = self.time_embedding(timestep)
        condition = self.condition_embedding(labels)
        graph, layers = nnx.split(self.blocks)

        def apply_layer(x: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            block = nnx.merge(graph, layer)
            return block(x, modulation, condition, rotary, sharding), None

        x, _ = jax.lax.scan(rematerialise(apply_layer, self.config.remat), x, layers)
        return self.head(x, time, sharding)


def _gated_add(x: jax.Array, y: jax.Array, gate: jax.Array) -> jax.Array:
    """x + y·gate in float32, rounded once; gate: [B, D] float32."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32) * gate[:, None, :]).astype(x.dtype)
