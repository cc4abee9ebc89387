"""Compiles the program of a micro-batch's gradient for a mesh of GPUs that are not there."""

from typing import Any, NamedTuple

import gpu_target
import jax
from jax.sharding import Mesh

from alload_jax.bench.step import random_batch
from alload_jax.sharding.mesh import batch_sharding, replicated
from alload_jax.training.state import TrainingSpec, TrainState, abstract_state
from alload_jax.training.step import accumulator_shardings, make_accumulate, zero_accumulator

_TEXT = 512
"""Tokens of a text."""


class CompiledGradient(NamedTuple):
    """A compiled program, and shapes of what it takes.

    Attributes:
      program: compiled.
      state: of training.
      sums: the accumulator of gradients.
    """

    program: Any
    state: TrainState
    sums: Any

    @property
    def bytes(self) -> int:
        """What state, accumulator and program take together."""
        arrays = jax.tree.leaves((self.state, self.sums))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
        return held + self.program.memory_analysis().temp_size_in_bytes


def compiled_gradient(
    spec: TrainingSpec, mesh: Mesh, rows: int, latents: tuple[int, ...], *, single: bool = True
) -> CompiledGradient:
    """The program of a micro-batch of `rows` rows of all devices together.

    Args:
      spec: what is trained.
      mesh: of devices of `gpu_target`.
      rows: of the micro-batch.
      latents: (frames, height, width) of a row.
      single: whether a step has one micro-batch.
    """

    def batch_of(rows: int, latents: tuple[int, ...]) -> Any:
        return jax.eval_shape(lambda: random_batch(spec.model, (rows, *latents), _TEXT))

    def placed(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    state = abstract_state(spec, mesh, 0)
    smallest = batch_of(mesh.size // mesh.shape["tensor"], spec.model.patch_size)
    sums = jax.eval_shape(
        lambda: zero_accumulator(spec, mesh, state.weights, smallest, single=single)
    )
    program = gpu_target.compiled(
        make_accumulate(spec, mesh, single=single),
        state.weights,
        jax.tree.map(placed, sums, accumulator_shardings(sums, spec, mesh)),
        placed(batch_of(rows, latents), batch_sharding(mesh)),
        placed(state.key, replicated(mesh)),
    )
    return CompiledGradient(program, state, sums)
