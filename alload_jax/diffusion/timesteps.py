"""The flow between data and noise, the distribution of noise levels, and weights of the loss.

With x_σ = (1 − σ)·x₀ + σ·ε and the velocity v = ε − x₀, the data follow as x₀ = x_σ − σ·v, so an
error of v is σ times as large in x₀: ‖x̂₀ − x₀‖² = σ²·‖v̂ − v‖². The signal-to-noise ratio is
((1 − σ) / σ)².
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.errors import InputError, require_fields
from alload_jax.models.common.embedding import TIMESTEP_SCALE


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


_MODE_LIMIT = 2 / (math.pi - 2)
"""The largest `mode_scale`: beyond it, eq. 20 of arXiv 2403.03206 is not monotonic."""
_BISECTIONS = 40
"""Halvings of 0 to 1 that reach the spacing of float32 also near 0."""
_REACH = 6.0
"""Standard deviations from its peak at which a normal density counts as 0: 2e-9 lies beyond."""
_NODES, _WEIGHTS = (values.tolist() for values in np.polynomial.legendre.leggauss(20))
"""Gauss–Legendre quadrature over −1 to 1, to 2e-8 for a normal density over twice `_REACH`."""
_FEWEST_LEVELS = 256
"""Values of float32 that the bulk of a range must hold; with fewer, levels are no distribution."""
_LENGTHS = (1, 2**20)
"""Sequence lengths in tokens between which a config must hold."""


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
        require = partial(require_fields, "objective.timesteps.", self)
        require("mean std mode_scale shift shift_seq_len shift_power", math.isfinite, "finite")
        require("std shift shift_seq_len", lambda value: value > 0, "above 0")
        if not 0 <= self.lowest < self.highest <= 1:
            raise InputError(
                f"objective.timesteps.lowest is {self.lowest} and highest {self.highest}; they "
                "must be from 0 to 1, the lowest below the highest"
            )
        bound = f"from -1 to {_MODE_LIMIT:.2f}"
        require("mode_scale", lambda value: -1 <= value <= _MODE_LIMIT, bound)
        logarithm, most = math.log(self.shift), math.log(np.finfo(np.float32).max) / 2
        for seq_len in _LENGTHS:
            growth = self.shift_power * math.log(seq_len / self.shift_seq_len)
            if not abs(logarithm + growth) < most:
                raise InputError(
                    f"objective.timesteps.shift is {self.shift} with shift_power "
                    f"{self.shift_power}: beyond float32 at {seq_len} tokens; choose values closer "
                    "to 1 and 0"
                )
            self._check_range(logarithm + growth)

    def _check_range(self, log_shift: float) -> None:
        """Checks that float32 resolves the levels between lowest and highest."""
        if (self.lowest, self.highest) == (0, 1):
            return
        low, high = self.lowest, self.highest
        if self.distribution == "logit_normal":
            # The ends of where most of the range's levels lie.
            mean = self.mean + log_shift
            ends = [(_logit(end) - mean) / self.std for end in (low, high)]
            sign = -1 if sum(ends) < 0 else 1
            near, far = sorted(sign * end for end in ends)
            near = max(near, -1.0)
            far = min(far, near + 1 / max(near, 1.0))
            logits = sorted(mean + self.std * sign * end for end in (near, far))
            low, high = ((1 + math.tanh(logit / 2)) / 2 for logit in logits)
        spacing = max(np.spacing(np.float32(high)), np.finfo(np.float32).tiny)
        if not high - low >= _FEWEST_LEVELS * spacing:
            remedy = ", or move mean towards it" if self.distribution == "logit_normal" else ""
            raise InputError(
                f"objective.timesteps.lowest is {self.lowest} and highest {self.highest}: too "
                f"narrow for float32, as nearly all levels would lie between {low:.8g} and "
                f"{high:.8g}; widen the range{remedy}"
            )


def _logit(sigma: float) -> float:
    """log(σ / (1 − σ)), infinite at 0 and 1."""
    return math.log(sigma / (1 - sigma)) if 0 < sigma < 1 else math.copysign(math.inf, sigma - 0.5)


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
    if config.distribution == "logit_normal":
        sigma = _draw_logit_normal(key, config, jnp.log(shift))
    else:
        sigma = shift_sigma(*_draw_before_shift(key, config, shift), shift)
    # Rounding may leave the range. Not by a minimum and a maximum, which may take NaN for a number.
    sigma = jnp.where(sigma < config.lowest, config.lowest, sigma)
    return jnp.where(sigma > config.highest, config.highest, sigma)


def _draw_before_shift(
    key: jax.Array, config: TimestepConfig, shift: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws σ of `uniform` or `mode` before its shift; returns σ and 1 − σ, both exact near 0."""
    ends = []
    for end in (config.lowest, config.highest):
        before = shift_sigma(end, 1 - end, 1 / shift), shift_sigma(1 - end, end, shift)
        ends.append(_uniform_of_mode(*before, config) if config.distribution == "mode" else before)
    uniform = jax.random.uniform(key)
    sigma, rest = ((1 - uniform) * low + uniform * high for low, high in zip(*ends, strict=True))
    if config.distribution == "mode":
        return _mode(sigma, config.mode_scale), _mode(rest, config.mode_scale)
    return sigma, rest


