"""Samplers, Euler and UniPC: they integrate the flow from noise to data.

UniPC (arXiv 2302.04867): between levels s and t the flow's exact solution is, with α = 1 − σ,
λ = ln(α / σ) and h = λt − λs,

    x(t) = σt/σs·x(s) + αt·(1 − e⁻ʰ)·x₀(s) + (an integral over how x₀ changes from s to t).

The predictor (UniP) and the corrector (UniC) approximate the integral by differences of the x₀ that
were predicted at s, at the level before s and, for the corrector only, at t. A step evaluates the
model once, at the predicted latents. It corrects the latents with the result and predicts those of
the next level. All weights depend on the levels only and are computed in float64 on the host. The
first and the last step are of first order, as in diffusers' UniPCMultistepScheduler with
`lower_order_final`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from alload_jax.diffusion.schedules import Sampler, check_sampler
from alload_jax.errors import InputError

IDENTITY = (1.0, 0.0, 0.0, 0.0)
"""`Weights` of an update that leaves the latents unchanged."""


class State(NamedTuple):
    """The state between two steps; each part [B, ...].

    Attributes:
      latents: predicted for the next level.
      origin: corrected latents that `latents` was predicted from; the noise before the first step.
      x0: data predicted at the level of `origin`; 0 before the first step.
      earlier_x0: data predicted one level earlier; 0 in the first two steps.
    """

    latents: jax.Array
    origin: jax.Array
    x0: jax.Array
    earlier_x0: jax.Array


class Weights(NamedTuple):
    """Weights of an update from one level to the next; each [steps] float32.

    Attributes:
      origin: of the latents at the first level.
      x0: of the data predicted at the first level.
      earlier: of the difference to the data predicted one level earlier.
      later: of the difference to the data predicted at the second level; only the corrector uses
        it.
    """

    origin: jax.Array
    x0: jax.Array
    earlier: jax.Array
    later: jax.Array


class Steps(NamedTuple):
    """The inputs of all steps, for `jax.lax.scan`.

    Attributes:
      sigma: [steps] float32, the level at which the model is evaluated.
      corrector: weights of the update to this level.
      predictor: weights of the update to the next level; `later` is 0.
    """

    sigma: jax.Array
    corrector: Weights
    predictor: Weights


def advance(slope: "Slope", state: State, step: Steps) -> State:
    """Takes one step: evaluates the model, corrects the latents, predicts those of the next level.

    Args:
      slope: (latents [B, ...], sigma scalar) → velocity [B, ...].
      state: after the previous step.
      step: the entries of `Steps` for this step.
    """
    x0 = state.latents - step.sigma * slope(state.latents, step.sigma)
    corrector, predictor = step.corrector, step.predictor
    corrected = (
        corrector.origin * state.origin
        + corrector.x0 * state.x0
        + corrector.earlier * (state.earlier_x0 - state.x0)
        + corrector.later * (x0 - state.x0)
    )
    predicted = (
        predictor.origin * corrected + predictor.x0 * x0 + predictor.earlier * (state.x0 - x0)
    )
    return State(predicted, corrected, x0, state.x0)


def steps_of(sigmas: np.ndarray | jax.Array) -> Steps:
    """The weights of all steps.

    Args:
      sigmas: [steps + 1], decreasing from at most 1 to 0.

    Raises:
      InputError: the levels do not decrease from at most 1 to 0.
      jax.errors.TracerArrayConversionError: the levels are traced; inside `jax.jit` they must be
        constants.
    """
    levels = np.asarray(sigmas, np.float64)
    if len(levels) < 2 or levels[0] > 1 or levels[-1] != 0 or not (np.diff(levels) < 0).all():
        raise InputError(
            f"unipc: sigmas are {np.array2string(levels, threshold=6)}; they must decrease, from "
            "at most 1 to 0"
        )
    with np.errstate(divide="ignore"):  # λ is infinite at σ = 0 and at σ = 1
        h = np.diff(np.log1p(-levels) - np.log(levels))
    origin = levels[1:] / levels[:-1]
    x0 = -(1 - levels[1:]) * np.expm1(-h)
    earlier, earlier_corrected = np.zeros((2, len(h)))
    later = np.full(len(h), 0.5)

    # All but the first and the last update are of second order.
    inner, inverse = h[1:-1], -h[1:-1] / h[:-2]  # 1/r for r = (λ before s − λs) / h
    # The right-hand sides of UniC's linear system for n = 1 and n = 2, n!·hⁿ·φₙ₊₁(h) / B₂(h) in
    # the paper's notation, with −h for h because x₀ is predicted.
    b = np.expm1(-inner)
    moment = -b / inner - 1
    first, second = moment / b, 2 * (-moment / inner - 0.5) / b
    solution = (first - second) * inverse / (inverse - 1)
    earlier[1:-1] = inverse / 2
    earlier_corrected[1:-1] = solution * inverse
    later[1:-1] = first - solution

    predictor = np.stack([origin, x0, x0 * earlier, np.zeros(len(h))])
    corrector = np.stack([origin, x0, x0 * earlier_corrected, x0 * later])
    # The corrector of an update runs one step later; in the first step it has nothing to correct.
    delayed = np.column_stack([IDENTITY, corrector[:, :-1]])
    return Steps(
        jnp.asarray(levels[:-1], jnp.float32),
        Weights(*jnp.asarray(delayed, jnp.float32)),
        Weights(*jnp.asarray(predictor, jnp.float32)),
    )


Velocity = Callable[[jax.Array, jax.Array, PyTree], jax.Array]
"""(latents [B, ...], sigma [B], condition) → velocity [B, ...].

