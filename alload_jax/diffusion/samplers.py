"""From noise to data along the flow."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Velocity = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(latents [B, ...], sigma [B], labels [B, L]) → velocity [B, ...]."""


def guided(model: Velocity, null_labels: jax.Array, guidance: float) -> Velocity:
    """Classifier-free guidance (arXiv 2207.12598): unconditional + guidance·(difference).

    Args:
      model: the velocity of the flow.
      null_labels: [B, L], the empty condition.
      guidance: 1 is the model's own conditional velocity.
    """

    def velocity(latents: jax.Array, sigma: jax.Array, labels: jax.Array) -> jax.Array:
        both = model(
            jnp.concatenate([latents, latents]),
            jnp.concatenate([sigma, sigma]),
            jnp.concatenate([labels, null_labels]),
        )
        conditional, unconditional = jnp.split(both, 2)
        return unconditional + guidance * (conditional - unconditional)

    return velocity


def euler(velocity: Velocity, noise: jax.Array, labels: jax.Array, sigmas: jax.Array) -> jax.Array:
    """Follows the flow by Euler's method.

    Args:
      velocity: of the flow.
      noise: [B, ...], the start.
      labels: [B, L], the condition.
      sigmas: [steps + 1] from 1 down to 0.

    Returns:
      [B, ...], the data drawn.
    """

    def advance(latents: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        now, after = pair
        slope = velocity(latents, jnp.full(latents.shape[0], now), labels)
        return latents + (after - now) * slope, None

    drawn, _ = jax.lax.scan(advance, noise, (sigmas[:-1], sigmas[1:]))
    return drawn
