"""Programs and runs of benchmarks/sparse_quality.py: training, held-out losses, samples."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from alload_jax.config import Config
from alload_jax.data.collate import Collator
from alload_jax.data.collation import Collation, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.manifest import Manifest
from alload_jax.data.placement import PlacedStep, place_ahead
from alload_jax.data.store import StoreReader
from alload_jax.diffusion.flow import TIMESTEP_SCALE, interpolate, squared_error, velocity
from alload_jax.diffusion.samplers import sample
from alload_jax.distributed.cluster import Cluster
from alload_jax.models.common.sparse_attention import layer, region
from alload_jax.models.common.sparse_attention.profile import Profile, sample_attention
from alload_jax.models.common.tile_layout import whole_blocks
from alload_jax.models.families import abstract_model
from alload_jax.planning.plan import Plan
from alload_jax.run.training import training_spec
from alload_jax.sharding.groups import plan_on
from alload_jax.sharding.mesh import batch_sharding, local_plan_ranks
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.callbacks.layer_log import LayerLog
from alload_jax.training.callbacks.telemetry import Telemetry
from alload_jax.training.loop import Loop
from alload_jax.training.optimizer import learning_rate_schedule
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import TrainingSpec, TrainState, Weights, abstract_state, init_state
from alload_jax.training.step import make_accumulate, make_update, zero_accumulator
from alload_jax.training.trackers.tensorboard import TensorBoard
from alload_jax.training.trainer import on_mesh

NOISE_SEED = 20_000
"""Seed of the noise of held-out clips; no run trains with it."""


# ---------------------------------------------------------------- the state of the switches


def switch_of(variables: Any) -> dict[str, Any]:
    """The state by which layers switch, stacked over layers."""
    return variables["blocks"]["sparse_attention"]["switch"]


def with_switch(variables: Any, **values: Any) -> Any:
    """The variables with other values of that state."""
    blocks = variables["blocks"]
    sparse = blocks["sparse_attention"]
    sparse = sparse | {"switch": sparse["switch"] | values}
    return variables | {"blocks": blocks | {"sparse_attention": sparse}}


class Choice(NamedTuple):
    """Which layers are sparse, [layers] bool, and the densities of heads, [layers, num_heads]."""

    sparse: jax.Array
    density: jax.Array


def choice_of(variables: Any) -> Choice:
    """A copy of the layers' choice, which the next step does not overwrite."""
    state = switch_of(variables)
    return Choice(jnp.copy(state["sparse"]), jnp.copy(state["density"]))


# ---------------------------------------------------------------- programs


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

    start: Any
    gradient: Any
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


def compile_programs(
    kinds: dict[str, Kind], parts: Sequence[str], mesh: Mesh, sizes: Sizes
) -> dict[str, dict[str, Any]]:
    """Compiles some of the `Programs` of several kinds, many at a time.

    Args:
      kinds: by name.
      parts: names of the programs; those that a kind does not have are left out.
      mesh: of one device.
      sizes: of evaluation and samples.

    Returns:
      kind → part → program.
    """
    tasks: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(16) as pool:
        for name, kind in kinds.items():
            lowered = _lowered(kind, parts, mesh, sizes)
            tasks[name] = {part: pool.submit(each.compile) for part, each in lowered}
        return {
            name: {part: task.result() for part, task in each.items()}
            for name, each in tasks.items()
        }


def _lowered(
    kind: Kind, parts: Sequence[str], mesh: Mesh, sizes: Sizes
) -> Iterator[tuple[str, Any]]:
    config, batch = kind.config, on_mesh(kind.batch, mesh)
    spec = training_spec(config, 1)
    state = abstract_state(spec, mesh, 0)
    weights = state.weights
    rows = len(batch.weight)
    clips = jax.ShapeDtypeStruct((sizes.clips, *sizes.clip), jnp.uint8)
    if "gradient" in parts:
        accumulator = jax.eval_shape(lambda: zero_accumulator(spec, mesh, weights, batch))
        gradient: Any = make_accumulate(spec, mesh)
        yield "gradient", gradient.lower(weights, accumulator, batch, state.key)
    if "start" in parts:
        seed = jax.ShapeDtypeStruct((), jnp.int32)
        start = jax.jit(lambda seed, given: init_state(spec, mesh, seed, given))
        yield "start", start.lower(seed, kind.given)
    if config.model.sparse_attention is None:
        return
    if "losses" in parts:
        levels = jax.ShapeDtypeStruct((sizes.levels,), jnp.float32)
        losses = jax.jit(partial(_losses, config, rows))
        yield "losses", losses.lower(weights, clips, levels)
    if "draw" in parts:
        drawn = jax.ShapeDtypeStruct((sizes.draws, *sizes.clip), jnp.float32)
        path = jax.ShapeDtypeStruct((sizes.draw_steps + 1,), jnp.float32)
        yield "draw", jax.jit(partial(_draw, config)).lower(weights, drawn, path)
    if "mass" in parts:
        level = jax.ShapeDtypeStruct((), jnp.float32)
        with measuring_lists():
            lowered = jax.jit(partial(_mass, config, rows)).lower(weights, clips, level)
        yield "mass", lowered


