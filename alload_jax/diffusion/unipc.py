"""UniPC (arXiv 2302.04867) for flow matching: second order, B₂(h), predicting the data x₀.

Between levels s and t the flow's exact solution is, with α = 1 − σ, λ = ln(α / σ) and h = λt − λs,

    x(t) = σt/σs·x(s) + αt·(1 − e⁻ʰ)·x₀(s) + (an integral over how x₀ changes from s to t).

The predictor (UniP) and the corrector (UniC) take the integral from differences of the x₀ that were
predicted at s, at the level before s and, the corrector alone, at t. A step evaluates the model
once, at what was predicted; with that it corrects the latents, and predicts the next from there.
All weights follow from the levels: they are computed in float64 on the host. The first and the last
step are of first order, as diffusers' UniPCMultistepScheduler has it with `lower_order_final`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.errors import InputError

NOTHING = (1.0, 0.0, 0.0, 0.0)
"""`Weights` of an update that keeps the latents."""


class State(NamedTuple):
    """What a step hands to the next one; each [B, ...].

    Attributes:
      latents: predicted for the level that comes next.
      origin: corrected latents that `latents` was predicted from; at the start the noise.
      x0: data predicted at the level of `origin`; 0 at the start.
      earlier_x0: data predicted one level before that; 0 in the first two steps.
    """

    latents: jax.Array
    origin: jax.Array
    x0: jax.Array
    earlier_x0: jax.Array


class Weights(NamedTuple):
    """Of an update from one level to the next; each [steps] float32.

    Attributes:
      origin: of the latents the update starts from.
      x0: of the data predicted at the level it starts from.
      earlier: of the change in predicted data from there to one level earlier.
      later: of the change from there to the level the update leads to; the corrector's alone.
    """

    origin: jax.Array
    x0: jax.Array
    earlier: jax.Array
    later: jax.Array


class Steps(NamedTuple):
    """All that distinguishes the steps, for `jax.lax.scan`.

    Attributes:
      sigma: [steps] float32, the level at which the model is evaluated.
      corrector: of the update that led to this level.
      predictor: of the update to the next level; `later` is 0.
    """

    sigma: jax.Array
    corrector: Weights
    predictor: Weights


def start(noise: jax.Array) -> State:
    """The state before the first step."""
    return State(noise, noise, jnp.zeros_like(noise), jnp.zeros_like(noise))


def advance(slope: Callable[[jax.Array, jax.Array], jax.Array], state: State, step: Steps) -> State:
    """One step: evaluates the model, corrects, predicts.

    Args:
      slope: (latents [B, ...], sigma scalar) → velocity [B, ...].
      state: after the step before.
      step: the entries of `Steps` for this one.
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
    """The weights of every step.

    Args:
      sigmas: [steps + 1], falling from at most 1 to 0.

    Raises:
      InputError: the levels do not fall so.
      jax.errors.TracerArrayConversionError: they are traced; inside `jax.jit` they have to be
        constants.
    """
    levels = np.asarray(sigmas, np.float64)
    _check(levels)
    predictor, corrector = _updates(levels)
    # The corrector acts one step late, and has nothing to correct in the first.
    late = np.column_stack([NOTHING, corrector[:, :-1]])
    return Steps(
        jnp.asarray(levels[:-1], jnp.float32),
        Weights(*jnp.asarray(late, jnp.float32)),
        Weights(*jnp.asarray(predictor, jnp.float32)),
    )


def _updates(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predictor's and corrector's `Weights`, each [4, steps] float64, of s = level i, t = i + 1."""
    with np.errstate(divide="ignore"):  # λ is infinite at σ = 0, and may be at 1
        h = np.diff(np.log1p(-levels) - np.log(levels))
    origin = levels[1:] / levels[:-1]
    x0 = -(1 - levels[1:]) * np.expm1(-h)
    earlier, earlier_corrected = np.zeros((2, len(h)))
    later = np.full(len(h), 0.5)

    # All but the first and the last update are of second order.
    inverse = -h[1:-1] / h[:-2]  # 1/r for r = (λ before s − λs) / h
    first, second = _moments(h[1:-1])
    solution = (first - second) * inverse / (inverse - 1)
    earlier[1:-1] = inverse / 2
    earlier_corrected[1:-1] = solution * inverse
    later[1:-1] = first - solution

    predictor = np.stack([origin, x0, x0 * earlier, np.zeros(len(h))])
    return predictor, np.stack([origin, x0, x0 * earlier_corrected, x0 * later])


def _moments(h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What UniC's differences are to add up to, unweighted and weighted by their r (n = 1, 2).

    n!·hⁿ·φₙ₊₁(h) / B₂(h) in the paper's words, with −h for h since x₀ is predicted.
    """
    b = np.expm1(-h)
    first = -b / h - 1
    second = -first / h - 0.5
    return first / b, 2 * second / b


def _check(levels: np.ndarray) -> None:
    if len(levels) < 2 or levels[0] > 1 or levels[-1] != 0 or not (np.diff(levels) < 0).all():
        raise InputError(
            f"unipc: sigmas are {np.array2string(levels, threshold=6)}; they must fall, from at "
            "most 1 to 0"
        )
