"""The state of a run and the compiled programs that update it.

Independent ranks: between two updates each shape group trains on its slice of the mesh. It
accumulates weighted sums of loss and gradient over micro-batches of its own shapes. The update runs
on all devices; it adds the sums of the groups and divides by the sum of weights. A group without a
micro-batch, at the end of an epoch, contributes its current sums. In AdaptiveLoad (arXiv
2605.17923) every rank draws its own bucket: it is such a group of one rank.
"""

import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Wrapped

from alload_jax.data.batch import AnyBatch, signature
from alload_jax.data.loader import PlacedStep
from alload_jax.processes import cpus, waits
from alload_jax.sharding.mesh import (
    batch_sharding,
    is_local,
    join_groups,
    part_of_group,
    replicated,
)
from alload_jax.training.state import (
    TrainingSpec,
    TrainState,
    Weights,
    weights_shardings,
    with_shardings,
)
from alload_jax.training.step import (
    GradientAccumulator,
    Metrics,
    NoiseSums,
    accumulator_shardings,
    make_accumulate,
    make_add_noise,
    make_is_finite,
    make_update,
    zero_accumulator,
)

T = TypeVar("T")


@waits("for the devices to take a step")
class Trainer:
    """Runs planned steps. Of shape groups, a process runs those whose devices it has.

    Attributes:
      state: the current training state, or its shapes before `begin`.
      programs: compiled gradient programs by mesh, of a group of this process or else of all
        devices, and by shape of micro-batch.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        mesh: Mesh,
        state: TrainState,
        groups: Sequence[Mesh] = (),
        *,
        single: bool = False,
    ):
        """Builds the jitted functions, and compiles nothing yet.

        Args:
          spec: what training computes.
          mesh: mesh of all devices.
          state: initial state, or its shapes with shardings until `begin`; its buffers are donated.
          groups: mesh of each of the plan's shape groups; empty if all ranks are one group.
          single: whether steps have one micro-batch, which takes less memory where all ranks are
            one group; see `make_accumulate`.
        """
        self.state = state
        self.programs: dict[tuple[Mesh, Hashable], Compiled] = {}
        self._spec, self._mesh, self._groups = spec, mesh, tuple(groups)
        self._single, grouped = single and not groups, bool(groups)
        self._update: Wrapped | Compiled = make_update(
            spec, mesh, single=self._single, grouped=grouped
        )
        self._empty = make_is_finite(spec, mesh, grouped=grouped)
        self._add_noise = make_add_noise(spec, mesh, grouped=grouped)
        self._accumulate = make_accumulate(
            spec, groups[0].abstract_mesh if grouped else mesh, single=self._single, grouped=grouped
        )
        # Weights, sums and key by mesh; the sums of a group are [1, ...].
        self._local: dict[Mesh, tuple[Weights, GradientAccumulator, jax.Array]] = {}
        # Of the sums of all groups, and of each group's weights, sums and key.
        self._joined: GradientAccumulator | None = None
        self._parts: dict[Mesh, tuple[Weights, GradientAccumulator, NamedSharding]] = {}

    @property
    def _accumulator(self) -> GradientAccumulator:
        """The sums, of all groups if there are any: each array [groups, ...]."""
        sums = [each for _, each, _ in self._local.values()]
        return join_groups(sums, self._joined) if self._groups else sums[0]

    @_accumulator.setter
    def _accumulator(self, accumulator: GradientAccumulator) -> None:
        """Gives every group its part of the state and of the sums, after every update."""
        spec, weights, key = self._spec, self.state.weights, self.state.key
        if not self._groups:
            self._local[self._mesh] = weights, accumulator, key
            return
        if not self._parts:
            self._joined = accumulator_shardings(accumulator, spec, self._mesh, grouped=True)
            for mesh in filter(is_local, dict.fromkeys(self._groups)):
                self._parts[mesh] = (
                    weights_shardings(weights, mesh, spec.rules, spec.parameters),
                    accumulator_shardings(accumulator, spec, mesh, grouped=True),
                    replicated(mesh),
                )
        for mesh, shardings in self._parts.items():
            self._local[mesh] = part_of_group((weights, accumulator, key), shardings)

    def begin(self, state: TrainState) -> None:
        """Takes the state whose shapes it has compiled for."""
        self.state = state
        if self._local:
            self._accumulator = self._accumulator

    def compile(self, shapes: Sequence[AnyBatch]) -> Iterator[AnyBatch]:
        """Compiles the gradients of all micro-batches in parallel and yields each shape when done.

        A shape that cannot be compiled fails here instead of days into a run.

        Each epoch assigns shapes to groups differently, so every group needs all shapes. A shape is
        traced and lowered once, on the groups' abstract mesh. One group compiles it, and the others
        load its program (`shared_programs`). The groups take turns, so that XLA's timings of
        algorithms, one at a time on a device, run on all devices at once.

        Args:
          shapes: shapes and dtypes of the micro-batches of all ranks.
        """
        if not shapes:
            return
        # Traced here, the largest one measures kernels of which nothing is known while the GPU is
        # idle; below, compilers use it.
        group = self._groups[0] if self._groups else None
        example = on_mesh(largest(shapes), group or self._mesh)
        self._accumulator = zero_accumulator(
            spec=self._spec,
            mesh=self._mesh,
            weights=self.state.weights,
            batch=example,
            single=self._single,
            group=group,
        )
        meshes = list(self._local)
        turns = {signature(shape): number % len(meshes) for number, shape in enumerate(shapes)}
        loading = ThreadPoolExecutor(max_workers=cpus())

        def compile_for(mesh: Mesh, shape: AnyBatch) -> Compiled:
            given = self._local[mesh]
            weights, sums, key = with_shardings(given, self._parts[mesh]) if self._groups else given
            return self._accumulate.lower(weights, sums, on_mesh(shape, mesh), key).compile()

        def compile_one(shape: AnyBatch) -> dict[Mesh, Compiled]:
            turn = turns[signature(shape)]
            first, *others = [*meshes[turn:], *meshes[:turn]]
            programs = {first: compile_for(first, shape)}
            found = loading.map(lambda mesh: compile_for(mesh, shape), others)
            return programs | dict(zip(others, found, strict=True))

        with shared_programs() if self._groups else nullcontext(), loading:
            for shape, programs in in_parallel(compile_one, shapes, self._compile_update):
                for mesh, program in programs.items():
                    self.programs[mesh, signature(shape)] = program
                yield shape

    def _compile_update(self) -> None:
        assert isinstance(self._update, Wrapped)
        changing = self.state._replace(frozen={})
        self._update = self._update.lower(changing, self._accumulator).compile()

    def step(self, step: PlacedStep) -> Metrics:
        """Dispatches a step and returns its metrics before they are computed.

        Returns:
          `loss`, `grad_norm` and the means of auxiliary values, float32 scalars. If one of them is
          not finite, this step and those after it have not changed the state; see `is_finite`.
        """
        self._accumulate_all(step)
        frozen, changing = self.state.frozen, self.state._replace(frozen={})
        after, accumulator, metrics = self._update(changing, self._accumulator)
        self.state = after._replace(frozen=frozen)
        self._accumulator = accumulator
        return metrics

    def is_finite(self, step: PlacedStep) -> bool:
        """Whether loss and gradient of a step are finite. Changes nothing; waits for the result.

        After it, steps change the state again.
        """
        _, self._accumulator = self._empty(self._accumulator)
        self._accumulate_all(step)
        finite, self._accumulator = self._empty(self._accumulator)
        return bool(finite)

    def noise_scale(self, steps: Sequence[PlacedStep]) -> float:
        """The gradient noise scale by steps of other samples, at the present weights.

        In samples, or in tokens where the objective weighs by tokens; see `NoiseSums`. Changes
        nothing; waits for the result.
        """
        _, self._accumulator = self._empty(self._accumulator)
        sums: NoiseSums | None = None
        for step in steps:
            self._accumulate_all(step)
            sums, self._accumulator = self._add_noise(sums, self._accumulator)
        assert sums is not None
        return sums.noise_scale()

    def _accumulate_all(self, step: PlacedStep) -> None:
        if self._single and len(step.batches) != 1:
            raise ValueError(f"a step has {len(step.batches)} micro-batches; give single=False")
        meshes = [self._groups[number] for number in step.groups] if self._groups else None
        for mesh, batch in zip(
            meshes or [self._mesh] * len(step.batches), step.batches, strict=True
        ):
            weights, sums, key = self._local[mesh]
            added = self.programs[mesh, signature(batch)](weights, sums, batch, key)
            self._local[mesh] = weights, added, key


def largest(shapes: Sequence[AnyBatch]) -> AnyBatch:
    """The shape of most elements."""
    return max(shapes, key=lambda shape: sum(part.size for part in jax.tree.leaves(shape)))


def in_parallel(
    compile_one: Callable[[AnyBatch], T],
    shapes: Sequence[AnyBatch],
    beside: Callable[[], None] = lambda: None,
) -> Iterator[tuple[AnyBatch, T]]:
    """Yields each shape with the result of `compile_one`; several run at once, and `beside` too."""
    # XLA already uses several cores to compile one program.
    pool = ThreadPoolExecutor(max_workers=max(1, cpus() // 2))
    try:
        other = pool.submit(beside)
        yield from zip(shapes, pool.map(compile_one, shapes), strict=True)
        other.result()
    finally:
        pool.shutdown(cancel_futures=True)


def on_mesh(batch: AnyBatch, mesh: Mesh) -> AnyBatch:
    """Returns the shapes and dtypes of a micro-batch with its sharding."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding), batch
    )


# ---------------------------------------------------------------- shape groups


@contextmanager
def shared_programs() -> Iterator[None]:
    """Keeps compiled programs on disk meanwhile, so that one compilation serves several devices.

    A program is bound to its devices, but on GPUs the key of JAX's compilation cache is not: a
    second group that compiles the same program loads it from there. Does nothing if the run has a
    cache of its own, or on other platforms, whose keys name the devices.
    """
    if jax.config.values["jax_compilation_cache_dir"] or jax.default_backend() != "gpu":
        yield
        return

    def use(folder: str | None, least_seconds: float) -> None:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
        compilation_cache.reset_cache()

    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    # While it is removed, another thread may still write what it has compiled.
    kept = tempfile.TemporaryDirectory(prefix="alload-programs-", ignore_cleanup_errors=True)
    with kept as folder:
        use(folder, 0.0)
        try:
            yield
        finally:
            use(None, least)
