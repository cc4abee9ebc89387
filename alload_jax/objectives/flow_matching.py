"""Flow matching (arXiv 2210.02747): weighted sums of sample losses, bucketed or packed.

Noise depends on the sample, not on its position in the batch: the key of a token's noise derives
from the sample's epoch, the sample and the token's index in it. Both layouts therefore train on the
same noise for a sample in an epoch.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

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
"""Suffix of the names of auxiliary values that are added to the minimised loss."""


Weighting = Literal["sample", "token"]


@dataclass(frozen=True)
class FlowMatching:
    """Flow matching: the squared error of the predicted velocity; see `Objective`.

    Auxiliary values of the model whose names end in `_loss` are also minimised, each as the mean
    over its layers.

    Attributes:
      name: `flow_matching`.
      timesteps: distribution of noise levels.
      condition_dropout: fraction of samples trained with the null condition, which guidance needs:
        the null class, or a text of zeros.
      weighting: the mean loss of a step is over its samples (`sample`), so that an image counts as
        much as a long video of the same step, or over their tokens (`token`), so that a token
        counts the same in every step of full rows.
    """

    name: Literal["flow_matching"] = "flow_matching"
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    condition_dropout: float = 0.1
    weighting: Weighting = "sample"

    def __post_init__(self) -> None:
        if not 0 <= self.condition_dropout <= 1:
            raise InputError(
                f"objective.condition_dropout is {self.condition_dropout}; it must be from 0 to 1"
            )
        if self.weighting not in get_args(Weighting):
            raise InputError(
                f"objective.weighting is {self.weighting!r}; "
                f"choose {' or '.join(get_args(Weighting))}"
            )

    def __call__(
        self, model: Any, batch: AnyBatch, key: jax.Array, sharding: NamedSharding
    ) -> LossSums:
        """See `Objective.__call__`."""
        if self.weighting == "token":
            seq_len = _seq_len(batch, model.config)
            batch = batch._replace(weight=batch.weight * seq_len.astype(jnp.float32))
        run = _packed if isinstance(batch, PackedBatch) else _bucketed
        loss, auxiliary = run(model, batch, key, self, sharding)  # type: ignore[arg-type]
        sums = {name: _weighted_sum(batch.weight, value) for name, value in auxiliary.items()}
        minimised = loss
        for name, value in sums.items():
            if name.endswith(_MINIMISED):
                minimised = minimised + jnp.mean(value)
        return LossSums(minimised, loss, jnp.sum(batch.weight), sums)


def _seq_len(batch: AnyBatch, model: ModelConfig) -> jax.Array:
    """Tokens of the batch's samples: int32 scalar if bucketed, [R, M] if packed."""
    if isinstance(batch, PackedBatch):
        return batch.seq_len
    return jnp.asarray(math.prod(batch.latents.shape[1:4]) // math.prod(model.patch_size))


def _weighted_sum(weight: jax.Array, value: jax.Array) -> jax.Array:
    """Computes Σ weight·value over samples.

    Args:
      weight: [B] or [R, M].
      value: [B, ...] or [R, M, ...].

    Returns:
      [...] float32.
    """
    counts = (weight > 0).reshape(*weight.shape, *(1,) * (value.ndim - weight.ndim))
    # Values of padding may not be finite, and 0·NaN is NaN.
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
    # A sample's loss is the mean over its tokens; the weight of a part is its fraction of them.
    segments = batch.metadata.tokens
    token_weight = batch.weight / jnp.maximum(segments.length, 1)
    weight = jnp.where(segments.ids == PADDING, 0, _to_tokens(token_weight, segments.ids))
    return jnp.sum(weight * error), predicted.auxiliary


class _Draws(NamedTuple):
    """Random values of a sample.

    Attributes:
      noise: key of the noise of the sample's tokens.
      sigma: noise level.
      dropped: whether the sample is trained with the null condition.
    """

    noise: jax.Array
    sigma: jax.Array
    dropped: jax.Array


def _draw(
    key: jax.Array,
    epoch: jax.Array,
    sample: jax.Array,
    config: FlowMatching,
    seq_len: int | jax.Array,
) -> _Draws:
    of_sample = jax.random.fold_in(jax.random.fold_in(key, epoch), sample)
    noise, sigma, drop = jax.random.split(of_sample, 3)
    return _Draws(
        noise,
        sample_sigma(sigma, config.timesteps, seq_len),
        jax.random.bernoulli(drop, config.condition_dropout),
    )


def _token_noise(key: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Returns the noise [size] of one token from the sample's key and its index in the sample."""
    return jax.random.normal(jax.random.fold_in(key, place), (size,))


def noised(
    batch: Batch, key: jax.Array, config: FlowMatching, model: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds noise to a bucketed micro-batch.

    Args:
      batch: a bucketed micro-batch.
      key: the run's key.
      config: distribution of noise levels and condition dropout.
      model: the model's config.

    Returns:
      latents [B, ...], target velocity [B, ...], sigma [B], condition with the batch's shape.
    """
    volume = math.prod(model.patch_size)
    seq_len = math.prod(batch.latents.shape[1:4]) // volume
    draw = jax.vmap(lambda epoch, sample: _draw(key, epoch, sample, config, seq_len))
    draws = draw(batch.epoch, batch.sample)
    token_noise = jax.vmap(_token_noise, in_axes=(None, 0, None))
    size = volume * batch.latents.shape[-1]
    tokens = jax.vmap(token_noise, in_axes=(0, None, None))(draws.noise, jnp.arange(seq_len), size)
    noise = unpatchify(tokens, batch.latents.shape, model.patch_size)
    latents = interpolate(batch.latents, noise, draws.sigma)
    target = velocity(batch.latents, noise)
    return latents, target, draws.sigma, _drop_conditions(batch.condition, draws.dropped, model)


def noised_rows(
    batch: PackedBatch, key: jax.Array, config: FlowMatching, model: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds noise to a packed micro-batch; a sample gets the same noise as in `noised`.

    Returns:
      tokens [R, T, patch_dim], target velocity [R, T, patch_dim], sigma [R, M], condition with
        the batch's shape.
    """
    segments = batch.metadata.tokens
    ids = segments.ids
    draw = jax.vmap(
        jax.vmap(lambda epoch, sample, seq_len: _draw(key, epoch, sample, config, seq_len))
    )
    draws = draw(batch.epoch, batch.sample, jnp.maximum(batch.seq_len, 1))
    place = jnp.arange(ids.shape[1]) - _to_tokens(segments.offset - batch.first, ids)
    token_noise = jax.vmap(jax.vmap(_token_noise, in_axes=(0, 0, None)), in_axes=(0, 0, None))
    noise = token_noise(_to_tokens(draws.noise, ids), place, batch.tokens.shape[-1])
    tokens = interpolate(batch.tokens, noise, _to_tokens(draws.sigma, ids))
    dropped = _to_tokens(draws.dropped, batch.metadata.condition.ids)
    condition = _drop_conditions(batch.condition, dropped, model)
    return tokens, velocity(batch.tokens, noise), draws.sigma, condition


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


def _to_tokens(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Expands values per segment to tokens; padding gets the value of the first segment.

    Args:
      values: [R, M, ...].
      ids: [R, T] int32, slot of each token's segment.

    Returns:
      [R, T, ...].
    """
    return jax.vmap(lambda row, slot: row[jnp.maximum(slot, 0)])(values, ids)
