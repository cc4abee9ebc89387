"""What training minimises: the weighted sum of samples' flow-matching losses, in either layout.

Noise belongs to the sample, not to its place: every token's noise comes from a key of the epoch,
the sample and the token's number in it. So both layouts learn the same from a sample in an epoch.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from alload_jax.data.batch import AnyBatch, Batch, PackedBatch
from alload_jax.diffusion.flow import TIMESTEP_SCALE, interpolate, squared_error, velocity
from alload_jax.diffusion.timesteps import TimestepConfig, sample_sigma
from alload_jax.errors import InputError
from alload_jax.models.common.patches import unpatchify
from alload_jax.models.common.segments import PADDING, PackedMetadata
from alload_jax.models.wan.config import WanConfig
from alload_jax.models.wan.transformer import WanTransformer


@dataclass(frozen=True)
class DiffusionConfig:
    """How samples are noised.

    Attributes:
      timesteps: distribution of noise levels.
      condition_dropout: share of samples trained without their condition, for guidance: without
        class, or with a text of zeros.
    """

    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    condition_dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.condition_dropout <= 1:
            raise InputError(
                f"diffusion.condition_dropout is {self.condition_dropout}; it must be from 0 to 1"
            )


def weighted_loss(
    model: WanTransformer,
    batch: AnyBatch,
    key: jax.Array,
    config: DiffusionConfig,
    sharding: NamedSharding,
) -> jax.Array:
    """Σ weight·loss over the samples of a micro-batch, float32.

    Args:
      model: the transformer.
      batch: a micro-batch.
      key: the epoch's key.
      config: how samples are noised.
      sharding: how rows are split over the mesh.
    """
    if isinstance(batch, PackedBatch):
        return _packed(model, batch, key, config, sharding)
    return _bucketed(model, batch, key, config, sharding)


def _bucketed(
    model: WanTransformer,
    batch: Batch,
    key: jax.Array,
    config: DiffusionConfig,
    sharding: NamedSharding,
) -> jax.Array:
    latents, target, sigma, condition = noised(batch, key, config, model.config)
    predicted = model(latents, sigma * TIMESTEP_SCALE, condition, sharding=sharding)
    return jnp.sum(batch.weight * squared_error(predicted, target))


def _packed(
    model: WanTransformer,
    batch: PackedBatch,
    key: jax.Array,
    config: DiffusionConfig,
    sharding: NamedSharding,
) -> jax.Array:
    tokens, target, sigma, condition = noised_rows(batch, key, config, model.config)
    bounds, segments = batch.bounds, (batch.segments, batch.condition_segments)
    predicted = model.forward_packed(
        tokens,
        batch.position,
        bounds.grid,
        PackedMetadata(*segments, bounds.lengths, bounds.condition, batch.split),
        sigma * TIMESTEP_SCALE,
        condition,
        sharding,
    )
    error = jax.vmap(squared_error)(predicted, target)
    # A sample's loss is the mean over its tokens; a part weighs as its share of them.
    each = batch.weight / jnp.maximum(batch.segments.length, 1)
    weight = jnp.where(batch.segments.ids == PADDING, 0, _of_segment(each, batch.segments.ids))
    return jnp.sum(weight * error)


class _Draws(NamedTuple):
    """What is drawn for a sample.

    Attributes:
      noise: key of its tokens' noise.
      sigma: noise level.
      dropped: whether it is trained without its condition.
    """

    noise: jax.Array
    sigma: jax.Array
    dropped: jax.Array


def _draw(
    key: jax.Array, sample: jax.Array, config: DiffusionConfig, seq_len: int | jax.Array
) -> _Draws:
    noise, sigma, drop = jax.random.split(jax.random.fold_in(key, sample), 3)
    return _Draws(
        noise,
        sample_sigma(sigma, config.timesteps, seq_len),
        jax.random.bernoulli(drop, config.condition_dropout),
    )


def _token_noise(key: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """[size]: the noise of one token, by its sample's key and its number in the sample."""
    return jax.random.normal(jax.random.fold_in(key, place), (size,))


def noised(
    batch: Batch, key: jax.Array, config: DiffusionConfig, model: WanConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Noises a micro-batch of one shape.

    Args:
      batch: a micro-batch.
      key: the epoch's key.
      config: how samples are noised.
      model: the transformer's config.

    Returns:
      latents [B, ...], target velocity [B, ...], sigma [B], condition like the batch's.
    """
    volume = math.prod(model.patch_size)
    seq_len = math.prod(batch.latents.shape[1:4]) // volume
    draws = jax.vmap(lambda sample: _draw(key, sample, config, seq_len))(batch.sample)
    of_tokens = jax.vmap(_token_noise, in_axes=(None, 0, None))
    size = volume * batch.latents.shape[-1]
    tokens = jax.vmap(of_tokens, in_axes=(0, None, None))(draws.noise, jnp.arange(seq_len), size)
    noise = unpatchify(tokens, batch.latents.shape, model.patch_size)
    latents = interpolate(batch.latents, noise, draws.sigma)
    target = velocity(batch.latents, noise)
    return latents, target, draws.sigma, _without(batch.condition, draws.dropped, model)


def noised_rows(
    batch: PackedBatch, key: jax.Array, config: DiffusionConfig, model: WanConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`noised` for packed rows: the same noise for the same sample.

    Returns:
      tokens [R, T, patch_dim], target velocity [R, T, patch_dim], sigma [R, M], condition like
      the batch's.
    """
    ids = batch.segments.ids
    draw = jax.vmap(jax.vmap(lambda sample, seq_len: _draw(key, sample, config, seq_len)))
    draws = draw(batch.sample, jnp.maximum(batch.seq_len, 1))
    place = jnp.arange(ids.shape[1]) - _of_segment(batch.segments.offset - batch.first, ids)
    of_tokens = jax.vmap(jax.vmap(_token_noise, in_axes=(0, 0, None)), in_axes=(0, 0, None))
    noise = of_tokens(_of_segment(draws.noise, ids), place, batch.tokens.shape[-1])
    tokens = interpolate(batch.tokens, noise, _of_segment(draws.sigma, ids))
    dropped = _of_segment(draws.dropped, batch.condition_segments.ids)
    condition = _without(batch.condition, dropped, model)
    return tokens, velocity(batch.tokens, noise), draws.sigma, condition


def _without(condition: jax.Array, dropped: jax.Array, model: WanConfig) -> jax.Array:
    """The condition [B, ...] or [R, C, ...], or none where `dropped` [B] or [R, C] says so."""
    dropped = dropped.reshape(*dropped.shape, *(1,) * (condition.ndim - dropped.ndim))
    null = 0 if model.text else model.num_classes
    return jnp.where(dropped, jnp.asarray(null, condition.dtype), condition)


def _of_segment(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Each token's of a value for each segment: [R, M], [R, T] → [R, T]; of none, the first's."""
    return jax.vmap(lambda row, slot: row[jnp.maximum(slot, 0)])(values, ids)
