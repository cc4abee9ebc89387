"""What enters the transformer beside the latents: the timestep and the condition."""

import jax
import jax.numpy as jnp
from flax import nnx


def sinusoid(timestep: jax.Array, dim: int, max_period: float = 10_000.0) -> jax.Array:
    """Sinusoidal embedding, cosines first, as in DiT and Wan 2.1.

    Args:
      timestep: [B], 0 to 1000.
      dim: even.

    Returns:
      [B, dim] float32.
    """
    half = dim // 2
    frequencies = max_period ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = timestep.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


class TimestepEmbedding(nnx.Module):
    """Timestep → embedding [B, D] and the blocks' modulation [B, 6, D], all in float32."""

    def __init__(self, dim: int, freq_dim: int, *, rngs: nnx.Rngs):
        self.freq_dim = freq_dim
        self.dim = dim
        self.hidden = nnx.Linear(freq_dim, dim, rngs=rngs)
        self.out = nnx.Linear(dim, dim, rngs=rngs)
        # adaLN-Zero (arXiv 2212.09748): every block starts as the identity.
        self.modulation = nnx.Linear(dim, 6 * dim, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, timestep: jax.Array) -> tuple[jax.Array, jax.Array]:
        """timestep: [B] in 0 to 1000 → ([B, D], [B, 6, D]) float32."""
        embedded = self.out(nnx.silu(self.hidden(sinusoid(timestep, self.freq_dim))))
        modulation = self.modulation(nnx.silu(embedded))
        return embedded, modulation.reshape(-1, 6, self.dim)


class ClassEmbedding(nnx.Module):
    """Class labels → condition tokens. One class more than asked for: the empty condition."""

    def __init__(self, num_classes: int, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.null_class = num_classes
        # As large as what a norm puts out: cross-attention hears the condition from the start.
        self.table = nnx.Embed(
            num_classes + 1,
            dim,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(1.0),
            rngs=rngs,
        )

    def __call__(self, labels: jax.Array) -> jax.Array:
        """labels: [B, L] int32, `num_classes` standing for none → [B, L, D]."""
        return self.table(labels)
