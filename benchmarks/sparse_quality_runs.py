"""A run of benchmarks/sparse_quality.py, as train.py trains, with programs of other runs."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from sparse_quality_programs import Programs
from sparse_quality_switch import Choice, choice_of, with_switch

from alload_jax.config import Config
from alload_jax.data.collate import Collator
from alload_jax.data.collation import Collation, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.manifest import Manifest
from alload_jax.data.placement import PlacedStep, place_ahead
from alload_jax.data.store import StoreReader
from alload_jax.distributed.cluster import Cluster
from alload_jax.planning.plan import Plan
from alload_jax.run.training import training_spec
from alload_jax.sharding.groups import plan_on
from alload_jax.sharding.mesh import local_plan_ranks
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.callbacks.layer_log import LayerLog
from alload_jax.training.callbacks.telemetry import Telemetry
from alload_jax.training.loop import Loop
from alload_jax.training.optimizer import learning_rate_schedule
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import TrainState, Weights
from alload_jax.training.step import zero_accumulator
from alload_jax.training.trackers.tensorboard import TensorBoard
from alload_jax.training.trainer import on_mesh


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


def planned(config: Config, manifest: Manifest, mesh: Mesh) -> tuple[Plan, Collation]:
    """The plan of a run, and how its micro-batches are made."""
    samples = manifest.samples(config.model.patch_size)
    plan = plan_on(mesh, config.planning, samples, config.run.seed)
    conditions = conditions_for(config.model, manifest)
    return plan, collation_for(plan, manifest, config.model, conditions)


def train(task: Task, measure: Callable[[Weights], np.ndarray] | None, mesh: Mesh) -> Result:
    """Trains as train.py does, without checkpoints; `measure` finds losses on held-out clips."""
    config = task.config
    folder, steps = Path(config.run.folder), config.run.given_steps
    folder.mkdir(parents=True, exist_ok=True)
    plan, collation = planned(config, task.manifest, mesh)
    cluster = Cluster()
    run_plan = RunPlan(plan, config.planning, cluster)
    ranks = local_plan_ranks(mesh, plan.topology.ranks)
    collator = Collator(StoreReader(task.manifest), ranks, collation)
    runner: Any = _runner(task, collation.shapes(plan)[0], mesh)
    log = MetricsLog(folder, resumed_at=0)
    held_out = HeldOut(measure or (lambda weights: np.zeros(0)), task.evaluate_at, log)
    callbacks = [*_logs(config, run_plan, cluster, log), *([held_out] if measure else [])]
    loop = Loop(runner, 0, steps, callbacks)
    with closing(run_plan.steps(0, steps, collator, config.data.loader)) as given:
        loop.run(place_ahead(given, mesh))
    loop.finish()
    return Result(log.rows, held_out.found, runner.choices, runner.state)


def _runner(task: Task, batch: Any, mesh: Mesh) -> Runner:
    """What runs the task's steps; `batch` are the shapes of a micro-batch."""
    spec = training_spec(task.config, task.config.run.given_steps)
    state = task.programs.start(np.int32(task.config.run.seed), task.given)
    accumulator = zero_accumulator(spec, mesh, state.weights, on_mesh(batch, mesh))
    return Runner(task.programs, task.update, state, accumulator, task.follow)


def _logs(config: Config, run_plan: RunPlan, cluster: Cluster, log: MetricsLog) -> list[Callback]:
    """Callbacks that write what train.py writes too."""
    folder, steps = Path(config.run.folder), config.run.given_steps
    telemetry = Telemetry(
        run_plan,
        learning_rate_schedule(config.optimizer, steps),
        log,
        TensorBoard(folder / "tensorboard", resumed_at=0),
        BadRecords(folder / "bad_records.txt", cluster),
        config.data.loader.max_bad_records,
        ProgressBar(folder.name, steps),
    )
    return [telemetry, LayerLog(folder, config.model, 0)]
