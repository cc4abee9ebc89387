"""The state of a run and the compiled programs that update it."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from alload_jax.data.batch import AnyBatch, Signature, signature
from alload_jax.data.placement import PlacedStep
from alload_jax.sharding.mesh import batch_sharding
from alload_jax.training.state import TrainingSpec, TrainState
from alload_jax.training.step import (
    make_accumulate,
    make_is_finite,
    make_update,
    zero_accumulator,
)


class Trainer:
    """Runs planned steps.

    Attributes:
      state: the current training state.
      programs: compiled gradient programs by shape of micro-batch.
    """

    def __init__(self, spec: TrainingSpec, mesh: Mesh, state: TrainState, *, single: bool = False):
        """Takes `state`, whose buffers each step donates; `single` as in `make_accumulate`."""
        self.state = state
        self.programs: dict[Signature, Any] = {}
        self._spec, self._mesh, self._single = spec, mesh, single
        self._accumulate: Any = make_accumulate(spec, mesh, single=single)
        self._update = make_update(spec, mesh, single=single)
        self._empty = make_is_finite(spec, mesh)
        self._accumulator: Any = None

    def compile(self, shapes: Sequence[AnyBatch]) -> Iterator[AnyBatch]:
        """Compiles the gradients of all micro-batches in parallel and yields each shape when done.

        A shape that cannot be compiled fails here instead of days into a run.

        Args:
          shapes: shapes and dtypes of the micro-batches of all ranks.
        """
        if not shapes:
            return
        # Traced here, the largest one measures kernels of which nothing is known while the GPU is
        # idle; below, compilers use it.
        self._accumulator = zero_accumulator(
            *(self._spec, self._mesh, self.state.weights),
            on_mesh(largest(shapes), self._mesh),
            single=self._single,
        )

        def compile_one(shape: AnyBatch) -> Any:
            batch = on_mesh(shape, self._mesh)
            return self._accumulate.lower(
                self.state.weights, self._accumulator, batch, self.state.key
            ).compile()

        def compile_update() -> None:
            update: Any = self._update
            self._update = update.lower(self.state, self._accumulator).compile()

        for shape, program in in_parallel(compile_one, shapes, compile_update):
            self.programs[signature(shape)] = program
            yield shape

    def step(self, step: PlacedStep) -> dict[str, jax.Array]:
        """Dispatches a step and returns its metrics before they are computed.

        Returns:
          `loss`, `grad_norm` and the means of auxiliary values, float32 scalars. If one of them is
          not finite, this step and those after it have not changed the state; see `is_finite`.
        """
        self._accumulate_all(step)
        self.state, self._accumulator, metrics = self._update(self.state, self._accumulator)
        return metrics

    def is_finite(self, step: PlacedStep) -> bool:
        """Whether loss and gradient of a step are finite. Changes nothing; waits for the result.

        After it, steps change the state again.
        """
        _, self._accumulator = self._empty(self._accumulator)
        self._accumulate_all(step)
        finite, self._accumulator = self._empty(self._accumulator)
        return bool(finite)

    def _accumulate_all(self, step: PlacedStep) -> None:
        if self._single and len(step.batches) != 1:
            raise ValueError(f"a step has {len(step.batches)} micro-batches; give single=False")
        for batch in step.batches:
            gradient = self.programs[signature(batch)]
            self._accumulator = gradient(
                self.state.weights, self._accumulator, batch, self.state.key
            )


def largest(shapes: Sequence[AnyBatch]) -> AnyBatch:
    """The shape of most elements."""
    return max(shapes, key=lambda shape: sum(part.size for part in jax.tree.leaves(shape)))


def in_parallel(
    compile_one: Callable[[AnyBatch], Any],
    shapes: Sequence[AnyBatch],
    beside: Callable[[], None] = lambda: None,
) -> Iterator[tuple[AnyBatch, Any]]:
    """Yields each shape with the result of `compile_one`; several run at once, and `beside` too."""
    # XLA already uses several cores to compile one program.
    pool = ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 2))
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
