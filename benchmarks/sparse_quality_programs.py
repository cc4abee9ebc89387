"""Compiled programs of benchmarks/sparse_quality.py, which runs with several variants share."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from sparse_quality_configs import selector_of
from sparse_quality_measures import draw, losses_of, mass_of_lists, measuring_lists

from alload_jax.config import Config
from alload_jax.run.training import training_spec
from alload_jax.training.state import TrainingSpec, TrainState, abstract_state, init_state
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator
from alload_jax.training.trainer import on_mesh


class Programs(NamedTuple):
    """Compiled programs of a selector; all seeds and thresholds use the same.

    A model without sparse attention has only the first two.

    Attributes:
      start: (seed, parameters to start from or None) → new training state.
      gradient: (weights, accumulator, batch, key) → accumulator.
      losses: (values, clips, levels) → [levels, clips].
      draw: (values, latents, levels [steps + 1]) → latents at the last level.
      mass: (values, clips, level) → what the layers' attention and lists hold, [layers, num_heads].
    """

    start: Any = None
    gradient: Any = None
    losses: Any = None
    draw: Any = None
    mass: Any = None


class Sizes(NamedTuple):
    """Sizes that programs are compiled for.

    Attributes:
      clips: held-out clips whose loss is measured at a time.
      levels: noise levels at which it is measured.
      draws: clips that are drawn at once.
      draw_steps: evaluations of the model for them.
      clip: (frames, height, width, channels).
    """

    clips: int
    levels: int
    draws: int
    draw_steps: int
    clip: tuple[int, int, int, int]


class Kind(NamedTuple):
    """What programs are compiled for.

    Attributes:
      config: the steps and the thresholds do not matter.
      batch: shapes of a micro-batch.
      given: shapes of the parameters to start from; None for random ones.
    """

    config: Config
    batch: Any
    given: Any


class Compiled:
    """The programs of a study, as far as they are compiled.

    Attributes:
      kinds: what programs are compiled for, by name: selectors and models that measure nothing.
      mesh: of one device.
      programs: by the names of their kinds.
      updates: by variant; their learning rates and thresholds depend on the steps.
    """

    def __init__(self, kinds: dict[str, Kind], sizes: Sizes, mesh: Mesh):
        """Compiles nothing yet."""
        self.kinds, self.mesh = kinds, mesh
        self.programs: dict[str, Programs] = {}
        self.updates: dict[str, Any] = {}
        self._sizes = sizes

    def of(self, variant: str) -> Programs:
        """The programs of a variant."""
        return self.programs[selector_of(variant)]

    def compile(self, names: Sequence[str], parts: Sequence[str]) -> None:
        """Compiles some of the `Programs` of some kinds, many at a time."""
        tasks: dict[str, dict[str, Any]] = {}
        with ThreadPoolExecutor(16) as pool:
            for name in names:
                lowered = _lowered(self.kinds[name], parts, self.mesh, self._sizes)
                tasks[name] = {part: pool.submit(each.compile) for part, each in lowered}
            for name, each in tasks.items():
                compiled = {part: task.result() for part, task in each.items()}
                self.programs[name] = self.programs.get(name, Programs())._replace(**compiled)

    def compile_updates(self, configs: dict[str, Config], steps: int) -> None:
        """Compiles the updates of variants, for runs of so many steps with these configs."""

        def compile_one(name: str) -> Any:
            batch = self.kinds[selector_of(name)].batch
            return _compile_update(training_spec(configs[name], steps), batch, self.mesh)

        with ThreadPoolExecutor(len(configs)) as pool:
            self.updates |= dict(zip(configs, pool.map(compile_one, configs), strict=True))


def parameter_shapes(config: Config, mesh: Mesh) -> Any:
    """Shapes and shardings of a config's parameters."""
    return abstract_state(training_spec(config, 1), mesh, 0).params


def _lowered(
    kind: Kind, parts: Sequence[str], mesh: Mesh, sizes: Sizes
) -> Iterator[tuple[str, Any]]:
    """Yields what the kind has of these parts, traced but not compiled."""
    state = abstract_state(training_spec(kind.config, 1), mesh, 0)
    yield from _lowered_training(kind, parts, mesh, state)
    if kind.config.model.sparse_attention is not None:
        yield from _lowered_measures(kind, parts, sizes, state)


def _lowered_training(
    kind: Kind, parts: Sequence[str], mesh: Mesh, state: TrainState
) -> Iterator[tuple[str, Any]]:
    spec, batch = training_spec(kind.config, 1), on_mesh(kind.batch, mesh)
    if "gradient" in parts:
        weights = state.weights
        accumulator = jax.eval_shape(lambda: zero_accumulator(spec, mesh, weights, batch))
        gradient: Any = make_accumulate(spec, mesh)
        yield "gradient", gradient.lower(weights, accumulator, batch, state.key)
    if "start" in parts:
        seed = jax.ShapeDtypeStruct((), jnp.int32)
        start = jax.jit(lambda seed, given: init_state(spec, mesh, seed, given))
        yield "start", start.lower(seed, kind.given)


def _lowered_measures(
    kind: Kind, parts: Sequence[str], sizes: Sizes, state: TrainState
) -> Iterator[tuple[str, Any]]:
    config, weights = kind.config, state.weights
    rows = len(kind.batch.weight)
    clips = jax.ShapeDtypeStruct((sizes.clips, *sizes.clip), jnp.uint8)
    if "losses" in parts:
        levels = jax.ShapeDtypeStruct((sizes.levels,), jnp.float32)
        losses = jax.jit(partial(losses_of, config, rows))
        yield "losses", losses.lower(weights, clips, levels)
    if "draw" in parts:
        drawn = jax.ShapeDtypeStruct((sizes.draws, *sizes.clip), jnp.float32)
        path = jax.ShapeDtypeStruct((sizes.draw_steps + 1,), jnp.float32)
        yield "draw", jax.jit(partial(draw, config)).lower(weights, drawn, path)
    if "mass" in parts:
        level = jax.ShapeDtypeStruct((), jnp.float32)
        with measuring_lists():
            lowered = jax.jit(partial(mass_of_lists, config, rows)).lower(weights, clips, level)
        yield "mass", lowered


def _compile_update(spec: TrainingSpec, batch: Any, mesh: Mesh) -> Any:
    state = abstract_state(spec, mesh, 0)
    accumulator = jax.eval_shape(
        lambda: zero_accumulator(spec, mesh, state.weights, on_mesh(batch, mesh))
    )
    update: Any = make_update(spec, mesh)
    return update.lower(state, accumulator).compile()
