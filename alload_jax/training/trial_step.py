"""A step of one model on one device with random data: for measurements, and for `remat: auto`."""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.stages import Compiled
from jaxtyping import PyTree

from alload_jax.data.batch import AnyBatch, Batch
from alload_jax.data.condition import form_for
from alload_jax.errors import out_of_memory
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.segments import Segments
from alload_jax.models.common.stored import SCALE
from alload_jax.models.families import abstract_model, family_of
from alload_jax.planning.remat import RematPolicy
from alload_jax.processes import cpus
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.parameters import ALL_TRAINED, ParametersConfig, merge_parameters
from alload_jax.training.state import (
    TrainingSpec,
    TrainState,
    abstract_state,
    init_state,
    training_spec,
)
from alload_jax.training.step import (
    GradientAccumulator,
    make_accumulate,
    make_update,
    zero_accumulator,
)

_LARGEST, _PERIOD = 0.03, 65_521
"""Of the weights that `any_matrices` gives, and the elements after which they repeat."""


def any_matrices(parameters: PyTree) -> PyTree:
    """Values for the matrices of a model, all unlike zero.

    XLA compiles the drawing of random weights for as long as a step. And the head and the gates of
    a new model are zero, and so are most products in the backward passes of the first two steps.
    GPUs draw less power for zeros: on an H200 the second step took up to a tenth less time than
    later steps. With these weights it takes the same time.

    Args:
      parameters: their shapes, with shardings.
    """
    matrices = {
        path: leaf
        for path, leaf in flatten_dict(parameters).items()
        if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating) and path[-1] != SCALE
    }

    def value(leaf: jax.ShapeDtypeStruct, number: int) -> jax.Array:
        place = lax.iota(jnp.uint32, leaf.size) % _PERIOD + number
        return (_LARGEST * jnp.sin(place * 0.7)).astype(leaf.dtype).reshape(leaf.shape)

    def make() -> dict:
        return {path: value(leaf, n) for n, (path, leaf) in enumerate(matrices.items())}

    shardings = {path: leaf.sharding for path, leaf in matrices.items()}
    return unflatten_dict(jax.jit(make, out_shardings=shardings)())


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

    state: TrainState
    accumulator: GradientAccumulator
    update: Any

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
        self.accumulate = make_accumulate(spec, self.mesh, single=self._single)
        self.update = make_update(spec, self.mesh, single=self._single)
        self.renew()

    def renew(self) -> None:
        """Makes a new state. A step that failed has deleted the arrays donated to it."""
        for name in ("state", "accumulator"):  # before memory is taken for the new ones
            vars(self).pop(name, None)
        shapes = abstract_state(self.spec, self.mesh, 0)
        matrices = any_matrices(merge_parameters(shapes.params, shapes.frozen))
        self.state = init_state(self.spec, self.mesh, 0, matrices)
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

    def compile_update(self) -> None:
        """Compiles the update, which a step else does when it first runs."""
        changing = self.state._replace(frozen={})
        self.update = self.update.lower(changing, self.accumulator).compile()

    def batch_shape(self, latents: tuple[int, ...]) -> Batch:
        """Shapes and dtypes of a micro-batch with latents (rows, frames, height, width)."""
        return jax.eval_shape(lambda: random_batch(self.model, latents, self.condition_tokens))

    def batch(self, latents: tuple[int, ...]) -> Batch:
        """A random micro-batch with latents (rows, frames, height, width)."""
        make = jax.jit(random_batch, static_argnums=(0, 1, 2))
        return make(self.model, latents, self.condition_tokens)

    def run(self, gradient: Compiled, batch: AnyBatch) -> float:
        """Runs one step and returns its seconds.

        Raises:
          FloatingPointError: the loss is not finite.
        """
        begin = time.perf_counter()
        state = self.state
        self.accumulator = gradient(state.weights, self.accumulator, batch, state.key)
        after, self.accumulator, metrics = self.update(state._replace(frozen={}), self.accumulator)
        self.state = after._replace(frozen=state.frozen)
        loss = float(metrics["loss"])
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        return time.perf_counter() - begin


