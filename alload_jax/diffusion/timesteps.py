"""The distribution of noise levels in training."""

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from alload_jax.errors import InputError

_MODE_LIMIT = 2 / (math.pi - 2)
"""The largest `mode_scale`: beyond it, eq. 20 of arXiv 2403.03206 is not monotonic."""
_BISECTIONS = 26
"""Halvings of 0 to 1 that reach the spacing of float32."""


@dataclass(frozen=True)
class TimestepConfig:
    """Distribution of σ, and its shift towards noise for long sequences.

    Attributes:
      distribution: uniform over 0 to 1, logit_normal (arXiv 2403.03206, eq. 19), or mode (eq. 20).
      mean, std: of logit σ for `logit_normal`; a mean above 0 draws more noise.
      mode_scale: scale of `mode`, −1 to 1.75: above 0, levels in the middle are drawn more often;
        below 0, those at the ends.
      shift: shift at `shift_seq_len` tokens; 1 leaves σ unchanged.
      shift_seq_len: sequence length at which `shift` applies, in tokens.
      shift_power: exponent of the growth with length, shift·(S / shift_seq_len)^shift_power; 0.5
        keeps the signal-to-noise ratio over resolutions (arXiv 2403.03206, eq. 23), 0 uses the same
        shift for all lengths.
      lowest, highest: σ is drawn from this range only, for one of two experts (Wan 2.2's A14B
        models: 0.875 to 1 and 0 to 0.875 for text-to-video).
    """

    distribution: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    mean: float = 0.0
    std: float = 1.0
    mode_scale: float = 1.29
    shift: float = 1.0
    shift_seq_len: int = 16
    shift_power: float = 0.0
    lowest: float = 0.0
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lowest < self.highest <= 1:
            raise InputError(
                f"objective.timesteps.lowest is {self.lowest} and highest {self.highest}; they "
                "must be from 0 to 1, the lowest below the highest"
            )
        if not -1 <= self.mode_scale <= _MODE_LIMIT:
            raise InputError(
                f"objective.timesteps.mode_scale is {self.mode_scale}; it must be from -1 to "
                f"{_MODE_LIMIT:.2f}"
            )
        for name in ("std", "shift", "shift_seq_len"):
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise InputError(f"objective.timesteps.{name} is {value}; it must be above 0")


def sample_sigma(key: jax.Array, config: TimestepConfig, seq_len: int | jax.Array) -> jax.Array:
    """Draws a noise level, a float32 scalar from 0 (data) to 1 (noise).

    Args:
      key: the random key of the sample.
      config: the distribution.
      seq_len: length of the sample in tokens, for the shift.
    """
    # XLA would fold a static length at compile time, with other rounding. The barrier makes it
    # compute the shift on the device, so that a sample's level has the same bits in both layouts.
    length = jax.lax.optimization_barrier(jnp.asarray(seq_len, jnp.float32))
    shift = shift_of(config, length)
    if (config.lowest, config.highest) == (0, 1):
        return shift_sigma(_draw(key, config), shift)
    # The shift of its inverse is the level before the shift.
    before = (shift_sigma(jnp.float32(end), 1 / shift) for end in (config.lowest, config.highest))
    sigma = shift_sigma(_draw_between(key, config, *before), shift)
    return jnp.clip(sigma, config.lowest, config.highest)  # rounding may leave the range


def _draw(key: jax.Array, config: TimestepConfig) -> jax.Array:
    """Draws σ before the shift."""
    if config.distribution == "uniform":
        return jax.random.uniform(key)
    if config.distribution == "mode":
        return _mode(jax.random.uniform(key), config.mode_scale)
    return jax.nn.sigmoid(config.mean + config.std * jax.random.normal(key))


def _draw_between(
    key: jax.Array, config: TimestepConfig, lowest: jax.Array, highest: jax.Array
) -> jax.Array:
    """Draws σ before the shift from the part of its distribution in a range."""
    if config.distribution == "uniform":
        return jax.random.uniform(key, minval=lowest, maxval=highest)
    if config.distribution == "mode":
        first, last = (_uniform_of_mode(end, config.mode_scale) for end in (highest, lowest))
        return _mode(jax.random.uniform(key, minval=first, maxval=last), config.mode_scale)
    low, high = (
        (jax.scipy.special.logit(end) - config.mean) / config.std for end in (lowest, highest)
    )
    normal = jax.random.truncated_normal(key, low, high)
    return jax.nn.sigmoid(config.mean + config.std * normal)


def _mode(uniform: jax.Array, scale: float) -> jax.Array:
    """σ of a uniform number (arXiv 2403.03206, eq. 20); falls from 1 to 0."""
    cosine = jnp.square(jnp.cos(math.pi / 2 * uniform))
    return 1 - uniform - scale * (cosine - 1 + uniform)


def _uniform_of_mode(sigma: jax.Array, scale: float) -> jax.Array:
    """The inverse of `_mode`, by bisection."""

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle = (ends[0] + ends[1]) / 2
        above = _mode(middle, scale) > sigma
        return jnp.where(above, middle, ends[0]), jnp.where(above, ends[1], middle)

    zero = jnp.zeros_like(sigma)
    return jax.lax.fori_loop(0, _BISECTIONS, halve, (zero, zero + 1))[0]


Length = TypeVar("Length", float, jax.Array)


def shift_of(config: TimestepConfig, seq_len: Length) -> Length:
    """The shift for a sequence length in tokens."""
    return config.shift * (seq_len / config.shift_seq_len) ** config.shift_power


def shift_sigma(sigma: jax.Array, shift: float | jax.Array) -> jax.Array:
    """shift·σ / (1 + (shift − 1)·σ): a shift above 1 raises σ."""
    return shift * sigma / (1 + (shift - 1) * sigma)
