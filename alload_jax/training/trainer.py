"""The state of a run and the compiled programs that advance it."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from alload_jax.data.batch import AnyBatch, Signature, signature
from alload_jax.data.placement import PlacedStep
from alload_jax.models.wan.config import WanConfig
from alload_jax.objectives.flow_matching import DiffusionConfig
from alload_jax.sharding.mesh import batch_sharding
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.state import TrainState
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator


class TrainingSpec(NamedTuple):
    """What a training computes, wherever it runs.

    Attributes:
      model: the transformer's config.
      diffusion: how samples are noised.
      optimizer: of the parameters.
      optimizer_config: its settings.
    """

    model: WanConfig
    diffusion: DiffusionConfig
    optimizer: optax.GradientTransformation
    optimizer_config: OptimizerConfig


class Trainer:
    """Runs planned steps.

    Attributes:
      state: what training has reached.
      programs: compiled gradient programs, one for each shape of micro-batch.
    """

    def __init__(self, recipe: TrainingSpec, mesh: Mesh, state: TrainState):
        """Takes over `state`, whose buffers each step reuses."""
        self.state = state
        self.programs: dict[Signature, Any] = {}
        self._mesh = mesh
        self._accumulate: Any = make_accumulate(recipe.model, recipe.diffusion, mesh)
        self._update = make_update(recipe.optimizer, recipe.optimizer_config, mesh)
        self._sums = zero_accumulator(state.params, mesh)

    def compile(self, shapes: Sequence[AnyBatch]) -> Iterator[AnyBatch]:
        """Compiles the gradient of every micro-batch, in parallel, yielding each as it is done.

        One that can't be compiled fails here rather than days into a run.

        Args:
          shapes: shapes and dtypes of the micro-batches of all ranks.
        """

        def compile_one(shape: AnyBatch) -> Any:
            epoch = jax.ShapeDtypeStruct((), jnp.int32)
            return self._accumulate.lower(
                self.state.params, self._sums, on_mesh(shape, self._mesh), self.state.key, epoch
            ).compile()

        update: Any = self._update
        self._update = update.lower(self.state, self._sums).compile()
        for shape, program in in_parallel(compile_one, shapes):
            self.programs[signature(shape)] = program
            yield shape

    def step(self, step: PlacedStep) -> dict[str, jax.Array]:
        """Dispatches a step, and returns its metrics before they are computed.

        Returns:
          `loss` and `grad_norm`, float32 scalars.
        """
        epoch = jnp.int32(step.epoch)
        for batch in step.batches:
            gradient = self.programs[signature(batch)]
            self._sums = gradient(self.state.params, self._sums, batch, self.state.key, epoch)
        self.state, self._sums, metrics = self._update(self.state, self._sums)
        return metrics


def in_parallel(
    compile_one: Callable[[AnyBatch], Any], shapes: Sequence[AnyBatch]
) -> Iterator[tuple[AnyBatch, Any]]:
    """Yields each shape with what `compile_one` makes of it, several at work at once."""
    # XLA compiles one program on several cores already.
    pool = ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 4))
    try:
        yield from zip(shapes, pool.map(compile_one, shapes), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def on_mesh(batch: AnyBatch, mesh: Mesh) -> AnyBatch:
    """A micro-batch's shapes and dtypes, with its sharding."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding), batch
    )
