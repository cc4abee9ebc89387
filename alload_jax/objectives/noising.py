"""Noise of training samples: noise levels, dropped conditions and given first frames.

Noise depends on the sample, not on its position in the batch: the key of a token's noise derives
from the sample's epoch, the sample and the token's index in it. Both layouts therefore train on the
same noise for a sample in an epoch.
"""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from alload_jax.data.batch import Batch, PackedBatch
from alload_jax.diffusion.flow import interpolate, velocity
from alload_jax.diffusion.timesteps import TimestepConfig, sample_sigma
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.patches import unpatchify

_GIVEN = 3
"""Part of the key of whether a first frame is given, apart from the three that a sample splits."""


class NoiseSettings(Protocol):
    """What of an objective's config noise depends on; see `FlowMatching`."""

    @property
    def timesteps(self) -> TimestepConfig:
        """Distribution of noise levels."""
        ...

    @property
    def condition_dropout(self) -> float:
        """Fraction of samples trained with the null condition."""
        ...

    @property
    def given_first_frame(self) -> float:
        """Fraction of videos trained with their first latent frame clean."""
        ...


class _Draws(NamedTuple):
    """Random values of a sample.

    Attributes:
      noise: key of the noise of the sample's tokens.
      sigma: noise level.
      dropped: whether the sample is trained with the null condition.
      given: whether a video's first frame is given.
    """

    noise: jax.Array
    sigma: jax.Array
    dropped: jax.Array
    given: jax.Array


def _draw(
    key: jax.Array,
    epoch: jax.Array,
    sample: jax.Array,
    config: NoiseSettings,
    seq_len: int | jax.Array,
) -> _Draws:
    of_sample = jax.random.fold_in(jax.random.fold_in(key, epoch), sample)
    noise, sigma, drop = jax.random.split(of_sample, 3)
    return _Draws(
        noise,
        sample_sigma(sigma, config.timesteps, seq_len),
        jax.random.bernoulli(drop, config.condition_dropout),
        jax.random.bernoulli(jax.random.fold_in(of_sample, _GIVEN), config.given_first_frame),
    )


class Noised(NamedTuple):
    """A micro-batch with noise.

    Attributes:
      latents: [B, frames, height, width, C] noisy latents, or patches [R, T, patch_dim] of them.
      target: the velocity, shaped like `latents`.
      sigma: [B] or [R, M] noise levels.
      condition: as the batch's; null where it is dropped.
      given: [B] or [R, M] bool, whether a video's first frame is given. It is noisy all the same.
    """

    latents: jax.Array
    target: jax.Array
    sigma: jax.Array
    condition: Any
    given: jax.Array


def _token_noise(key: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Returns the noise [size] of one token from the sample's key and its index in the sample."""
    return jax.random.normal(jax.random.fold_in(key, place), (size,))


def noised(batch: Batch, key: jax.Array, config: NoiseSettings, model: ModelConfig) -> Noised:
    """Adds noise to a bucketed micro-batch.

    Args:
      batch: a bucketed micro-batch.
      key: the run's key.
      config: distribution of noise levels and condition dropout.
      model: the model's config.
    """
    return _with_noise(batch, _draws(batch, key, config, model), model)


def noised_at(
    batch: Batch, key: jax.Array, sigma: jax.Array, config: NoiseSettings, model: ModelConfig
) -> Noised:
    """As `noised`, at one noise level for all samples and with their conditions."""
    drawn = _draws(batch, key, config, model)
    level, kept = jnp.full_like(drawn.sigma, sigma), jnp.zeros_like(drawn.dropped)
    return _with_noise(batch, drawn._replace(sigma=level, dropped=kept), model)


def _draws(batch: Batch, key: jax.Array, config: NoiseSettings, model: ModelConfig) -> _Draws:
    """The random values of each sample, each with a first axis [B]."""
    seq_len = math.prod(batch.latents.shape[1:4]) // math.prod(model.patch_size)
    draw = jax.vmap(lambda epoch, sample: _draw(key, epoch, sample, config, seq_len))
    return draw(batch.epoch, batch.sample)


def _with_noise(batch: Batch, draws: _Draws, model: ModelConfig) -> Noised:
    volume = math.prod(model.patch_size)
    seq_len = math.prod(batch.latents.shape[1:4]) // volume
    token_noise = jax.vmap(_token_noise, in_axes=(None, 0, None))
    size = volume * batch.latents.shape[-1]
    tokens = jax.vmap(token_noise, in_axes=(0, None, None))(draws.noise, jnp.arange(seq_len), size)
    noise = unpatchify(tokens, batch.latents.shape, model.patch_size)
    latents = interpolate(batch.latents, noise, draws.sigma)
    if model.condition_parts():
        condition = _without_dropped(batch.condition, draws.dropped[:, None], model)
    else:
        condition = _drop_conditions(batch.condition, draws.dropped, model)
    target = velocity(batch.latents, noise)
    return Noised(latents, target, draws.sigma, condition, draws.given)


def noised_rows(
    batch: PackedBatch, key: jax.Array, config: NoiseSettings, model: ModelConfig
) -> Noised:
    """Adds noise to a packed micro-batch; a sample gets the same noise as in `noised`."""
    segments = batch.metadata.tokens
    ids = segments.ids
    draw = jax.vmap(
        jax.vmap(lambda epoch, sample, seq_len: _draw(key, epoch, sample, config, seq_len))
    )
    draws = draw(batch.epoch, batch.sample, jnp.maximum(batch.seq_len, 1))
    place = jnp.arange(ids.shape[1]) - to_tokens(segments.offset - batch.first, ids)
    token_noise = jax.vmap(jax.vmap(_token_noise, in_axes=(0, 0, None)), in_axes=(0, 0, None))
    noise = token_noise(to_tokens(draws.noise, ids), place, batch.tokens.shape[-1])
    tokens = interpolate(batch.tokens, noise, to_tokens(draws.sigma, ids))
    if model.condition_parts():
        condition = _without_dropped(batch.condition, draws.dropped, model)
    else:
        dropped = to_tokens(draws.dropped, batch.metadata.condition.ids)
        condition = _drop_conditions(batch.condition, dropped, model)
    return Noised(tokens, velocity(batch.tokens, noise), draws.sigma, condition, draws.given)


def _without_dropped(condition: Any, dropped: jax.Array, model: ModelConfig) -> Any:
    """Takes their tokens from samples whose condition is dropped, but for those they keep.

    Args:
      condition: `ConditionTokens` by name.
      dropped: [R, M] bool.
      model: the model's config.
    """
    kept = {part.name for part in model.condition_parts() if not part.dropped}
    return {
        name: tokens if name in kept else tokens.without(dropped)
        for name, tokens in condition.items()
    }


def _drop_conditions(condition: jax.Array, dropped: jax.Array, model: ModelConfig) -> jax.Array:
    """Replaces dropped conditions by the null condition.

    Args:
      condition: [B, ...] or [R, C, ...].
      dropped: [B] or [R, C] bool.
      model: the model's config.
    """
    dropped = dropped.reshape(*dropped.shape, *(1,) * (condition.ndim - dropped.ndim))
    null = 0 if model.text else model.num_classes
    return jnp.where(dropped, jnp.asarray(null, condition.dtype), condition)


def to_tokens(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Expands values per segment to tokens; padding gets the value of the first segment.

    Args:
      values: [R, M, ...].
      ids: [R, T] int32, slot of each token's segment.

    Returns:
      [R, T, ...].
    """
    return jax.vmap(lambda row, slot: row[jnp.maximum(slot, 0)])(values, ids)
