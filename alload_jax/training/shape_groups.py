"""Training of independent ranks: each shape group runs its own programs before a joint update.

Between two updates each group trains independently on its slice of the mesh: it accumulates
weighted sums of loss and gradient over micro-batches of its own shapes. The update runs on all
devices; it adds the sums of the groups and divides by the sum of weights. A group without a
micro-batch, at the end of an epoch, contributes its current sums. In AdaptiveLoad (arXiv
2605.17923) every rank draws its own bucket: it is such a group of one rank.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alload_jax.data.batch import AnyBatch, Signature, signature
from alload_jax.data.placement import PlacedStep
from alload_jax.models.families import compiler_options
from alload_jax.sharding.groups import GROUP_AXIS, is_local, join_groups, part_of_group
from alload_jax.sharding.mesh import AnyMesh, replicated
from alload_jax.sharding.rules import zero_shardings
from alload_jax.training.program_cache import shared_programs
from alload_jax.training.state import TrainingSpec, TrainState, Weights, weights_shardings
from alload_jax.training.step import (
    Accumulate,
    GradientAccumulator,
    IsFinite,
    Metrics,
    Update,
    accumulation,
    accumulator_shardings,
    apply_gradients,
    auxiliary_shapes,
    emptied_after,
    means_are_finite,
)
from alload_jax.training.trainer import Trainer, in_parallel, largest, on_mesh


def make_trainer(
    spec: TrainingSpec,
    mesh: Mesh,
    state: TrainState,
    groups: Sequence[Mesh] = (),
    *,
    single: bool = False,
) -> "Trainer | GroupTrainer":
    """Builds the trainer that runs a plan's steps on a mesh.

    Args:
      spec: what training computes.
      mesh: mesh of all devices.
      state: initial state; the trainer donates its buffers.
      groups: mesh of each of the plan's shape groups; empty if all ranks are one group.
      single: whether steps have one micro-batch, which takes less memory where all ranks are one
        group; see `make_accumulate`.
    """
    if groups:
        return GroupTrainer(spec, mesh, state, groups)
    return Trainer(spec, mesh, state, single=single)


class GroupTrainer:
    """Runs planned steps of independent ranks; see `Trainer`.

    A process compiles, feeds and dispatches the groups whose devices it has.

    Attributes:
      state: the current training state.
      programs: compiled gradient programs by mesh of a group of this process and by shape of
        micro-batch.
    """

    def __init__(self, spec: TrainingSpec, mesh: Mesh, state: TrainState, groups: Sequence[Mesh]):
        """Takes `state`, whose buffers each step donates; `groups` as in `make_trainer`."""
        self.state = state
        self.programs: dict[tuple[Mesh, Signature], Any] = {}
        self._spec, self._mesh, self._groups = spec, mesh, tuple(groups)
        self._update = make_group_update(spec, mesh)
        self._empty = make_group_is_finite(spec, mesh)
        self._shardings: Any = None
        accumulate = make_group_accumulate(spec, groups[0].abstract_mesh)
        self._local = {
            group: _Group(spec, group, accumulate)
            for group in dict.fromkeys(groups)
            if is_local(group)
        }

    def compile(self, shapes: Sequence[AnyBatch]) -> Iterator[AnyBatch]:
        """Compiles the gradient of every micro-batch for every group; see `Trainer.compile`.

        Each epoch assigns shapes to groups differently, so every group needs all shapes. A shape is
        traced and lowered once, on the groups' abstract mesh. What XLA compiles is bound to its
        devices: all groups of a shape are compiled before the next shape, so that the first one's
        program serves the others (`program_cache`).
        """
        if not shapes:
            return
        self._share(self._zero_accumulator(largest(shapes)))

        def compile_one(shape: AnyBatch) -> dict[Mesh, Any]:
            return {mesh: group.compile(shape) for mesh, group in self._local.items()}

        def compile_update() -> None:
            update: Any = self._update
            self._update = update.lower(self.state, self._accumulator()).compile()

        with shared_programs():
            for shape, programs in in_parallel(compile_one, shapes, compile_update):
                for mesh, program in programs.items():
                    self.programs[mesh, signature(shape)] = program
                yield shape

    def step(self, step: PlacedStep) -> Metrics:
        """Dispatches a step on all groups without waiting; see `Trainer.step`."""
        self._accumulate_all(step)
        self.state, accumulator, metrics = self._update(self.state, self._accumulator())
        self._share(accumulator)
        return metrics

    def is_finite(self, step: PlacedStep) -> bool:
        """Whether loss and gradient of a step are finite; see `Trainer.is_finite`."""
        self._is_finite()
        self._accumulate_all(step)
        return self._is_finite()

    def _is_finite(self) -> bool:
        """Whether what is accumulated is finite; zeroes it."""
        finite, accumulator = self._empty(self._accumulator())
        self._share(accumulator)
        return bool(finite)

    def _accumulate_all(self, step: PlacedStep) -> None:
        for number, batch in zip(step.groups, step.batches, strict=True):
            mesh = self._groups[number]
            self._local[mesh].add(self.programs[mesh, signature(batch)], batch)

    def _accumulator(self) -> GradientAccumulator:
        return join_groups([group.accumulator for group in self._local.values()], self._shardings)

    def _share(self, accumulator: GradientAccumulator) -> None:
        """Gives every group its part of the state and of the sums, after every update."""
        self._shardings = group_accumulator_shardings(accumulator, self._spec, self._mesh)
        for group in self._local.values():
            group.take(self.state, accumulator)

    def _zero_accumulator(self, shape: AnyBatch) -> GradientAccumulator:
        """Builds an accumulator of zeros, each array [groups, ...]."""
        group = self._groups[0]
        weights = self.state.weights
        auxiliary = auxiliary_shapes(self._spec, group, weights, on_mesh(shape, group))
        groups = self._mesh.shape[GROUP_AXIS]

        def make() -> GradientAccumulator:
            def zeros(like: Any, dtype: str = "float32") -> jax.Array:
                return jnp.zeros((groups, *like.shape), dtype)

            grads_dtype = self._spec.accumulate_dtype
            return GradientAccumulator(
                jax.tree.map(lambda like: zeros(like, grads_dtype), weights.params),
                jnp.zeros(groups),
                jnp.zeros(groups),
                jax.tree.map(zeros, auxiliary),
            )

        shardings = group_accumulator_shardings(jax.eval_shape(make), self._spec, self._mesh)
        return jax.jit(make, out_shardings=shardings)()


class _Group:
    """The weights and sums of a shape group on the mesh of the group.

    Attributes:
      accumulator: sums over the micro-batches since the last update, each array [1, ...].
    """

    accumulator: GradientAccumulator
    _weights: Weights

    def __init__(self, spec: TrainingSpec, mesh: Mesh, accumulate: Any):
        self._spec, self._mesh, self._accumulate = spec, mesh, accumulate

    def take(self, state: TrainState, accumulator: GradientAccumulator) -> None:
        spec, mesh = self._spec, self._mesh
        placed = weights_shardings(state.weights, mesh, spec.rules)
        self._weights = part_of_group(state.weights, placed)
        self._key = part_of_group(state.key, replicated(mesh))
        sums = group_accumulator_shardings(accumulator, spec, mesh)
        self.accumulator = part_of_group(accumulator, sums)

    def compile(self, shape: AnyBatch) -> Any:
        batch = on_mesh(shape, self._mesh)
        lowered = self._accumulate.lower(self._weights, self.accumulator, batch, self._key)
        return lowered.compile()

    def add(self, program: Any, batch: AnyBatch) -> None:
        self.accumulator = program(self._weights, self.accumulator, batch, self._key)


def make_group_accumulate(spec: TrainingSpec, group: AbstractMesh) -> Accumulate:
    """`make_accumulate` on any group's mesh, with sums [1, ...], the group's part of all sums."""
    accumulate = accumulation(spec, group)

    @partial(jax.jit, donate_argnums=1, compiler_options=compiler_options(spec.model))
    def add(
        weights: Weights,
        accumulator: GradientAccumulator,
        batch: AnyBatch,
        key: jax.Array,
    ) -> GradientAccumulator:
        squeezed = jax.tree.map(lambda part: jnp.squeeze(part, 0), accumulator)
        added = accumulate(weights, squeezed, batch, key)
        stacked = jax.tree.map(lambda part: part[None], added)
        shardings = group_accumulator_shardings(accumulator, spec, group)
        return jax.lax.with_sharding_constraint(stacked, shardings)

    return add


def make_group_update(spec: TrainingSpec, mesh: Mesh) -> Update:
    """`make_update` for the sums of the groups, [groups, ...], which XLA reduces and scatters."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        state: TrainState, accumulator: GradientAccumulator
    ) -> tuple[TrainState, GradientAccumulator, Metrics]:
        after, metrics = apply_gradients(spec, mesh, state, _total(spec, mesh, accumulator))
        emptied = jax.lax.with_sharding_constraint(
            emptied_after(accumulator, metrics),
            group_accumulator_shardings(accumulator, spec, mesh),
        )
        return after, emptied, metrics

    return update


