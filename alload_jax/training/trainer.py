"""The state of a run and the compiled programs that advance it."""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from alload_jax.data.batch import Batch
from alload_jax.data.condition import Conditions
from alload_jax.data.manifest import Manifest
from alload_jax.data.placement import PlacedStep
from alload_jax.errors import InputError
from alload_jax.models.config import DiTConfig
from alload_jax.planning.plan import Plan
from alload_jax.sharding.mesh import batch_sharding
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.state import TrainState
from alload_jax.training.step import DiffusionConfig, make_accumulate, make_update, zero_sums

LatentShape = tuple[int, ...]
"""(rows of all ranks, frames, height, width, channels) of a micro-batch."""


class Trainer:
    """Runs planned steps.

    Attributes:
      state: what training has reached.
      programs: compiled gradient programs, one for each shape of micro-batch.
    """

    def __init__(
        self,
        model: DiTConfig,
        diffusion: DiffusionConfig,
        optimizer: optax.GradientTransformation,
        optimizer_config: OptimizerConfig,
        mesh: Mesh,
        state: TrainState,
    ):
        """Takes over `state`, whose buffers each step reuses."""
        self.state = state
        self.programs: dict[LatentShape, Any] = {}
        self._mesh = mesh
        self._accumulate: Any = make_accumulate(model, diffusion, mesh)
        self._update = make_update(optimizer, optimizer_config, mesh)
        self._sums = zero_sums(state.params, mesh)

    def compile(
        self, shapes: Sequence[LatentShape], conditions: Conditions
    ) -> Iterator[LatentShape]:
        """Compiles the gradient of every shape, in parallel, yielding each as it is done.

        A shape that can't be compiled fails here rather than days into a run.

        Args:
          shapes: of the micro-batches' latents.
          conditions: of every row.
        """

        def compile_one(shape: LatentShape) -> Any:
            batch = _abstract_batch(shape, conditions, self._mesh)
            epoch = jax.ShapeDtypeStruct((), jnp.int32)
            return self._accumulate.lower(
                self.state.params, self._sums, batch, self.state.key, epoch
            ).compile()

        update: Any = self._update
        self._update = update.lower(self.state, self._sums).compile()
        # XLA compiles one program on several cores already.
        pool = ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 4))
        try:
            for shape, program in zip(shapes, pool.map(compile_one, shapes), strict=True):
                self.programs[shape] = program
                yield shape
        finally:
            pool.shutdown(cancel_futures=True)

    def step(self, step: PlacedStep) -> dict[str, jax.Array]:
        """Dispatches a step, and returns its metrics before they are computed.

        Returns:
          `loss` and `grad_norm`, float32 scalars.
        """
        epoch = jnp.int32(step.epoch)
        for batch in step.batches:
            gradient = self.programs[batch.latents.shape]
            self._sums = gradient(self.state.params, self._sums, batch, self.state.key, epoch)
        self.state, self._sums, metrics = self._update(self.state, self._sums)
        return metrics


def micro_batch_shapes(plan: Plan, manifest: Manifest) -> list[LatentShape]:
    """Every shape of micro-batch that a synchronous plan holds, largest first.

    Raises:
      InputError: the plan's ranks are independent, or its rows packed.
    """
    if plan.epoch(0).packing is not None:
        raise InputError(
            "planning.policy packs samples into rows; training runs bucketed plans so far, such "
            "as dual_constraint (`alload plan` shows both)"
        )
    if plan.layout.mode != "synchronous":
        raise InputError(
            f"planning.ranks_mode is {plan.layout.mode}; training runs synchronous plans so far "
            "(`alload plan` shows both)"
        )
    epoch = plan.epoch(0)
    distinct = np.unique(np.column_stack([epoch.rows * epoch.ranks, epoch.shape]), axis=0)
    shapes = [(rows, *manifest.latent_shape(tuple(size))) for rows, *size in distinct.tolist()]
    return sorted(shapes, key=lambda shape: (-math.prod(shape), shape))


def _abstract_batch(latents: LatentShape, conditions: Conditions, mesh: Mesh) -> Batch:
    """A micro-batch's shapes, dtypes and shardings."""
    rows, sharding = latents[0], batch_sharding(mesh)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(
        latents=array(latents, jnp.float32),
        condition=array(conditions.shape(rows), conditions.dtype),
        sample=array((rows,), jnp.int32),
        weight=array((rows,), jnp.float32),
    )
