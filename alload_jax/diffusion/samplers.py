"""Samplers: they integrate the flow from noise to data."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.diffusion import unipc
from alload_jax.diffusion.schedules import Sampler, check_sampler

Velocity = Callable[[jax.Array, jax.Array, Any], jax.Array]
"""(latents [B, ...], sigma [B], condition) → velocity [B, ...].

The condition is a pytree of arrays [B, ...]: labels, embeddings of text, or both.
"""

Slope = Callable[[jax.Array, jax.Array], jax.Array]
"""A `Velocity` with a fixed condition: (latents [B, ...], sigma scalar) → velocity [B, ...]."""


def guided(model: Velocity, null_condition: Any, guidance: float) -> Velocity:
    """Classifier-free guidance (arXiv 2207.12598): unconditional + guidance·(difference).

    Args:
      model: the velocity of the flow.
      null_condition: the empty condition, arrays of the same shapes as in the condition.
      guidance: scale; 1 is the conditional velocity itself and costs half as much as other values.
    """
    if guidance == 1:
        return model

    def velocity(latents: jax.Array, sigma: jax.Array, condition: Any) -> jax.Array:
        both = model(
            jnp.concatenate([latents, latents]),
            jnp.concatenate([sigma, sigma]),
            jax.tree.map(lambda *halves: jnp.concatenate(halves), condition, null_condition),
        )
        conditional, unconditional = jnp.split(both, 2)
        return unconditional + guidance * (conditional - unconditional)

    return velocity


def sample(
    sampler: Sampler,
    velocity: Velocity,
    noise: jax.Array,
    condition: Any,
    sigmas: np.ndarray | jax.Array,
) -> jax.Array:
    """Integrates the flow from noise to data.

    May be called inside `jax.jit`. The model is compiled once for any number of steps.

    Args:
      sampler: euler, of first order; or unipc (arXiv 2302.04867), of second order, which needs
        fewer steps for the same error.
      velocity: of the flow; evaluated once per step.
      noise: [B, ...] float32, the start.
      condition: a pytree of arrays [B, ...], handed to `velocity`.
      sigmas: [steps + 1], decreasing to 0: `noise_levels(sampler, steps, shift)`. For euler they
        may be traced.

    Returns:
      [B, ...] float32, the generated data.

    Raises:
      InputError: the sampler is unknown, or sigmas do not decrease from at most 1 to 0 (unipc).
      jax.errors.TracerArrayConversionError: sigmas are traced (unipc).
    """
    advance, state, steps = _method(sampler, velocity, noise, condition, sigmas)
    state, _ = jax.lax.scan(lambda state, step: (advance(state, step), None), state, steps)
    return state[0]


def trajectory(
    sampler: Sampler,
    velocity: Velocity,
    noise: jax.Array,
    condition: Any,
    sigmas: np.ndarray | jax.Array,
) -> jax.Array:
    """The latents at every level of `sample`: [steps + 1, B, ...] float32, from noise to data.

    Arguments and exceptions are those of `sample`. For unipc the latents are those at which the
    model is evaluated, before correction.
    """
    advance, state, steps = _method(sampler, velocity, noise, condition, sigmas)

    def record(state: Any, step: Any) -> tuple[Any, jax.Array]:
        state = advance(state, step)
        return state, state[0]

    _, path = jax.lax.scan(record, state, steps)
    return jnp.concatenate([noise[None], path])


def _method(
    sampler: Sampler,
    velocity: Velocity,
    noise: jax.Array,
    condition: Any,
    sigmas: np.ndarray | jax.Array,
) -> tuple[Callable[[Any, Any], Any], Any, Any]:
    """Returns a step function, its initial state and its inputs by step, for `jax.lax.scan`.

    The latents are the first part of the state.
    """

    def slope(latents: jax.Array, sigma: jax.Array) -> jax.Array:
        return velocity(latents, jnp.full(latents.shape[0], sigma), condition)

    check_sampler(sampler)
    if sampler == "unipc":
        return partial(unipc.advance, slope), unipc.start(noise), unipc.steps_of(sigmas)
    return partial(_euler_step, slope), (noise,), (sigmas[:-1], sigmas[1:])


def _euler_step(
    slope: Slope, state: tuple[jax.Array], step: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array]:
    (latents,), (sigma, next_sigma) = state, step
    return (latents + (next_sigma - sigma) * slope(latents, sigma),)
