"""Embeddings of timestep, text, classes and images, and condition tokens of different numbers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.parts import layer_norm
from alload_jax.models.common.segments import PADDING, Segments

TIMESTEP_SCALE = 1000.0
"""The model's timestep is the noise level σ times this, as in Wan 2.1 and diffusers."""
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
    """Embeds the timestep: sinusoid, linear, SiLU, linear; float32."""

    def __init__(self, dim: int, freq_dim: int, *, modulations: int = 0, rngs: nnx.Rngs):
        self.freq_dim, self.shape = freq_dim, (modulations, dim)
        self.hidden = nnx.Linear(freq_dim, dim, rngs=rngs)
        self.out = nnx.Linear(dim, dim, rngs=rngs)
        # adaLN-Zero (arXiv 2212.09748): every block starts as the identity.
        self.modulation = (
            nnx.Linear(dim, modulations * dim, kernel_init=nnx.initializers.zeros, rngs=rngs)
            if modulations
            else None
        )

    def __call__(self, timestep: jax.Array) -> jax.Array:
        """timestep: [...], 0 to 1000 → [..., D] float32."""
        return self.out(nnx.silu(self.hidden(sinusoid(timestep, self.freq_dim))))

    def modulated(self, embedded: jax.Array) -> jax.Array:
        """Modulations of all blocks, [..., modulations, D] float32, of what the call returned."""
        assert self.modulation is not None
        modulation = self.modulation(nnx.silu(embedded))
        return modulation.reshape(*embedded.shape[:-1], *self.shape)


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
        self.position = (
            nnx.Param(jnp.zeros((image.positions, image.dim), jnp.float32))
            if image.positions
            else None
        )
        self.norm_in = layer_norm(image.dim, _IMAGE_NORM_EPS, dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(image.dim, image.dim, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(image.dim, dim, dtype=dtype, rngs=rngs)
        self.norm_out = layer_norm(dim, _IMAGE_NORM_EPS, dtype=dtype, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """image: [B, N, image.dim] → [B, N, D]."""
        if self.position is not None:
            image = image + self.position[...]
        return self.norm_out(
            self.out(nnx.gelu(self.hidden(self.norm_in(image)), approximate=False))
        )


class ConditionTokens(NamedTuple):
    """Condition tokens of one kind, such as those of a text.

    A bucketed row has one segment, M = 1, which begins at token 0.

    Attributes:
      values: [R, C, width] embeddings; any finite values in padding.
      segments: the tokens of each sample, one sample after another.
    """

    values: Any
    segments: Segments

    def without(self, dropped: jax.Array) -> "ConditionTokens":
        """The tokens of those samples alone that are not dropped; `dropped`: [R, M] bool."""
        return self._replace(segments=self.segments.only(~dropped))


def mean_by_sample(tokens: ConditionTokens) -> jax.Array:
    """Means over the tokens of each sample, [R, M, width] float32; zeros for samples without any.

    Values that are not finite reach only the mean of their own sample.
    """
    values, (_, length, ids) = tokens
    of_slot = ids[:, None] == jnp.arange(length.shape[1])[:, None]
    total = jnp.sum(values[:, None].astype(jnp.float32), 2, where=of_slot[..., None])
    return total / jnp.maximum(length, 1)[..., None]


def side_by_side(parts: Sequence[ConditionTokens]) -> ConditionTokens:
    """Brings the tokens of each sample together; padding is zero and comes last.

    Args:
      parts: [R, C, D] each, with the same R, M and D, and tokens in the order of their segments.

    Returns:
      [R, ΣC, D]; a sample's tokens are in the order of the parts.
    """
    values = jnp.concatenate([part.values for part in parts], axis=1)
    ids = jnp.concatenate([part.segments.ids for part in parts], axis=1)
    length = sum(part.segments.length for part in parts)
    slots = length.shape[1]
    order = jnp.argsort(jnp.where(ids == PADDING, slots, ids), axis=1, stable=True)
    ids = jnp.take_along_axis(ids, order, axis=1)
    values = jnp.take_along_axis(values, order[..., None], axis=1)
    values = jnp.where(ids[..., None] == PADDING, 0, values)
    offset = jnp.cumsum(length, axis=1) - length
    return ConditionTokens(values, Segments(offset, length, ids))
