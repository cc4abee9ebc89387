"""Training objectives: their interface, a registry by name, and flow matching (arXiv 2210.02747).

Flow matching gives weighted sums of sample losses, bucketed or packed. Noise depends on the sample,
not on its position in the batch: the key of a token's noise derives from the sample's epoch, the
sample and the token's index in it. Both layouts therefore train on the same noise for a sample in
an epoch.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from alload_jax.data.batch import AnyBatch, Batch, PackedBatch
from alload_jax.diffusion.timesteps import (
    NoiseWeighting,
    TimestepConfig,
    interpolate,
    loss_weight,
    sample_sigma,
    squared_error,
    velocity,
)
from alload_jax.errors import InputError, require_fields
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.embedding import TIMESTEP_SCALE
from alload_jax.models.common.parts import Auxiliary, unpatchify
from alload_jax.models.common.segments import PADDING, to_tokens
from alload_jax.models.families import Model, family_of
from alload_jax.registry import Registry


class LossSums(NamedTuple):
    """Weighted sums over the samples of a micro-batch, float32.

    Attributes:
      minimised: Σ weight·loss that is differentiated.
      loss: Σ weight·loss of the model's prediction, logged as `loss`.
      weight: Σ weight, by which the sums of a step are divided.
      auxiliary: Σ weight·value of each auxiliary value, of any shape. Their means over a step's
        samples are logged and passed to the family's `update_variables`.
    """

    minimised: jax.Array
    loss: jax.Array
    weight: jax.Array
    auxiliary: Auxiliary


class Objective(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config."""

    @property
    def timesteps(self) -> TimestepConfig:
        """Distribution of noise levels, which sampling uses too."""
        ...

    def __call__(
        self, model: Model, batch: AnyBatch, key: jax.Array, sharding: NamedSharding
    ) -> LossSums:
        """Computes weighted sums of loss and auxiliary values over a micro-batch.

        Args:
          model: the model.
          batch: a bucketed or packed micro-batch.
          key: the run's key; a sample's random values also depend on its epoch.
          sharding: sharding of rows over the mesh.
        """
        ...


@runtime_checkable
class MeasuresLevels(Protocol):
    """What an objective adds so that a run can be validated: its errors at a fixed noise level."""

    def errors_at(
        self, model: Model, batch: Batch, key: jax.Array, sigma: jax.Array, sharding: NamedSharding
    ) -> jax.Array:
        """Computes the error of each sample at a noise level, always with its condition.

        Args:
          model: the model.
          batch: a bucketed micro-batch. Random values depend on `key`, `epoch` and `sample` alone.
          key: of the noise.
          sigma: float32 scalar, the noise level after any shift, 0 (data) to 1 (noise).
          sharding: sharding of rows over the mesh.

        Returns:
          [B] float32, unweighted; any value for padding.
        """
        ...


OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective.name", {"flow_matching": "alload_jax.objectives:FlowMatching"}
)
"""Classes of objectives, each an `Objective`."""
DEFAULT_OBJECTIVE = "flow_matching"


_GIVEN = 3
"""Part of the key of whether a first frame is given, apart from the three that a sample splits."""


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
    config: "FlowMatching",
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
    condition: PyTree
    given: jax.Array