def parameter_shapes(config: Config, mesh: Mesh) -> Any:
    """Shapes and shardings of a config's parameters."""
    return abstract_state(training_spec(config, 1), mesh, 0).params


def to_latents(clips: jax.Array) -> jax.Array:
    """Bytes as the model sees them, −1 to 1."""
    return clips.astype(jnp.float32) / 127.5 - 1


def _noise(clips: int, shape: tuple[int, ...]) -> jax.Array:
    """The noise of each held-out clip, the same in every call."""
    key = jax.random.key(NOISE_SEED)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(clips))
    return jax.vmap(lambda key: jax.random.normal(key, shape))(keys)


def _losses(
    config: Config, rows: int, weights: Weights, clips: jax.Array, levels: jax.Array
) -> jax.Array:
    """Loss of each clip at each level, [levels, clips], with fixed noise."""
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())
    shape = clips.shape[1:]
    data = to_latents(clips).reshape(-1, rows, *shape)
    noise = _noise(len(clips), shape).reshape(data.shape)

    def of_rows(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        data, noise, level = part
        sigma = jnp.full(rows, level)
        latents = interpolate(data, noise, sigma)
        found = model.forward(latents, sigma * TIMESTEP_SCALE, jnp.zeros((rows, 1), jnp.int32))
        return squared_error(found.velocity, velocity(data, noise))

    def at(level: jax.Array) -> jax.Array:
        return jax.lax.map(of_rows, (data, noise, jnp.full(len(data), level))).ravel()

    return jax.lax.map(at, levels)


def _draw(config: Config, weights: Weights, latents: jax.Array, levels: jax.Array) -> jax.Array:
    """Follows the flow from the first level to the last, from data at the first."""
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())

    def slope(latents: jax.Array, sigma: jax.Array, condition: jax.Array) -> jax.Array:
        return model.forward(latents, sigma * TIMESTEP_SCALE, condition).velocity

    null = jnp.zeros((len(latents), 1), jnp.int32)
    return sample("euler", slope, latents, null, levels)