def make_group_is_finite(spec: TrainingSpec, mesh: Mesh) -> IsFinite:
    """`make_is_finite` for the sums of the groups, [groups, ...]."""

    @partial(jax.jit, donate_argnums=0)
    def is_finite(accumulator: GradientAccumulator) -> tuple[jax.Array, GradientAccumulator]:
        finite = means_are_finite(_total(spec, mesh, accumulator))
        zeroed = jax.lax.with_sharding_constraint(
            jax.tree.map(jnp.zeros_like, accumulator),
            group_accumulator_shardings(accumulator, spec, mesh),
        )
        return jax.lax.with_sharding_constraint(finite, replicated(mesh)), zeroed

    return is_finite


def _total(spec: TrainingSpec, mesh: Mesh, accumulator: GradientAccumulator) -> GradientAccumulator:
    """The sums over all groups."""
    summed = jax.tree.map(lambda part: jnp.sum(part, 0, jnp.float32), accumulator)
    return jax.lax.with_sharding_constraint(summed, accumulator_shardings(summed, spec, mesh))


def group_accumulator_shardings(
    accumulator: GradientAccumulator, spec: TrainingSpec, mesh: AnyMesh
) -> GradientAccumulator:
    """Returns the shardings of sums [groups, ...]: groups along `data`, each as on its own mesh."""

    def stacked(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(GROUP_AXIS, *sharding.spec))

    def one_group(part: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(part.shape[1:], part.dtype)

    grads = jax.tree.map(one_group, accumulator.grads)
    replicated_sums = stacked(replicated(mesh))
    return GradientAccumulator(
        jax.tree.map(stacked, zero_shardings(grads, mesh, spec.rules, over=("context",))),
        replicated_sums,
        replicated_sums,
        jax.tree.map(lambda _: replicated_sums, accumulator.auxiliary),
    )