def random_batch(model: ModelConfig, latents: tuple[int, ...], text_length: int = 512) -> Batch:
    """Random latents (rows, frames, height, width) and what else the model takes.

    Samples have all tokens of each kind of a condition.
    """
    rows, form, dtype = latents[0], form_for(model), model.compute_dtype
    condition: jax.Array | dict[str, ConditionTokens] = jnp.zeros((rows, text_length), jnp.int32)
    if parts := model.condition_parts():
        condition = {}
        for number, part in enumerate(parts):
            shape = (rows, part.length, part.width)
            values = jax.random.normal(jax.random.key(2 + number), shape, dtype)
            none, ids = jnp.zeros((rows, 1), jnp.int32), jnp.zeros(shape[:2], jnp.int32)
            segments = Segments(none, none + part.length, ids)
            condition[part.name] = ConditionTokens(values, segments)
    elif model.text:
        shape = (rows, model.text.length, model.text.dim)
        condition = jax.random.normal(jax.random.key(2), shape, dtype)
    image = None
    if not parts and form.image_shape is not None:
        image = jax.random.normal(jax.random.key(3), (rows, *form.image_shape), dtype)
    given = model.given_channels if parts else form.given_channels
    return Batch(
        latents=jax.random.normal(jax.random.key(1), (*latents, model.latent_channels)),
        condition=condition,
        sample=jnp.arange(rows, dtype=jnp.int32),
        epoch=jnp.zeros(rows, jnp.int32),
        weight=jnp.ones((rows,)),
        given=jnp.ones((*latents, given)) if given else None,
        image=image,
    )


def with_density(model: ModelConfig, density: float) -> ModelConfig:
    """The model with this density in all layers, 1 for dense; as it is if it is always dense."""
    if model.sparse_attention is None:
        return model
    variables = abstract_model(model).variables
    records = jax.eval_shape(lambda given: family_of(model).layer_records(model, given), variables)
    forced = (density,) * records["sparse"].shape[0]
    sparse = dataclasses.replace(model.sparse_attention, forced=forced)
    return dataclasses.replace(model, sparse_attention=sparse)


_LAYERS = 2
"""Of the model that is timed in place of the whole one."""
_RUNS = 3
CONDITION_TOKENS = 512
"""Condition tokens of a row, for models conditioned on classes."""


def measurable(model: ModelConfig) -> bool:
    """Whether a model of few layers tells the times of the whole one on this device.

    Layers with sparse attention differ from each other, families may have no number of layers, and
    CPUs would take long.
    """
    has_layers = hasattr(model, "num_layers")
    return jax.default_backend() == "gpu" and has_layers and model.sparse_attention is None


def layer_seconds(
    model: ModelConfig,
    latents: tuple[int, ...],
    policies: Sequence[RematPolicy],
    *,
    optimizer: OptimizerConfig | None = None,
    parameters: ParametersConfig = ALL_TRAINED,
    condition_tokens: int = CONDITION_TOKENS,
) -> dict[RematPolicy, float] | None:
    """Seconds of a layer under policies, each by the gradient of a model of two layers.

    A share of what does not belong to layers is in all of them alike.

    Args:
      model: its `remat` does not matter.
      latents: (rows, frames, height, width) of a micro-batch.
      policies: `full` is among them.
      optimizer: whose state is held meanwhile; None for the default.
      parameters: which parameters are trained.
      condition_tokens: applies to models conditioned on classes.

    Returns:
      By policy; those that do not fit this device's memory are absent. None where `full` does not.
    """
    found: dict[RematPolicy, float] = {}
    try:
        spec = training_spec(_with_policy(model, "full"), optimizer, None, parameters)
        step = Step(spec, condition_tokens)
        specs = [spec._replace(model=_with_policy(model, each)) for each in policies]
        with ThreadPoolExecutor(max(1, cpus() // 2)) as pool:
            programs = list(pool.map(lambda each: _compiled(step, each, latents), specs))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return None
    for policy, program in zip(policies, programs, strict=True):
        try:
            times = [_run(step, program, step.batch(latents)) for _ in range(_RUNS + 1)]
            found[policy] = statistics.median(times[1:]) / _LAYERS  # the first one warms up
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            step.renew()
    return found if "full" in found else None


def square_latents(model: ModelConfig, tokens: int) -> tuple[int, int, int, int]:
    """(1, frames, height, width) of a row of about as many tokens, one frame of patches."""
    height = 2 * max(1, math.isqrt(tokens) // 2)
    width = max(1, tokens // height)
    frames, rows, columns = model.patch_size
    return 1, frames, height * rows, width * columns


def _with_policy(model: ModelConfig, policy: RematPolicy) -> ModelConfig:
    return dataclasses.replace(model, remat=policy, remat_layers=()).with_layers(_LAYERS)


def _compiled(step: Step, spec: TrainingSpec, latents: tuple[int, ...]) -> Compiled:
    accumulate, state = make_accumulate(spec, step.mesh, single=True), step.state
    batch = step.batch_shape(latents)
    return accumulate.lower(state.weights, step.accumulator, batch, state.key).compile()


def _run(step: Step, program: Compiled, batch: Batch) -> float:
    begin = time.perf_counter()
    state = step.state
    step.accumulator = program(state.weights, step.accumulator, batch, state.key)
    jax.block_until_ready(step.accumulator)
    return time.perf_counter() - begin
