"""Flow matching on the straight path between data and noise (arXiv 2210.02747, 2209.03003)."""

import jax
import jax.numpy as jnp

TIMESTEP_SCALE = 1000.0
"""The model's timestep is σ times this, as in Wan 2.1 and diffusers."""


def interpolate(data: jax.Array, noise: jax.Array, sigma: jax.Array) -> jax.Array:
    """(1 − σ)·data + σ·noise.

    Args:
      data, noise: [B, ...] or [R, T, ...].
      sigma: [B] or [R, T], 0 (data) to 1 (noise).
    """
    sigma = sigma.reshape(*sigma.shape, *(1,) * (data.ndim - sigma.ndim))
    return (1 - sigma) * data + sigma * noise


def velocity(data: jax.Array, noise: jax.Array) -> jax.Array:
    """The target of the model: the derivative of the path with respect to σ, noise − data."""
    return noise - data


def squared_error(predicted: jax.Array, target: jax.Array) -> jax.Array:
    """Mean squared error of each sample in float32: [B, ...] → [B]."""
    error = jnp.square(predicted.astype(jnp.float32) - target.astype(jnp.float32))
    return error.mean(axis=tuple(range(1, error.ndim)))
