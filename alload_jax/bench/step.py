"""A training step of one model on one device, with random data, for measurements."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.bench.weights import without_zeros
from alload_jax.data.batch import AnyBatch, Batch
from alload_jax.data.condition import form_for
from alload_jax.models.common.condition_tokens import ConditionTokens
from alload_jax.models.common.config import ConditionPart, ModelConfig
from alload_jax.models.common.segments import Segments
from alload_jax.models.families import (
    abstract_model,
    family_of,
)
from alload_jax.objectives.objective import DEFAULT_OBJECTIVE, OBJECTIVES, Objective
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import ALL_TRAINED, ParametersConfig
from alload_jax.training.state import TrainingSpec, init_state
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator

_LR_STEPS = 1000


def training_spec(
    model: ModelConfig,
    optimizer: OptimizerConfig | None = None,
    objective: Objective | None = None,
    parameters: ParametersConfig = ALL_TRAINED,
) -> TrainingSpec:
    """The training spec of a measured step; its defaults are those of a config."""
    optimizer = optimizer or OptimizerConfig()
    objective = objective or OBJECTIVES.get(DEFAULT_OBJECTIVE)()
    transform = make_optimizer(optimizer, _LR_STEPS)
    return TrainingSpec(
        model,
        objective,
        transform,
        optimizer.ema_decay,
        parameters,
        optimizer.accumulate_dtype,
    )


def tokens_beside(model: ModelConfig, condition_tokens: int) -> int:
    """Tokens of a row's condition that plans count in the length of a sample.

    Args:
      model: the model's config.
      condition_tokens: condition tokens of models conditioned on classes.
    """
    if not model.joint_attention:
        return 0
    parts = model.condition_parts()
    return sum(part.length for part in parts) if parts else condition_tokens


class Step:
    """A training step of one model on one device: gradient of one micro-batch, then the update.

    Attributes:
      spec: model, objective and optimizer.
      model: the model's config.
      state, accumulator: the values that a step updates.
      accumulate, update: the two jitted functions of a step.
    """

    def __init__(self, spec: TrainingSpec, condition_tokens: int = 512, *, single: bool = True):
        """Initializes the weights.

        Args:
          spec: what training computes.
          condition_tokens: applies to models conditioned on classes.
          single: whether steps have no other micro-batches, as in `make_accumulate`.
        """
        self.condition_tokens, self._single = condition_tokens, single
        self.mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
        self.use(spec)

    @property
    def tokens_beside(self) -> int:
        """See the function `tokens_beside`."""
        return tokens_beside(self.model, self.condition_tokens)

    def use(self, spec: TrainingSpec) -> None:
        """Takes another spec, with a new state in place of the last one."""
        self.spec, self.model = spec, spec.model
        self.accumulate: Any = make_accumulate(spec, self.mesh, single=self._single)
        self.update: Any = make_update(spec, self.mesh, single=self._single)
        self.renew()

    def renew(self) -> None:
        """Makes a new state. A step that failed has deleted the arrays donated to it."""
        self.state: Any = None
        self.accumulator: Any = None
        self.state = without_zeros(init_state(self.spec, self.mesh, 0))
        smallest = self.batch_shape((1, *self.model.patch_size))
        self.accumulator = zero_accumulator(
            self.spec, self.mesh, self.state.weights, smallest, single=self._single
        )

    def compile(self, latents: tuple[int, ...]) -> Any:
        """Compiles the gradient for latents (rows, frames, height, width)."""
        return self.compile_for(self.batch_shape(latents))

    def compile_for(self, batch: AnyBatch) -> Any:
        """Compiles the gradient for the shapes and dtypes of a micro-batch."""
        state = self.state
        lowered = self.accumulate.lower(state.weights, self.accumulator, batch, state.key)
        return lowered.compile()

    def batch_shape(self, latents: tuple[int, ...]) -> Batch:
        """Shapes and dtypes of a micro-batch with latents (rows, frames, height, width)."""
        return jax.eval_shape(lambda: random_batch(self.model, latents, self.condition_tokens))

    def batch(self, latents: tuple[int, ...]) -> Batch:
        """A random micro-batch with latents (rows, frames, height, width)."""
        make = jax.jit(random_batch, static_argnums=(0, 1, 2))
        return make(self.model, latents, self.condition_tokens)

    def run(self, gradient: Any, batch: AnyBatch) -> float:
        """Runs one step and returns its seconds.

        Raises:
          FloatingPointError: the loss is not finite.
        """
        begin = time.perf_counter()
        state = self.state
        self.accumulator = gradient(state.weights, self.accumulator, batch, state.key)
        self.state, self.accumulator, metrics = self.update(state, self.accumulator)
        loss = float(metrics["loss"])
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        return time.perf_counter() - begin


def random_batch(model: ModelConfig, latents: tuple[int, ...], text_length: int = 512) -> Batch:
    """Random latents (rows, frames, height, width) and what else the model takes."""
    rows, form = latents[0], form_for(model)
    if parts := model.condition_parts():
        return _batch_with_parts(model, latents, parts)
    if model.text:
        shape = (rows, model.text.length, model.text.dim)
        condition = jax.random.normal(jax.random.key(2), shape, model.compute_dtype)
    else:
        condition = jnp.zeros((rows, text_length), jnp.int32)
    return Batch(
        latents=jax.random.normal(jax.random.key(1), (*latents, model.latent_channels)),
        condition=condition,
        sample=jnp.arange(rows, dtype=jnp.int32),
        epoch=jnp.zeros(rows, jnp.int32),
        weight=jnp.ones((rows,)),
        given=jnp.ones((*latents, form.given_channels)) if form.given_channels else None,
        image=_random_images(rows, form.image_shape, model.compute_dtype),
    )


def _batch_with_parts(
    model: ModelConfig, latents: tuple[int, ...], parts: Sequence[ConditionPart]
) -> Batch:
    """A random batch whose samples have all tokens of each kind."""
    rows = latents[0]
    condition = {}
    for number, part in enumerate(parts):
        shape = (rows, part.length, part.width)
        values = jax.random.normal(jax.random.key(2 + number), shape, model.compute_dtype)
        none, ids = jnp.zeros((rows, 1), jnp.int32), jnp.zeros(shape[:2], jnp.int32)
        condition[part.name] = ConditionTokens(values, Segments(none, none + part.length, ids))
    given = model.given_channels
    return Batch(
        latents=jax.random.normal(jax.random.key(1), (*latents, model.latent_channels)),
        condition=condition,
        sample=jnp.arange(rows, dtype=jnp.int32),
        epoch=jnp.zeros(rows, jnp.int32),
        weight=jnp.ones((rows,)),
        given=jnp.ones((*latents, given)) if given else None,
    )


def _random_images(rows: int, shape: tuple[int, int] | None, dtype: jnp.dtype) -> jax.Array | None:
    return None if shape is None else jax.random.normal(jax.random.key(3), (rows, *shape), dtype)


def with_density(model: ModelConfig, density: float) -> ModelConfig:
    """The model with this density in all layers, 1 for dense; as it is if it is always dense."""
    if model.sparse_attention is None:
        return model
    variables = abstract_model(model).variables
    records = jax.eval_shape(lambda given: family_of(model).layer_records(model, given), variables)
    forced = (density,) * records["sparse"].shape[0]
    sparse = dataclasses.replace(model.sparse_attention, forced=forced)
    return dataclasses.replace(model, sparse_attention=sparse)
