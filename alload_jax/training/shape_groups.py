"""Training of independent ranks: each shape group runs its own programs, one update joins them.

Between two updates a group is a training of its own, on its slice of the mesh: it adds up weighted
sums of loss and gradient over micro-batches whose shapes no other group has to share. The update
runs on all devices; it adds the groups' sums and divides by the sum of weights. A group without a
micro-batch, at the end of an epoch, brings the sums that it has. AdaptiveLoad's setting (arXiv
2605.17923).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.data.batch import AnyBatch, Signature, signature
from alload_jax.data.placement import PlacedStep
from alload_jax.models.wan.config import WanConfig
from alload_jax.objectives.flow_matching import DiffusionConfig
from alload_jax.sharding.groups import GROUP_AXIS, is_local, join_groups, part_of_group
from alload_jax.sharding.mesh import replicated
from alload_jax.sharding.rules import tree_shardings, zero_shardings
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.state import TrainState
from alload_jax.training.step import (
    Accumulate,
    GradientAccumulator,
    Metrics,
    Update,
    accumulator_shardings,
    make_accumulate,
    make_advance,
)
from alload_jax.training.trainer import Trainer, TrainingSpec, in_parallel, on_mesh


def make_trainer(
    recipe: TrainingSpec, mesh: Mesh, state: TrainState, groups: Sequence[Mesh] = ()
) -> "Trainer | GroupTrainer":
    """What runs a plan's steps on a mesh.

    Args:
      recipe: what is computed.
      mesh: all devices.
      state: to start from, taken over.
      groups: the mesh of each of the plan's shape groups; none where all ranks are one.
    """
    if groups:
        return GroupTrainer(recipe, mesh, state, groups)
    return Trainer(recipe, mesh, state)


class GroupTrainer:
    """Runs planned steps of independent ranks; see `Trainer`.

    A process compiles, feeds and dispatches the groups that it has devices of.

    Attributes:
      state: what training has reached.
      programs: compiled gradient programs, one for each of this process's groups (by its mesh) and
        each shape of micro-batch.
    """

    def __init__(self, recipe: TrainingSpec, mesh: Mesh, state: TrainState, groups: Sequence[Mesh]):
        """Takes over `state`, whose buffers each step reuses; `groups` as in `make_trainer`."""
        self.state = state
        self.programs: dict[tuple[Mesh, Signature], Any] = {}
        self._groups = tuple(groups)
        self._update = make_group_update(recipe.optimizer, recipe.optimizer_config, mesh)
        self._shardings = group_accumulator_shardings(state.params, mesh)
        self._local = {
            group: _Group(recipe, group, state.params)
            for group in dict.fromkeys(groups)
            if is_local(group)
        }
        self._share(_zero_group_accumulator(state.params, mesh))

    def compile(self, shapes: Sequence[AnyBatch]) -> Iterator[AnyBatch]:
        """Compiles the gradient of every micro-batch for every group; see `Trainer.compile`.

        Epochs deal shapes anew, so that each group will see them all. A program is bound to its
        devices; the groups of a shape come one after another, so that a compilation cache that
        tells no devices apart can answer for those after the first.
        """

        def compile_one(shape: AnyBatch) -> dict[Mesh, Any]:
            return {mesh: group.compile(shape) for mesh, group in self._local.items()}

        update: Any = self._update
        self._update = update.lower(self.state, self._sums()).compile()
        for shape, programs in in_parallel(compile_one, shapes):
            for mesh, program in programs.items():
                self.programs[mesh, signature(shape)] = program
            yield shape

    def step(self, step: PlacedStep) -> Metrics:
        """Dispatches a step on all groups before anything waits; see `Trainer.step`."""
        for number, batch in zip(step.groups, step.batches, strict=True):
            mesh = self._groups[number]
            self._local[mesh].add(self.programs[mesh, signature(batch)], batch, step.epoch)
        self.state, sums, metrics = self._update(self.state, self._sums())
        self._share(sums)
        return metrics

    def _sums(self) -> GradientAccumulator:
        return join_groups([group.sums for group in self._local.values()], self._shardings)

    def _share(self, sums: GradientAccumulator) -> None:
        """Shows every group its part of the state and of the sums, new with every update."""
        for group in self._local.values():
            group.take(self.state, sums)


class _Group:
    """What a shape group needs for its gradients, all on its own mesh.

    Attributes:
      sums: of the micro-batches since the last update, each array [1, ...].
    """

    def __init__(self, recipe: TrainingSpec, mesh: Mesh, params: Any):
        self._mesh = mesh
        self._accumulate: Any = make_group_accumulate(recipe.model, recipe.diffusion, mesh)
        self._shardings = tree_shardings(params, mesh)
        self._sums_shardings = group_accumulator_shardings(params, mesh)

    def take(self, state: TrainState, sums: GradientAccumulator) -> None:
        self._params = part_of_group(state.params, self._shardings)
        self._key = part_of_group(state.key, replicated(self._mesh))
        self.sums = part_of_group(sums, self._sums_shardings)

    def compile(self, shape: AnyBatch) -> Any:
        epoch = jax.ShapeDtypeStruct((), jnp.int32)
        batch = on_mesh(shape, self._mesh)
        return self._accumulate.lower(self._params, self.sums, batch, self._key, epoch).compile()

    def add(self, program: Any, batch: AnyBatch, epoch: int) -> None:
        self.sums = program(self._params, self.sums, batch, self._key, np.int32(epoch))


def make_group_accumulate(model: WanConfig, diffusion: DiffusionConfig, group: Mesh) -> Accumulate:
    """`make_accumulate` on a group's mesh, of sums [1, ...]: a group's part of all groups'."""
    accumulate = make_accumulate(model, diffusion, group)

    @partial(jax.jit, donate_argnums=1)
    def add(
        params: Any, sums: GradientAccumulator, batch: AnyBatch, key: jax.Array, epoch: jax.Array
    ) -> GradientAccumulator:
        alone = jax.tree.map(lambda part: jnp.squeeze(part, 0), sums)
        added = accumulate(params, alone, batch, key, epoch)
        return jax.lax.with_sharding_constraint(
            jax.tree.map(lambda part: part[None], added), group_accumulator_shardings(params, group)
        )

    return add


