"""Noise levels that samplers step through: NumPy, no JAX."""

import math
from typing import Literal, get_args

import numpy as np

from alload_jax.errors import InputError

Sampler = Literal["euler", "unipc"]
"""How the flow is followed: see `alload_jax.diffusion.samplers.sample`."""

_TRAINING_LEVELS = 1000
_TO_ONE = 1e-6


def noise_levels(sampler: Sampler, steps: int, shift: float) -> np.ndarray:
    """Noise levels σ for sampling, falling from 1 (for unipc 1e-6 below it) to 0.

    Those of euler are equally spaced before the shift. Those of unipc are the ones that diffusers'
    UniPCMultistepScheduler has with `use_flow_sigmas`: equally spaced from 1 towards 1/1000, and
    then 0, so that its last step is longer than the others. The model is told 1000·σ itself, where
    diffusers' pipelines round that down to a whole number.

    Args:
      sampler: which sampler they are for.
      steps: evaluations of the model, from 1.
      shift: σ → shift·σ / (1 + (shift − 1)·σ); above 1, more of the levels are noisy.

    Returns:
      [steps + 1] float32, each below the one before.

    Raises:
      InputError: the sampler is unknown, steps or shift is too small, or so large that levels
        coincide in float32.
    """
    check_sampler(sampler)
    if steps < 1:
        raise InputError(f"noise_levels: steps is {steps}; it must be at least 1")
    if not 0 < shift < math.inf:
        raise InputError(f"noise_levels: shift is {shift}; it must be above 0 and finite")
    straight = _straight(sampler, steps)
    levels = shift * straight / (1 + (shift - 1) * straight)
    if sampler == "unipc":
        levels[0] -= _TO_ONE  # diffusers takes the logarithm of 1 − σ
    levels = levels.astype(np.float32)
    if not (np.diff(levels) < 0).all():
        raise InputError(
            f"noise_levels: shift is {shift} with {steps} steps, so that noise levels coincide; "
            "choose a shift closer to 1 or fewer steps"
        )
    return levels


def check_sampler(sampler: str) -> None:
    """Refuses what is not a `Sampler`.

    Raises:
      InputError: it is not one.
    """
    if sampler not in get_args(Sampler):
        raise InputError(f"sampler is {sampler!r}; choose {' or '.join(get_args(Sampler))}")


def _straight(sampler: Sampler, steps: int) -> np.ndarray:
    if sampler == "euler":
        return np.linspace(1, 0, steps + 1)
    levels = np.linspace(1, 1 / _TRAINING_LEVELS, steps + 1)
    levels[-1] = 0
    return levels
