"""The weighted sum of samples' flow-matching losses, in either layout (arXiv 2210.02747).

Noise belongs to the sample, not to its place: every token's noise comes from a key of the epoch,
the sample and the token's number in it. So both layouts learn the same from a sample in an epoch.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from alload_jax.data.batch import AnyBatch, Batch, PackedBatch
from alload_jax.diffusion.flow import TIMESTEP_SCALE, interpolate, squared_error, velocity
from alload_jax.diffusion.timesteps import TimestepConfig, sample_sigma
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.patches import unpatchify
from alload_jax.models.common.segments import PADDING
from alload_jax.objectives.objective import LossSums

_MINIMISED = "_loss"
"""The ending of the names of auxiliary values that are added to what is minimised."""


@dataclass(frozen=True)
class FlowMatching:
    """Flow matching: the squared error of the predicted velocity; see `Objective`.

    Auxiliary values of the model whose names end in `_loss` are minimised besides, each the mean
    over its layers.

    Attributes:
      name: `flow_matching`.
      timesteps: distribution of noise levels.
      condition_dropout: share of samples trained without their condition, for guidance: without
        class, or with a text of zeros.
    """

    name: Literal["flow_matching"] = "flow_matching"
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    condition_dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.condition_dropout <= 1:
            raise InputError(
                f"objective.condition_dropout is {self.condition_dropout}; it must be from 0 to 1"
            )

    def __call__(
        self, model: Any, batch: AnyBatch, key: jax.Array, sharding: NamedSharding
    ) -> LossSums:
        """See `Objective.__call__`."""
        run = _packed if isinstance(batch, PackedBatch) else _bucketed
        loss, auxiliary = run(model, batch, key, self, sharding)  # type: ignore[arg-type]
        sums = {name: _weighted_sum(batch.weight, value) for name, value in auxiliary.items()}
        minimised = loss
        for name, value in sums.items():
            if name.endswith(_MINIMISED):
                minimised = minimised + jnp.mean(value)
        return LossSums(minimised, loss, sums)


def _weighted_sum(weight: jax.Array, value: jax.Array) -> jax.Array:
    """Σ weight·value over samples: [B] or [R, M], [B, ...] or [R, M, ...] → [...]."""
    counts = (weight > 0).reshape(*weight.shape, *(1,) * (value.ndim - weight.ndim))
    # What padding gives may not be finite, and 0·NaN is NaN.
    finite = jnp.where(counts, value.astype(jnp.float32), 0.0)
    return jnp.tensordot(weight, finite, axes=weight.ndim)


def _bucketed(
    model: Any, batch: Batch, key: jax.Array, config: FlowMatching, sharding: NamedSharding
) -> tuple[jax.Array, Auxiliary]:
    latents, target, sigma, condition = noised(batch, key, config, model.config)
    predicted = model.forward(latents, sigma * TIMESTEP_SCALE, condition, sharding=sharding)
    loss = jnp.sum(batch.weight * squared_error(predicted.velocity, target))
    return loss, predicted.auxiliary


def _packed(
    model: Any, batch: PackedBatch, key: jax.Array, config: FlowMatching, sharding: NamedSharding
) -> tuple[jax.Array, Auxiliary]:
    tokens, target, sigma, condition = noised_rows(batch, key, config, model.config)
    predicted = model.forward_packed(
        tokens, batch.position, batch.metadata, sigma * TIMESTEP_SCALE, condition, sharding
    )
    error = jax.vmap(squared_error)(predicted.velocity, target)
    # A sample's loss is the mean over its tokens; a part weighs as its share of them.
    segments = batch.metadata.tokens
    each = batch.weight / jnp.maximum(segments.length, 1)
    weight = jnp.where(segments.ids == PADDING, 0, _of_segment(each, segments.ids))
    return jnp.sum(weight * error), predicted.auxiliary


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
    key: jax.Array, sample: jax.Array, config: FlowMatching, seq_len: int | jax.Array
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
    batch: Batch, key: jax.Array, config: FlowMatching, model: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Noises a micro-batch of one shape.

    Args:
      batch: a micro-batch.
      key: the epoch's key.
      config: how samples are noised.
      model: the model's config.

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
    batch: PackedBatch, key: jax.Array, config: FlowMatching, model: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`noised` for packed rows: the same noise for the same sample.

    Returns:
      tokens [R, T, patch_dim], target velocity [R, T, patch_dim], sigma [R, M], condition like
      the batch's.
    """
    segments = batch.metadata.tokens
    ids = segments.ids
    draw = jax.vmap(jax.vmap(lambda sample, seq_len: _draw(key, sample, config, seq_len)))
    draws = draw(batch.sample, jnp.maximum(batch.seq_len, 1))
    place = jnp.arange(ids.shape[1]) - _of_segment(segments.offset - batch.first, ids)
    of_tokens = jax.vmap(jax.vmap(_token_noise, in_axes=(0, 0, None)), in_axes=(0, 0, None))
    noise = of_tokens(_of_segment(draws.noise, ids), place, batch.tokens.shape[-1])
    tokens = interpolate(batch.tokens, noise, _of_segment(draws.sigma, ids))
    dropped = _of_segment(draws.dropped, batch.metadata.condition.ids)
    condition = _without(batch.condition, dropped, model)
    return tokens, velocity(batch.tokens, noise), draws.sigma, condition


def _without(condition: jax.Array, dropped: jax.Array, model: ModelConfig) -> jax.Array:
    """The condition [B, ...] or [R, C, ...], or none where `dropped` [B] or [R, C] says so."""
    dropped = dropped.reshape(*dropped.shape, *(1,) * (condition.ndim - dropped.ndim))
    null = 0 if model.text else model.num_classes
    return jnp.where(dropped, jnp.asarray(null, condition.dtype), condition)


def _of_segment(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Each token's of a value for each segment: [R, M], [R, T] → [R, T]; of none, the first's."""
    return jax.vmap(lambda row, slot: row[jnp.maximum(slot, 0)])(values, ids)
