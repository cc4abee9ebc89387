"""Trains: from the state, new or restored, over the loop to the summary."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from alload_jax.config import Config, run_steps, values_in, values_of
from alload_jax.data.batch import describe
from alload_jax.data.condition import unread
from alload_jax.data.placement import place_ahead
from alload_jax.data.store import mean_square
from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.distributed.consensus import Consensus
from alload_jax.errors import InputError
from alload_jax.planning.repeats import times_placed
from alload_jax.report.opening import (
    Opening,
    changed_settings,
    scale_warning,
    show_opening,
    unused_settings,
)
from alload_jax.report.summary import print_summary, read_summary, summarise
from alload_jax.run.callbacks import Callbacks, make_callbacks
from alload_jax.run.folder import write_folder
from alload_jax.run.kernel_choice import share_comparisons
from alload_jax.run.remat import require_memory, resolved_model
from alload_jax.run.work import Work
from alload_jax.training.bad_samples import BadSamples
from alload_jax.training.callbacks.watchdog import Watchdog
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.device_memory import memory_named, run_memory
from alload_jax.training.loop import Loop
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import describe_trained
from alload_jax.training.progress import ProgressBar
from alload_jax.training.restore import CHECKPOINTS
from alload_jax.training.resume import continue_with
from alload_jax.training.run_files import peak_memory, process_seconds, write_json
from alload_jax.training.shape_groups import GroupTrainer, make_trainer
from alload_jax.training.signals import StopRequest, stop_name
from alload_jax.training.start import Origin, new_state, state_of_checkpoint
from alload_jax.training.state import TrainingSpec, TrainState, Weights
from alload_jax.training.step import auxiliary_shapes
from alload_jax.training.trainer import Trainer, largest, on_mesh
from alload_jax.training.validation.validator import Validator


def train(
    work: Work, cluster: Cluster, argv: Sequence[str], stop: StopRequest, watchdog: Watchdog
) -> int:
    """Trains, from the start or from where the run folder stands; returns the exit status."""
    config = work.config
    folder, mesh = Path(config.run.folder), work.mesh
    total = run_steps(config.run, work.run_plan.plan)
    shapes = partial(work.collator.collation.shapes, work.run_plan.plan)
    spec = training_spec(config, total)._replace(
        model=resolved_model(config, cluster, shapes), step_weight=_step_weight(config, work)
    )
    require_memory(config, cluster, spec.model, work.run_plan.plan)
    validator = make_validator(config, spec, work)
    watchdog.progress()
    with (
        Checkpoints(
            folder / CHECKPOINTS,
            config.checkpoint,
            work.identity,
            config.model.later_fields | OptimizerConfig.usual_identity,
        ) as checkpoints,
        stop,
        cluster.report_failures(),
        memory_named(),
    ):
        # ------------------------------------------------------------ state, new or restored
        start = checkpoints.continue_from(cluster)
        if start:
            checkpoints.check(start)
        summary = cluster.broadcast(partial(read_summary, folder, start))
        if summary and start >= total:
            print_summary(summary, folder)
            return 0
        state, source = _begin(config, spec, work, checkpoints, start)
        single = config.planning.single_gradient
        trainer = make_trainer(spec, mesh, state, work.groups, single=single)

        # ------------------------------------------------------------ run folder, compilation
        square = cluster.broadcast(lambda: mean_square(work.collator.reader))
        before = values_in(folder / "config.yaml") if start else {}
        unused = unused_settings(before, values_of(config)) if checkpoints.base is None else ""
        doubts = [text for text in (scale_warning(square), unused) if text]
        _open(config, work, validator, total, start, source, before, doubts)
        write_folder(config, folder, work.manifest, argv, start)
        if start < total:
            share_comparisons(cluster, partial(_trace, spec, work, state.weights))
        compiled_in = _compile(trainer, work, validator, start < total, stop, watchdog.progress)

        # ------------------------------------------------------------ training
        callbacks = make_callbacks(
            *(config, cluster, work, total, start, stop, watchdog, checkpoints, validator),
            _loss_of_nothing(config, square),
        )
        wants_save = callbacks.checkpointing.wants_save
        consensus = Consensus(cluster, mesh, lambda: stop.number, wants_save)
        place = partial(place_ahead, mesh=mesh, groups=work.groups, consensus=consensus)
        repair = BadSamples(
            *(trainer, work.run_plan, work.collator, lambda step: next(place(iter([step])))),
            *(folder, config.data.loader.max_bad_records, watchdog.progress),
        )
        loop = Loop(trainer, start, total, callbacks.all, repair)
        ready = process_seconds()
        stop_at = start if consensus.signal() else total
        steps = work.run_plan.steps(start, stop_at, work.collator, config.data.loader)
        with closing(steps):
            loop.run(place(steps))
        stopped_by = consensus.signal()
    if loop.refusal:
        raise InputError(f"{loop.refusal} (saved at step {loop.done})")
    if stopped_by:
        done = f"saved step {loop.done} of {total}"
        print(f"{stop_name(stopped_by)}: {done}; {continue_with(folder, config.cluster)}")
        return config.run.status_when_stopped
    times: dict[str, float] = {}
    if first_process() and (steps_done := callbacks.log.rows[start:]):
        times = {
            "programs": len(trainer.programs),
            "compile_seconds": compiled_in,
            "first_step_seconds": ready + steps_done[0]["step_seconds"],
        }
    _finish(folder, loop, callbacks, times, work.began)
    return 0


def training_spec(config: Config, total: int) -> TrainingSpec:
    """What a run of `total` steps computes."""
    return TrainingSpec(
        config.model,
        config.objective,
        make_optimizer(config.optimizer, total),
        config.optimizer.ema_decay,
        config.parameters,
        config.optimizer.accumulate_dtype,
    )


def _loss_of_nothing(config: Config, square: float | None) -> float | None:
    """What a model loses that predicts nothing, if the objective knows."""
    known = getattr(config.objective, "loss_of_nothing", None)
    return None if known is None or square is None else known(square)


def _step_weight(config: Config, work: Work) -> float | None:
    """The mean number of samples of a step; None where each step is divided by its own weight.

    Of the plan's: one that is left out counts like one that is found to be damaged.
    """
    by_token = getattr(config.objective, "weighting", "sample") == "token"
    if config.optimizer.gradient_mean == "step" or by_token:
        return None
    plan = work.run_plan.plan
    times = times_placed(plan.epoch(0), plan.samples.seq_len)
    return float(times.sum()) / plan.steps_per_epoch


def make_validator(config: Config, spec: TrainingSpec, work: Work) -> Validator | None:
    """The validation on the held-out samples; None without any.

    Raises:
      InputError: the objective has no errors at fixed noise levels.
    """
    if not work.held_out:
        return None
    tokens = config.planning.tokens_bound(work.costs)
    return Validator(config.validation, spec, work.mesh, work.held_out, tokens)


def _begin(
    config: Config, spec: TrainingSpec, work: Work, checkpoints: Checkpoints, start: int
) -> tuple[TrainState, str]:
    """The state to train from, and in words where it comes from."""
    origin = Origin(config.run.seed, config.run.initial_weights, config.run.initial_lora)
    if start:
        source = f"checkpoint of step {start} in {config.run.folder}"
        state = state_of_checkpoint(spec, work.mesh, origin, checkpoints, start)
        work.run_plan.restore(checkpoints.restore_recalibration(start))
    else:
        source = config.run.initial_weights or f"new, drawn with run.seed {config.run.seed}"
        state, lacking = new_state(spec, work.mesh, origin, checkpoints)
        source += f"; {lacking}" if lacking else ""
    trained = describe_trained(state.params, state.frozen, config.parameters)
    return state, f"{source}; {trained}" if trained else source


def _open(
    config: Config,
    work: Work,
    validator: Validator | None,
    total: int,
    start: int,
    source: str,
    before: Mapping[str, Any],
    doubts: Sequence[str],
) -> None:
    """Prints what the run will do, the settings that changed, and warnings."""
    opening = Opening(
        work.run_plan.plan,
        config.planning.policy,
        config.planning.tokens_bound(work.costs),
        config.planning.predictor(work.costs),
        config.planning.cost_model is not None,
        total,
        start,
        source,
        len(work.collator.excluded),
        validator.told() if validator else "",
        work.policy_reason,
        [*([text] if (text := unread(config.model, work.manifest)) else []), *doubts],
    )
    show_opening(opening, changed_settings(before, values_of(config)))


def _trace(spec: TrainingSpec, work: Work, weights: Weights) -> None:
    """Traces the largest micro-batch."""
    mesh = work.groups[0] if work.groups else work.mesh
    shapes = work.collator.collation.shapes(work.run_plan.plan)
    auxiliary_shapes(spec, mesh, weights, on_mesh(largest(shapes), mesh))


def _compile(
    trainer: Trainer | GroupTrainer,
    work: Work,
    validator: Validator | None,
    trains: bool,
    stop: StopRequest,
    progress: Callable[[], None],
) -> float:
    """Compiles all programs, until the run is asked to stop; returns seconds for the gradients.

    `progress` is called after each.
    """
    missing = work.collator.collation.shapes(work.run_plan.plan) if trains else []
    begin = time.monotonic()
    with ProgressBar("compiling", len(missing)) as bar:
        for shape in trainer.compile(missing):
            bar.advance(describe(shape))
            progress()
            if stop:
                return 0.0
    seconds = time.monotonic() - begin
    _show_memory(trainer)
    if validator and missing:
        with ProgressBar("compiling validation", len(validator.classes)) as bar:
            for name in validator.compile(trainer.state):
                bar.advance(name)
                progress()
                if stop:
                    break
    return seconds


def _show_memory(trainer: Trainer | GroupTrainer) -> None:
    """Prints what a step needs of a device's memory."""
    found = run_memory(trainer.state, trainer.programs.values())
    if found is None or not first_process():
        return
    print(found.line(), flush=True)
    if warning := found.warning():
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _finish(
    folder: Path, loop: Loop, callbacks: Callbacks, times: dict[str, float], began: float
) -> None:
    """Draws the last samples, measures them and writes the summary."""
    loop.finish()
    seconds = time.monotonic() - began
    if not first_process():  # another host may not see the last lines of metrics.jsonl
        return
    figures = callbacks.figures() | times
    summary = summarise(callbacks.log.rows, loop.done, figures, peak_memory(), seconds)
    write_json(folder / "summary.json", summary)
    print_summary(summary, folder)