The condition is a pytree of arrays [B, ...]: labels, embeddings of text, or both.
"""

Slope = Callable[[jax.Array, jax.Array], jax.Array]
"""A `Velocity` with a fixed condition: (latents [B, ...], sigma scalar) → velocity [B, ...]."""


def guided(model: Velocity, null_condition: PyTree, guidance: float) -> Velocity:
    """Classifier-free guidance (arXiv 2207.12598): unconditional + guidance·(difference).

    Args:
      model: the velocity of the flow.
      null_condition: the empty condition, arrays of the same shapes as in the condition.
      guidance: scale; 1 is the conditional velocity itself and costs half as much as other values.
    """
    if guidance == 1:
        return model

    def velocity(latents: jax.Array, sigma: jax.Array, condition: PyTree) -> jax.Array:
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
    noise: PyTree,
    condition: PyTree,
    sigmas: np.ndarray | jax.Array,
    steps: slice = slice(None),
) -> PyTree:
    """Integrates the flow from noise to data.

    May be called inside `jax.jit`. The model is compiled once for any number of steps.

    Args:
      sampler: euler, of first order; or unipc (arXiv 2302.04867), of second order, which needs
        fewer steps for the same error.
      velocity: of the flow; evaluated once per step.
      noise: [B, ...] float32, the start; or what a call that took the steps before returned.
      condition: a pytree of arrays [B, ...], handed to `velocity`.
      sigmas: [steps + 1], decreasing to 0: `noise_levels(sampler, steps, shift)`. For euler they
        may be traced.
      steps: which steps to take; all others are those of other calls.

    Returns:
      [B, ...] float32, the generated data; where `steps` has a stop, what the next call takes.

    Raises:
      InputError: the sampler is unknown, or sigmas do not decrease from at most 1 to 0 (unipc).
      jax.errors.TracerArrayConversionError: sigmas are traced (unipc).
    """

    def slope(latents: jax.Array, sigma: jax.Array) -> jax.Array:
        return velocity(latents, jnp.full(latents.shape[0], sigma), condition)

    def unipc_step(state: State, step: Steps) -> tuple[State, None]:
        return advance(slope, state, step), None

    def euler_step(
        latents: jax.Array, levels: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        sigma, next_sigma = levels
        return latents + (next_sigma - sigma) * slope(latents, sigma), None

    check_sampler(sampler)
    if sampler == "unipc":
        begin = noise
        if not isinstance(noise, State):
            zero = jnp.zeros_like(noise)
            begin = State(noise, noise, zero, zero)
        taken = jax.tree.map(lambda each: each[steps], steps_of(sigmas))
        end = jax.lax.scan(unipc_step, begin, taken)[0]
        return end.latents if steps.stop is None else end
    levels = jnp.asarray(sigmas[:-1])[steps], jnp.asarray(sigmas[1:])[steps]
    return jax.lax.scan(euler_step, noise, levels)[0]