def _mode(uniform: jax.Array, scale: float) -> jax.Array:
    """σ of 1 − u for a uniform number u (arXiv 2403.03206, eq. 20), and 1 − σ of u itself."""
    return (1 + scale) * uniform - scale * jnp.square(jnp.sin(math.pi / 2 * uniform))


def _uniform_of_mode(
    sigma: jax.Array, rest: jax.Array, config: TimestepConfig
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `_mode`, by bisection: u and 1 − u for σ and 1 − σ."""
    below = sigma < rest
    smaller = jnp.where(below, sigma, rest)
    found = _bisect(lambda uniform: _mode(uniform, config.mode_scale), smaller)
    return jnp.where(below, found, 1 - found), jnp.where(below, 1 - found, found)


def _draw_logit_normal(key: jax.Array, config: TimestepConfig, log_shift: jax.Array) -> jax.Array:
    """Draws σ of `logit_normal` after its shift, from the part of the distribution in the range.

    Neither a narrow range nor one in a far tail loses digits: the draw is measured from the end of
    the range that is nearer to the mean, by integrals of the density relative to that at the end.
    """
    mean, std = config.mean + log_shift, config.std
    low, high = _logit(config.lowest), _logit(config.highest)
    if math.isinf(low) and math.isinf(high):
        return jax.nn.sigmoid(mean + std * jax.random.normal(key))
    lowest, highest = (low - mean) / std, (high - mean) / std
    mirrored = lowest + highest < 0
    near = jnp.where(mirrored, -highest, lowest)
    skipped = jnp.where(near < -_REACH, -_REACH - near, 0)
    start = near + skipped
    tail = jnp.where(start > 0, start, 0)
    most = _REACH**2 / (jnp.sqrt(tail**2 + _REACH**2) + tail) + (tail - start)
    width = (high - low) / std - skipped
    width = jnp.where(width < most, width, most)

    def integral(fraction: jax.Array) -> jax.Array:
        end, total = fraction * width, jnp.zeros_like(width)
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            place = (node + 1) / 2 * end
            total = total + weight * jnp.exp(-(start + place / 2) * place)
        return fraction * total

    drawn = jax.random.uniform(key) * integral(jnp.ones_like(width))
    odds = jnp.exp(-std * (skipped + width * _bisect(integral, drawn)))  # relative to the end's
    sigma = jnp.where(mirrored, config.highest * odds, config.lowest)
    return sigma / (sigma + jnp.where(mirrored, 1 - config.highest, (1 - config.lowest) * odds))


def _bisect(rising: Callable[[jax.Array], jax.Array], value: jax.Array) -> jax.Array:
    """Where a rising function of 0 to 1 has a value."""

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle = (ends[0] + ends[1]) / 2
        below = rising(middle) < value
        return jnp.where(below, middle, ends[0]), jnp.where(below, ends[1], middle)

    zero = jnp.zeros_like(value)
    return jax.lax.fori_loop(0, _BISECTIONS, halve, (zero, zero + 1))[1]


Length = TypeVar("Length", float, jax.Array)


def shift_of(config: TimestepConfig, seq_len: Length) -> Length:
    """The shift for a sequence length in tokens."""
    return config.shift * (seq_len / config.shift_seq_len) ** config.shift_power


def shift_sigma(sigma: jax.Array | float, rest: jax.Array | float, shift: jax.Array) -> jax.Array:
    """shift·σ / (1 + (shift − 1)·σ): a shift above 1 raises σ.

    Args:
      sigma: σ.
      rest: 1 − σ, so that no digits are lost near 1.
      shift: the shift.
    """
    return shift * sigma / (shift * sigma + rest)
