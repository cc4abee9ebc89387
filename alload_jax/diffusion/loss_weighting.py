"""Weights of the loss by noise level, for the velocity of the straight path.

With x_σ = (1 − σ)·x₀ + σ·ε and the velocity v = ε − x₀, the data follow as x₀ = x_σ − σ·v, so an
error of v is σ times as large in x₀: ‖x̂₀ − x₀‖² = σ²·‖v̂ − v‖². The signal-to-noise ratio is
((1 − σ) / σ)².
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from alload_jax.diffusion.flow import TIMESTEP_SCALE

NoiseWeighting = Literal["none", "min_snr", "cosmap", "sigma_sqrt"]


def loss_weight(sigma: jax.Array, weighting: NoiseWeighting, min_snr_gamma: float) -> jax.Array:
    """Weight of the squared error of the velocity at a noise level, float32.

    Args:
      sigma: noise levels, 0 (data) to 1 (noise), of any shape.
      weighting: `none`: 1. `min_snr`: min(SNR, γ) of the error of the data (arXiv 2303.09556),
        which is σ²·min(SNR, γ) = min((1 − σ)², γ·σ²) of the error of the velocity. `cosmap`:
        2 / (π·(1 − 2σ + 2σ²)) (arXiv 2403.03206, §3.1). `sigma_sqrt`: 1 / σ², as in diffusers; σ
        counts as at least a timestep, 1 / 1000, as it does there.
      min_snr_gamma: γ of `min_snr`.
    """
    if weighting == "min_snr":
        return jnp.minimum(jnp.square(1 - sigma), min_snr_gamma * jnp.square(sigma))
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * jnp.square(sigma)))
    if weighting == "sigma_sqrt":
        # Not by a maximum, which may take NaN for the least.
        return 1 / jnp.square(jnp.where(sigma < 1 / TIMESTEP_SCALE, 1 / TIMESTEP_SCALE, sigma))
    return jnp.ones_like(sigma)