def make_group_update(
    optimizer: optax.GradientTransformation, config: OptimizerConfig, mesh: Mesh
) -> Update:
    """`make_update` of the groups' sums, [groups, ...]: XLA reduces and scatters them."""
    advance = make_advance(optimizer, config, mesh)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        state: TrainState, sums: GradientAccumulator
    ) -> tuple[TrainState, GradientAccumulator, Metrics]:
        total = jax.lax.with_sharding_constraint(
            jax.tree.map(lambda part: jnp.sum(part, axis=0), sums),
            accumulator_shardings(state.params, mesh),
        )
        after, metrics = advance(state, total)
        zeroed = jax.lax.with_sharding_constraint(
            jax.tree.map(jnp.zeros_like, sums), group_accumulator_shardings(state.params, mesh)
        )
        return after, zeroed, metrics

    return update


def group_accumulator_shardings(params: Any, mesh: Mesh) -> GradientAccumulator:
    """Of sums [groups, ...]: groups along `data`; within a group as a mesh of its own has them."""

    def stacked(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(GROUP_AXIS, *sharding.spec))

    grads = jax.tree.map(stacked, zero_shardings(params, mesh, over=("context",)))
    return GradientAccumulator(grads, stacked(replicated(mesh)), stacked(replicated(mesh)))


def _zero_group_accumulator(params: Any, mesh: Mesh) -> GradientAccumulator:
    groups = mesh.shape[GROUP_AXIS]

    def make() -> GradientAccumulator:
        zero = jnp.zeros(groups)
        return GradientAccumulator(
            jax.tree.map(lambda p: jnp.zeros((groups, *p.shape)), params), zero, zero
        )

    return jax.jit(make, out_shardings=group_accumulator_shardings(params, mesh))()
