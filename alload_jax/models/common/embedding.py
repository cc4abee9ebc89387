"""Embeddings of the inputs beside the latents: timestep, text or classes, image."""

import jax
import jax.numpy as jnp
from flax import nnx

from alload_jax.models.common.config import ImageConfig, ModelConfig, TextConfig
from alload_jax.models.common.segments import Segments

_PLACE_PERIOD = 100.0
"""Longest period of the sinusoids of a label's place; samples have few labels."""
_IMAGE_NORM_EPS = 1e-5
"""Epsilon of the image embedding's norms in Wan 2.1 and diffusers, whatever the blocks use."""


def sinusoid(timestep: jax.Array, dim: int, max_period: float = 10_000.0) -> jax.Array:
    """Computes the sinusoidal embedding, cosines first, as in DiT and Wan 2.1.

    Args:
      timestep: [...], 0 to 1000.
      dim: width of the embedding; even.

    Returns:
      [..., dim] float32.
    """
    half = dim // 2
    frequencies = max_period ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = timestep.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


class TimestepEmbedding(nnx.Module):
    """Embeds the timestep: embedding [B, D] and modulation of the blocks [B, 6, D], float32."""

    def __init__(self, dim: int, freq_dim: int, *, rngs: nnx.Rngs):
        self.freq_dim = freq_dim
        self.dim = dim
        self.hidden = nnx.Linear(freq_dim, dim, rngs=rngs)
        self.out = nnx.Linear(dim, dim, rngs=rngs)
        # adaLN-Zero (arXiv 2212.09748): every block starts as the identity.
        self.modulation = nnx.Linear(dim, 6 * dim, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, timestep: jax.Array) -> tuple[jax.Array, jax.Array]:
        """timestep: [B], or [B, S] for one per token → ([..., D], [..., 6, D]) float32."""
        embedded = self.out(nnx.silu(self.hidden(sinusoid(timestep, self.freq_dim))))
        modulation = self.modulation(nnx.silu(embedded))
        return embedded, modulation.reshape(*timestep.shape, 6, self.dim)


class ClassEmbedding(nnx.Module):
    """Embeds class labels as condition tokens. An additional class is the null condition.

    A sinusoidal embedding of each label's place is added, since attention to the tokens does not
    depend on their order.
    """

    def __init__(self, num_classes: int, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.null_class = num_classes
        # The condition has unit scale at initialization, like the output of a norm.
        self.table = nnx.Embed(
            num_classes + 1,
            dim,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(1.0),
            rngs=rngs,
        )

    def __call__(self, labels: jax.Array, segments: Segments | None = None) -> jax.Array:
        """Embeds labels [B, L] int32, `num_classes` for the null class, as [B, L, D].

        Packed rows have the labels of their samples in `segments`.
        """
        place = jnp.arange(labels.shape[1]) if segments is None else segments.place()
        tokens = self.table(labels)
        return tokens + sinusoid(place, tokens.shape[-1], _PLACE_PERIOD).astype(tokens.dtype)


class TextEmbedding(nnx.Module):
    """Maps text embeddings to condition tokens: linear, GELU (tanh form), linear."""

    def __init__(self, text: TextConfig, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(text.dim, dim, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, text: jax.Array, segments: Segments | None = None) -> jax.Array:
        """text: [B, L, text.dim] → [B, L, D]; `segments` change nothing: a text holds its order."""
        return self.out(nnx.gelu(self.hidden(text), approximate=True))


class ImageEmbedding(nnx.Module):
    """Maps image embeddings to condition tokens: norm, linear, GELU, linear, norm."""

    def __init__(self, image: ImageConfig, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        def norm(size: int) -> nnx.LayerNorm:
            return nnx.LayerNorm(
                size, epsilon=_IMAGE_NORM_EPS, use_fast_variance=False, dtype=dtype, rngs=rngs
            )

        self.position = (
            nnx.Param(jnp.zeros((image.positions, image.dim), jnp.float32))
            if image.positions
            else None
        )
        self.norm_in = norm(image.dim)
        self.hidden = nnx.Linear(image.dim, image.dim, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(image.dim, dim, dtype=dtype, rngs=rngs)
        self.norm_out = norm(dim)

    def __call__(self, image: jax.Array) -> jax.Array:
        """image: [B, N, image.dim] → [B, N, D]."""
        if self.position is not None:
            image = image + self.position[...]
        return self.norm_out(
            self.out(nnx.gelu(self.hidden(self.norm_in(image)), approximate=False))
        )


def condition_embedding(
    config: ModelConfig, dim: int, *, rngs: nnx.Rngs
) -> ClassEmbedding | TextEmbedding:
    """Builds the embedding of the config's condition, with outputs [..., dim]."""
    dtype = config.compute_dtype
    if config.text:
        return TextEmbedding(config.text, dim, dtype=dtype, rngs=rngs)
    return ClassEmbedding(config.num_classes, dim, dtype=dtype, rngs=rngs)