def _token_noise(key: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Returns the noise [size] of one token from the sample's key and its index in the sample."""
    return jax.random.normal(jax.random.fold_in(key, place), (size,))


def noised(
    batch: Batch,
    key: jax.Array,
    config: "FlowMatching",
    model: ModelConfig,
    level: jax.Array | None = None,
) -> Noised:
    """Adds noise to a bucketed micro-batch.

    Args:
      batch: a bucketed micro-batch.
      key: the run's key.
      config: distribution of noise levels and condition dropout.
      model: the model's config.
      level: float32 scalar, a noise level for all samples, which then keep their conditions; None
        for what the config says.
    """
    volume = math.prod(model.patch_size)
    seq_len = math.prod(batch.latents.shape[1:4]) // volume
    draw = jax.vmap(lambda epoch, sample: _draw(key, epoch, sample, config, seq_len))
    draws = draw(batch.epoch, batch.sample)
    if level is not None:
        sigma, kept = jnp.full_like(draws.sigma, level), jnp.zeros_like(draws.dropped)
        draws = draws._replace(sigma=sigma, dropped=kept)
    token_noise = jax.vmap(_token_noise, in_axes=(None, 0, None))
    size = volume * batch.latents.shape[-1]
    tokens = jax.vmap(token_noise, in_axes=(0, None, None))(draws.noise, jnp.arange(seq_len), size)
    noise = unpatchify(tokens, batch.latents.shape, model.patch_size)
    latents = interpolate(batch.latents, noise, draws.sigma)
    condition = _drop_conditions(batch.condition, draws.dropped, model)
    target = velocity(batch.latents, noise)
    return Noised(latents, target, draws.sigma, condition, draws.given)


def noised_rows(
    batch: PackedBatch, key: jax.Array, config: "FlowMatching", model: ModelConfig
) -> Noised:
    """Adds noise to a packed micro-batch; a sample gets the same noise as in `noised`."""
    ids = batch.metadata.tokens.ids
    draw = jax.vmap(
        jax.vmap(lambda epoch, sample, seq_len: _draw(key, epoch, sample, config, seq_len))
    )
    draws = draw(batch.epoch, batch.sample, jnp.maximum(batch.seq_len, 1))
    frame, line = (to_tokens(each, ids) for each in (batch.frame_tokens, batch.line_tokens))
    place = batch.position[..., 0] * frame + batch.position[..., 1] * line + batch.position[..., 2]
    token_noise = jax.vmap(jax.vmap(_token_noise, in_axes=(0, 0, None)), in_axes=(0, 0, None))
    noise = token_noise(to_tokens(draws.noise, ids), place, batch.tokens.shape[-1])
    tokens = interpolate(batch.tokens, noise, to_tokens(draws.sigma, ids))
    dropped = draws.dropped
    if not isinstance(batch.condition, dict):
        dropped = to_tokens(dropped, batch.metadata.condition.ids)
    condition = _drop_conditions(batch.condition, dropped, model)
    return Noised(tokens, velocity(batch.tokens, noise), draws.sigma, condition, draws.given)


def _drop_conditions(condition: PyTree, dropped: jax.Array, model: ModelConfig) -> PyTree:
    """Replaces dropped conditions by the null condition, or takes their tokens from samples.

    Args:
      condition: [B, ...] or [R, C, ...]; or tokens by name, of which samples may keep some.
      dropped: [B] or [R, C] bool; [B] or [R, M] with tokens.
      model: the model's config.
    """
    if isinstance(condition, dict):
        dropped = dropped if dropped.ndim > 1 else dropped[:, None]
        kept = {part.name for part in model.condition_parts() if not part.dropped}
        return {
            name: tokens if name in kept else tokens.without(dropped)
            for name, tokens in condition.items()
        }
    dropped = dropped.reshape(*dropped.shape, *(1,) * (condition.ndim - dropped.ndim))
    null = 0 if model.text else model.num_classes
    return jnp.where(dropped, jnp.asarray(null, condition.dtype), condition)


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
      given_first_frame: fraction of videos trained with their first latent frame clean, at timestep
        0 and without a loss, so that samples can go on from a picture (Wan 2.2's 5B model).
      weighting: the mean loss of a step is over its samples (`sample`), so that an image counts as
        much as a long video of the same step, or over their tokens (`token`), so that a token
        counts the same in every step of full rows.
      noise_weighting: weight of a sample's loss by its noise level σ: none; min_snr, min((1 − σ)²,
        γ·σ²), which is min-SNR-γ (arXiv 2303.09556) for this objective; cosmap, 2 / (π·(1 − 2σ +
        2σ²)) (arXiv 2403.03206); or sigma_sqrt, 1 / σ², as in diffusers. The logged loss is
        weighted.
      min_snr_gamma: γ of `min_snr`.
    """

    name: Literal["flow_matching"] = "flow_matching"
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    condition_dropout: float = 0.1
    given_first_frame: float = 0.0
    weighting: Weighting = "sample"
    noise_weighting: NoiseWeighting = "none"
    min_snr_gamma: float = 5.0

    def __post_init__(self) -> None:
        shares, inside = "condition_dropout given_first_frame", lambda value: 0 <= value <= 1
        require_fields("objective.", self, shares, inside, "from 0 to 1")
        for name, choices in (("weighting", Weighting), ("noise_weighting", NoiseWeighting)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise InputError(
                    f"objective.{name} is {value!r}; choose {' or '.join(get_args(choices))}"
                )
        bound = "above 0, such as 5"
        require_fields("objective.", self, "min_snr_gamma", lambda value: value > 0, bound)

    def __call__(
        self, model: Model, batch: AnyBatch, key: jax.Array, sharding: NamedSharding
    ) -> LossSums:
        """See `Objective.__call__`.

        Raises:
          InputError: the model cannot have a given first frame.
        """
        config = model.config
        of_frame = family_of(config).has_first_frame_timestep and config.patch_size[0] == 1
        if self.given_first_frame and not of_frame:
            raise InputError(
                f"objective.given_first_frame is set, but model.family {config.family} with "
                f"model.patch_size {config.patch_size} has no timestep of its own for the first "
                "frame; set it to 0"
            )
        if self.weighting == "token":
            if isinstance(batch, PackedBatch):
                seq_len = batch.seq_len
            else:
                volume = math.prod(config.patch_size)
                seq_len = jnp.asarray(math.prod(batch.latents.shape[1:4]) // volume)
            batch = batch._replace(weight=batch.weight * seq_len.astype(jnp.float32))
        if isinstance(batch, PackedBatch):
            loss, auxiliary = _packed(model, batch, key, self, sharding)
        else:
            noisy = noised(batch, key, self, config)
            error, auxiliary = _errors(model, batch, noisy, self, sharding)
            loss = jnp.sum(_by_noise(batch.weight, noisy.sigma, self) * error)
        sums, weight = {}, batch.weight  # weight: [B] or [R, M], value: [B, ...] or [R, M, ...]
        for name, value in auxiliary.items():
            counts = (weight > 0).reshape(*weight.shape, *(1,) * (value.ndim - weight.ndim))
            # Values of padding may not be finite, and 0·NaN is NaN.
            finite = jnp.where(counts, value.astype(jnp.float32), 0.0)
            sums[name] = jnp.tensordot(weight, finite, axes=weight.ndim)
        minimised = loss
        for name, value in sums.items():
            if name.endswith("_loss"):
                minimised = minimised + jnp.mean(value)
        return LossSums(minimised, loss, jnp.sum(batch.weight), sums)

    def loss_of_nothing(self, mean_square: float, model: ModelConfig) -> float | None:
        """The most that a new model loses, whose last layer gives zeros, for a mean square of data.

        None where the weights of noise levels have no bound worth the name, and where zeros are no
        velocity of zero.
        """
        if not model.predicts_velocity:
            return None
        most = {"none": 1.0, "min_snr": 1.0, "cosmap": 4 / math.pi}.get(self.noise_weighting)
        return None if most is None else most * (1 + mean_square)

    def errors_at(
        self, model: Model, batch: Batch, key: jax.Array, sigma: jax.Array, sharding: NamedSharding
    ) -> jax.Array:
        """See `MeasuresLevels.errors_at`; first frames are given to as many videos as in training.

        Returns:
          [B] float32, the mean squared error of each sample's velocity.
        """
        noisy = noised(batch, key, self, model.config, sigma)
        return _errors(model, batch, noisy, self, sharding)[0]


def _errors(
    model: Model, batch: Batch, noisy: Noised, config: FlowMatching, sharding: NamedSharding
) -> tuple[jax.Array, Auxiliary]:
    """The mean squared error of each sample, [B], and auxiliary values [B, ...]."""
    latents, first = noisy.latents, None
    if config.given_first_frame:
        frames = latents.shape[1]
        given = noisy.given & (frames > 1)
        is_given = given[:, None] & (jnp.arange(frames) == 0)
        latents = jnp.where(is_given[:, :, None, None, None], batch.latents, latents)
        first = jnp.where(given, 0.0, noisy.sigma * TIMESTEP_SCALE)
    predicted = model.forward(
        _with_given(latents, batch.given, 1),
        noisy.sigma * TIMESTEP_SCALE,
        noisy.condition,
        sharding=sharding,
        **_present(image=batch.image, first_frame_timestep=first),
    )
    if config.given_first_frame:
        by_frame = jax.vmap(squared_error)(predicted.velocity, noisy.target)
        predicts = jnp.where(is_given, 0.0, 1.0)
        error = jnp.sum(by_frame * predicts, axis=1) / jnp.sum(predicts, axis=1)
    else:
        error = squared_error(predicted.velocity, noisy.target)
    return error, predicted.auxiliary


def _packed(
    model: Model, batch: PackedBatch, key: jax.Array, config: FlowMatching, sharding: NamedSharding
) -> tuple[jax.Array, Auxiliary]:
    noisy = noised_rows(batch, key, config, model.config)
    segments = batch.metadata.tokens
    tokens, first = noisy.latents, None
    # A sample's loss is the mean over its tokens; the weight of a part is its fraction of them.
    sample_weight = _by_noise(batch.weight, noisy.sigma, config)
    token_weight = sample_weight / jnp.maximum(segments.length, 1)
    is_given = segments.ids == PADDING
    if config.given_first_frame:
        given = noisy.given & (batch.seq_len > batch.frame_tokens)
        is_given = is_given | (to_tokens(given, segments.ids) & (batch.position[..., 0] == 0))
        tokens = jnp.where(is_given[..., None], batch.tokens, tokens)
        predicted_tokens = batch.seq_len - jnp.where(given, batch.frame_tokens, 0)
        token_weight = token_weight * batch.seq_len / jnp.maximum(predicted_tokens, 1)
        first = jnp.where(given, 0.0, noisy.sigma * TIMESTEP_SCALE)
    predicted = model.forward_packed(
        _with_given(tokens, batch.given, math.prod(model.config.patch_size)),
        batch.position,
        batch.metadata,
        noisy.sigma * TIMESTEP_SCALE,
        noisy.condition,
        sharding=sharding,
        **_present(image=batch.image, first_frame_timestep=first),
    )
    error = jax.vmap(squared_error)(predicted.velocity, noisy.target)
    weight = jnp.where(is_given, 0, to_tokens(token_weight, segments.ids))
    return jnp.sum(weight * error), predicted.auxiliary


def _by_noise(weight: jax.Array, sigma: jax.Array, config: FlowMatching) -> jax.Array:
    """The weights of samples times those of their noise levels, [B] or [R, M]."""
    if config.noise_weighting == "none":
        return weight
    return weight * loss_weight(sigma, config.noise_weighting, config.min_snr_gamma)


def _present(**arguments: jax.Array | None) -> dict[str, jax.Array]:
    """The arguments that are not None, so that a family need not take the others."""
    return {name: value for name, value in arguments.items() if value is not None}


def _with_given(latents: jax.Array, given: jax.Array | None, volume: int) -> jax.Array:
    """Appends the channels of what the model is given to noisy latents or to their patches.

    Args:
      latents: [..., volume · C].
      given: [..., volume · G] or None.
      volume: latents in a patch; 1 if these are no patches.
    """
    if given is None:
        return latents
    split = (part.reshape(*part.shape[:-1], volume, -1) for part in (latents, given))
    return jnp.concatenate(list(split), axis=-1).reshape(*latents.shape[:-1], -1)
