"""Time in benchmarks/sparse_quality.py: its limit, seconds of gradients, and steps that fit."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from sparse_quality_programs import Compiled, Kind, Programs
from sparse_quality_switch import switch_of, with_switch

from alload_jax.run.training import training_spec
from alload_jax.sharding.mesh import batch_sharding
from alload_jax.training.state import TrainState
from alload_jax.training.step import zero_accumulator
from alload_jax.training.trainer import on_mesh

EVALUATIONS = 5
"""Measurements of the held-out loss in a run."""
OTHER_SECONDS, EXTRA_SECONDS = 80, 40
"""For what is not training: all of it, and least for what lists hold, samples and pictures."""


class Clock:
    """The time limit of a study, which began at a reading of time.monotonic()."""

    def __init__(self, began: float, limit: float):
        self._began, self._limit = began, limit

    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def left(self) -> float:
        """Seconds until the time limit."""
        return self._limit - self.passed()

    def log(self, text: str) -> None:
        """Prints what is done, with the seconds so far."""
        print(f"{self.passed():6.1f} s: {text}", file=sys.stderr, flush=True)


def gradient_seconds(compiled: Compiled, name: str, given: Any) -> dict[str, float]:
    """Seconds of a kind's gradient by density of all layers; 1 is dense attention."""
    kind, programs = compiled.kinds[name], compiled.programs[name]
    densities = (1.0, 0.5, 0.2) if kind.config.model.sparse_attention else (1.0,)
    return {
        str(each): time_gradient(programs, kind, given, compiled.mesh, each) for each in densities
    }


def time_gradient(
    programs: Programs, kind: Kind, given: Any, mesh: Mesh, density: float, steps: int = 4
) -> float:
    """Median seconds of a gradient, with all layers dense (1) or at a density.

    Args:
      programs: of the kind.
      kind: what they are compiled for.
      given: parameters to start from.
      mesh: of one device.
      density: of all layers.
      steps: gradients that are timed.
    """
    spec = training_spec(kind.config, 1)
    batch = jax.device_put(_filled(kind.batch), batch_sharding(mesh))
    state = programs.start(np.int32(0), given)
    if spec.model.sparse_attention is not None:
        state = _at_density(state, density)
    accumulator = zero_accumulator(spec, mesh, state.weights, on_mesh(kind.batch, mesh))
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        accumulator = programs.gradient(state.weights, accumulator, batch, state.key)
        jax.block_until_ready(accumulator.loss)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def _filled(batch: Any) -> Any:
    """A micro-batch of these shapes with random latents, whose rows all count."""
    values = np.random.default_rng(0).uniform(-1, 1, batch.latents.shape)
    filled = jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), batch)
    return filled._replace(latents=values.astype(np.float32), weight=filled.weight + 1)


def _at_density(state: TrainState, density: float) -> TrainState:
    """The state with all layers dense (1) or at a density."""
    old = switch_of(state.variables)
    changed = {
        "sparse": jnp.full_like(old["sparse"], density < 1),
        "density": jnp.full_like(old["density"], density),
    }
    return state._replace(variables=with_switch(state.variables, **changed))


def steps_that_fit(
    left: float, slowest: Sequence[float], seeds: int, evaluating: float, first: float
) -> int:
    """Steps of each run such that all runs end in time, in tens.

    Args:
      left: seconds for all runs.
      slowest: of each variant the seconds of a gradient, at worst.
      seeds: runs of each variant.
      evaluating: seconds of a measurement of the held-out loss.
      first: seconds of training on short clips, which the first seed has behind it.
    """
    # Beside the curve: its first point, more clips, the last weights with dense attention.
    fixed = seeds * len(slowest) * ((EVALUATIONS + 3) * evaluating + 1)
    fixed += (seeds - 1) * first + OTHER_SECONDS
    each = seeds * sum(1.03 * worst + 0.004 for worst in slowest)
    return int((left - fixed) / each) // 10 * 10
