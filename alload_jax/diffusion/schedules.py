"""The noise levels of samplers, step by step: NumPy, no JAX."""

import math
from typing import Literal, get_args

import numpy as np

from alload_jax.errors import InputError

Sampler = Literal["euler", "unipc"]
"""Name of the method that integrates the flow: see `alload_jax.diffusion.samplers.sample`."""

_TRAINING_LEVELS = 1000
_FIRST_LEVEL_OFFSET = 1e-6


def noise_levels(sampler: Sampler, steps: int, shift: float) -> np.ndarray:
    """Noise levels σ for sampling, decreasing from 1 (for unipc from 1 − 1e-6) to 0.

    Before the shift, the levels of euler are equally spaced. Those of unipc are the levels of
    diffusers' UniPCMultistepScheduler with `use_flow_sigmas`: equally spaced from 1 towards 1/1000,
    then 0, so that its last step is longer than the others. The model's timestep is 1000·σ exactly,
    unless it is rounded down; see `rounded_timesteps`.

    Args:
      sampler: which sampler they are for.
      steps: number of evaluations of the model, at least 1.
      shift: σ → shift·σ / (1 + (shift − 1)·σ); a shift above 1 raises the levels.

    Returns:
      [steps + 1] float32, strictly decreasing.

    Raises:
      InputError: the sampler is unknown, steps or shift is too small, or so large that levels
        coincide in float32.
    """
    check_sampler(sampler)
    if steps < 1:
        raise InputError(f"noise_levels: steps is {steps}; it must be at least 1")
    if not 0 < shift < math.inf:
        raise InputError(f"noise_levels: shift is {shift}; it must be above 0 and finite")
    levels = _shifted_levels(sampler, steps, shift).astype(np.float32)
    if not (np.diff(levels) < 0).all():
        raise InputError(
            f"noise_levels: shift is {shift} with {steps} steps, so that noise levels coincide; "
            "choose a shift closer to 1 or fewer steps"
        )
    return levels


def rounded_timesteps(steps: int, shift: float) -> np.ndarray:
    """The timesteps that diffusers' UniPCMultistepScheduler gives the model: 1000·σ rounded down.

    Its integration uses σ itself. The first timestep is 999 thereby.

    Args:
      steps, shift: as of `noise_levels`.

    Returns:
      [steps] float32.
    """
    levels = _shifted_levels("unipc", steps, shift)[:-1]
    return np.floor(_TRAINING_LEVELS * levels).astype(np.float32)


def check_sampler(sampler: str) -> None:
    """Checks the name of a sampler.

    Raises:
      InputError: it is not a `Sampler`.
    """
    if sampler not in get_args(Sampler):
        raise InputError(f"sampler is {sampler!r}; choose {' or '.join(get_args(Sampler))}")


def _shifted_levels(sampler: Sampler, steps: int, shift: float) -> np.ndarray:
    """[steps + 1] float64."""
    levels = np.linspace(1, 0 if sampler == "euler" else 1 / _TRAINING_LEVELS, steps + 1)
    levels[-1] = 0
    levels = shift * levels / (1 + (shift - 1) * levels)
    if sampler == "unipc":
        levels[0] -= _FIRST_LEVEL_OFFSET  # diffusers takes the logarithm of 1 − σ
    return levels