def _mass(
    config: Config, rows: int, weights: Weights, clips: jax.Array, level: jax.Array
) -> dict[str, jax.Array]:
    """What `measuring_lists` measures on held-out clips, means over them: [layers, num_heads]."""
    none = jnp.zeros_like(switch_of(weights.variables)["step"])
    # The same blocks of queries for all runs.
    variables = with_switch(weights.variables, step=none, measured=none)
    weights = weights._replace(variables=variables)
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())
    shape = clips.shape[1:]
    data = to_latents(clips).reshape(-1, rows, *shape)
    noise = _noise(len(clips), shape).reshape(data.shape)

    def of_rows(part: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        data, noise = part
        sigma = jnp.full(rows, level)
        latents = interpolate(data, noise, sigma)
        found = model.forward(latents, sigma * TIMESTEP_SCALE, jnp.zeros((rows, 1), jnp.int32))
        return jax.tree.map(lambda value: value.mean(axis=0), found.auxiliary)

    return jax.tree.map(lambda value: value.mean(axis=0), jax.lax.map(of_rows, (data, noise)))


@contextmanager
def measuring_lists() -> Iterator[None]:
    """What is traced meanwhile measures lists in place of sparsity and recall.

    The auxiliary value of recall is then the share of the attention that the layer's lists hold,
    and that of sparsity what the best lists of the same lengths would hold.
    """
    before = layer.measure
    layer.measure = _measure_lists
    try:
        yield
    finally:
        layer.measure = before


def _measure_lists(heads: region.Heads, rows: region.Rows, choice: region.Choice) -> Profile:
    layout = rows.layout
    assert layout is not None
    query, key = (whole_blocks(x, layout) for x in (heads.query, heads.key))
    found = sample_attention(query, key, layout, choice.place.measured, choice.config)
    longest = choice.config.list_densities()[0]
    lists = region._lists(heads, layout, choice._replace(list_density=longest))
    place = found.block[:, None, :, None]
    indices = jnp.take_along_axis(lists.indices, place, axis=2)
    count = jnp.take_along_axis(lists.counts, place[..., 0], axis=2)
    listed = jnp.arange(indices.shape[-1]) < count[..., None]
    held = jnp.take_along_axis(found.mass, jnp.where(listed, indices, 0), axis=-1)
    best = jnp.sort(found.mass, axis=-1, descending=True)[..., : indices.shape[-1]]

    def mean(mass: jax.Array) -> jax.Array:
        return jnp.where(listed, mass, 0).sum(axis=-1).mean(axis=-1)[:, None]

    some = jnp.ones((len(query), 1))
    return Profile(some, mean(best), mean(held), jnp.zeros_like(mean(held)))


# ---------------------------------------------------------------- a run


class Runner:
    """Runs planned steps, as `alload_jax.training.trainer.Trainer`, with programs of other runs.

    Attributes:
      state: the training state.
      choices: the layers' choice after each step.
    """

    def __init__(
        self,
        programs: Programs,
        update: Any,
        state: TrainState,
        accumulator: Any,
        follow: Sequence[Choice] | None = None,
    ):
        """Takes state and accumulator; `follow` replaces the layers' choice of each step."""
        self.state = state
        self.choices: list[Choice] = []
        self._programs, self._update, self._accumulator = programs, update, accumulator
        self._follow = follow

    def step(self, step: PlacedStep) -> dict[str, jax.Array]:
        """Dispatches a step; see `Trainer.step`."""
        for batch in step.batches:
            self._accumulator = self._programs.gradient(
                self.state.weights, self._accumulator, batch, self.state.key
            )
        self.state, self._accumulator, metrics = self._update(self.state, self._accumulator)
        if self._follow is not None:
            chosen = self._follow[min(step.number, len(self._follow) - 1)]
            # Copies, because the next update takes the arrays of the state.
            copies = jax.tree.map(jnp.copy, chosen._asdict())
            variables = with_switch(self.state.variables, **copies)
            self.state = self.state._replace(variables=variables)
        if self.state.variables:
            self.choices.append(choice_of(self.state.variables))
        return metrics


class HeldOut(Callback):
    """Measures the loss on held-out clips before the first step, at some steps and at the end.

    Attributes:
      found: (step, seconds of training so far, losses [levels, clips]) of each measurement.
    """

    def __init__(
        self, measure: Callable[[Weights], np.ndarray], at: Sequence[int], log: MetricsLog
    ):
        self._measure, self._at, self._log = measure, frozenset(at), log
        self.found: list[tuple[int, float, np.ndarray]] = []

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`."""
        self.act(run)

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return run.done in self._at

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        seconds = sum(row["step_seconds"] for row in self._log.rows)
        self.found.append((run.done, seconds, self._measure(run.state.weights)))

    def on_stop(self, run: Run) -> None:
        """See `Callback.on_stop`."""
        if not self.found or self.found[-1][0] != run.done:
            self.act(run)


class Result(NamedTuple):
    """What a run leaves.

    Attributes:
      rows: lines of metrics.jsonl.
      held_out: see `HeldOut.found`.
      choices: the layers' choice after each step.
      state: the last state.
    """

    rows: list[dict[str, Any]]
    held_out: list[tuple[int, float, np.ndarray]]
    choices: list[Choice]
    state: TrainState


class Task(NamedTuple):
    """A run to do.

    Attributes:
      config: its config, with folder, steps and seed.
      programs: of its selector.
      update: compiled update of its spec.
      manifest: of the data.
      given: parameters to start from; None for random ones.
      follow: the layers' choices to follow instead of its own; None for its own.
      evaluate_at: steps after which held-out losses are measured, beside the last.
    """

    config: Config
    programs: Programs
    update: Any
    manifest: Manifest
    given: Any = None
    follow: Sequence[Choice] | None = None
    evaluate_at: Sequence[int] = ()


def planned(config: Config, manifest: Manifest, mesh: Mesh) -> tuple[Plan, Collation]:
    """The plan of a run, and how its micro-batches are made."""
    samples = manifest.samples(config.model.patch_size)
    plan = plan_on(mesh, config.planning, samples, config.run.seed)
    conditions = conditions_for(config.model, manifest)
    return plan, collation_for(plan, manifest, config.model, conditions)


def train(task: Task, measure: Callable[[Weights], np.ndarray] | None, mesh: Mesh) -> Result:
    """Trains as train.py does, without checkpoints; `measure` finds losses on held-out clips."""
    config, manifest = task.config, task.manifest
    folder = Path(config.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan, collation = planned(config, manifest, mesh)
    cluster = Cluster()
    run_plan = RunPlan(plan, config.planning, cluster)
    ranks = local_plan_ranks(mesh, plan.topology.ranks)
    collator = Collator(StoreReader(manifest), ranks, collation)
    spec = training_spec(config, config.run.given_steps)
    state = task.programs.start(np.int32(config.run.seed), task.given)
    accumulator = zero_accumulator(
        spec, mesh, state.weights, on_mesh(collation.shapes(plan)[0], mesh)
    )
    runner: Any = Runner(task.programs, task.update, state, accumulator, task.follow)
    log = MetricsLog(folder, resumed_at=0)
    held_out = HeldOut(measure or (lambda weights: np.zeros(0)), task.evaluate_at, log)
    callbacks: list[Callback] = [
        Telemetry(
            run_plan,
            learning_rate_schedule(config.optimizer, config.run.given_steps),
            log,
            TensorBoard(folder / "tensorboard", resumed_at=0),
            BadRecords(folder / "bad_records.txt", cluster),
            config.data.loader.max_bad_records,
            ProgressBar(folder.name, config.run.given_steps),
        ),
        LayerLog(folder, config.model, 0),
        *([held_out] if measure else []),
    ]
    loop = Loop(runner, 0, config.run.given_steps, callbacks)
    with closing(run_plan.steps(0, config.run.given_steps, collator, config.data.loader)) as steps:
        loop.run(place_ahead(steps, mesh))
    loop.finish()
    return Result(log.rows, held_out.found, runner.choices, runner.state)


def compile_updates(specs: dict[str, TrainingSpec], batch: Any, mesh: Mesh) -> dict[str, Any]:
    """Compiles the update of each spec, whose learning rate and thresholds depend on the steps."""

    def compile_one(spec: TrainingSpec) -> Any:
        state = abstract_state(spec, mesh, 0)
        accumulator = jax.eval_shape(
            lambda: zero_accumulator(spec, mesh, state.weights, on_mesh(batch, mesh))
        )
        update: Any = make_update(spec, mesh)
        return update.lower(state, accumulator).compile()

    with ThreadPoolExecutor(len(specs)) as pool:
        return dict(zip(specs, pool.map(compile_one, specs.values()), strict=True))


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
    spec, batch = training_spec(kind.config, 1), kind.batch
    state = programs.start(np.int32(0), given)
    values = np.random.default_rng(0).uniform(-1, 1, batch.latents.shape)
    filled = jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), batch)
    filled = filled._replace(latents=values.astype(np.float32), weight=filled.weight + 1)
    filled = jax.device_put(filled, batch_sharding(mesh))
    if spec.model.sparse_attention is not None:
        old = switch_of(state.variables)
        changed = {
            "sparse": jnp.full_like(old["sparse"], density < 1),
            "density": jnp.full_like(old["density"], density),
        }
        state = state._replace(variables=with_switch(state.variables, **changed))
    accumulator = zero_accumulator(spec, mesh, state.weights, on_mesh(batch, mesh))
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        accumulator = programs.gradient(state.weights, accumulator, filled, state.key)
        jax.block_until_ready(accumulator.loss)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def replaced(config: Config, part: str, **values: Any) -> Config:
    """The config with other values of one of its parts."""
    return dataclasses.replace(
        config, **{part: dataclasses.replace(getattr(config, part), **values)}
    )
