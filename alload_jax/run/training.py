"""The training program, read from top to bottom: data, plan, model, state, loop, summary."""

import dataclasses
import gc
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from alload_jax.config import (
    Config,
    experts_of,
    run_steps,
    use_compilation_cache,
    values_in,
    values_of,
    with_context,
    without_effect,
    write_config,
)
from alload_jax.config_parser import config_files, flags_of
from alload_jax.data.batch import AnyBatch, describe
from alload_jax.data.condition import unread
from alload_jax.data.loader import place_ahead
from alload_jax.data.record import checksum
from alload_jax.data.selection import weights_identity
from alload_jax.data.store import mean_square
from alload_jax.distributed.cluster import Cluster, Consensus, first_process
from alload_jax.distributed.initialize import initialize
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import Json
from alload_jax.models.families import float8_unused
from alload_jax.models.weights import require_same_architecture
from alload_jax.planning.epoch import times_placed
from alload_jax.processes import waits
from alload_jax.report import summary as report
from alload_jax.run.prepare import make_collator, plan_run, read_data
from alload_jax.sharding.mesh import group_meshes, make_mesh
from alload_jax.training import EXPERTS, RunConfig, memory, restore, run_files
from alload_jax.training.callbacks import Callback, CallbackContext
from alload_jax.training.callbacks.telemetry import DeviceProbe, DeviceSpeeds, LayerLog, Telemetry
from alload_jax.training.callbacks.validating import Checkpointing, Validating
from alload_jax.training.callbacks.watchdog import Watchdog
from alload_jax.training.checkpoint import BestCheckpoints, Checkpoints
from alload_jax.training.divergence import Divergence, DivergenceGuard
from alload_jax.training.loop import BadSamples, Loop
from alload_jax.training.memory import STATE_REMEDY, memory_named, run_memory
from alload_jax.training.optimizer import OptimizerConfig, learning_rate_schedule
from alload_jax.training.parameters import describe_trained
from alload_jax.training.progress import ProgressBar
from alload_jax.training.signals import StopRequest, leave, stop_name, termination_as_interrupt
from alload_jax.training.state import TrainingSpec, TrainState, training_spec
from alload_jax.training.step import auxiliary_shapes
from alload_jax.training.trackers import TrackerContext, Trackers
from alload_jax.training.trainer import Trainer, largest, on_mesh
from alload_jax.training.validator import Validator
from pallas_kernels.first_use import COMPARISONS
from pallas_kernels.layernorm_modulate import tuning

if TYPE_CHECKING:
    from alload_jax.sampling.samples import SampleWriter


def run(config: Config, argv: Sequence[str]) -> int:
    """Runs the training of a config; returns the exit status.

    Args:
      config: the config as it was read.
      argv: the command line, for the advice to continue.
    """
    _refuse_moved(config, argv)
    if config.sampling.encoders.vae:  # it decodes samples beside the model
        from alload_jax.encoders.loading import share_memory

        share_memory()
    status = config.run.status_when_stopped or 128 + signal.SIGTERM
    with (
        initialize(config.cluster, config.run.folder) as cluster,
        termination_as_interrupt(status, leave),
    ):
        stop = StopRequest()
        remedy = partial(run_files.continue_with, Path(config.run.folder), config.cluster)
        experts = experts_of(config)
        with cluster.report_failures():
            if cluster.num_processes > 1:
                # Now that all are here: the first use of devices waits for those of the others, for
                # two minutes, and one may take longer than another to read its data.
                jax.devices()
            _require_folder(config, experts)
        gc.collect()  # an earlier run of this process may have left arrays
        gc.freeze()  # tracing makes garbage by the million; what was imported is none of it
        for each in experts:
            if any(cluster.all_gather(stop.number)):  # while the expert before was trained
                return config.run.status_when_stopped
            if config.experts is not None and first_process():
                print(f"expert {each.run.folder}:", flush=True)
            folder = Path(each.run.folder)
            with Watchdog(config.watchdog, folder, cluster, stop, remedy) as watchdog:
                status = train(with_context(each), argv, cluster, stop, watchdog, config)
            gc.collect()  # the next expert needs the memory
        return status


def _refuse_moved(config: Config, argv: Sequence[str]) -> None:
    """Refuses to begin at step 0 by the config of a run that was moved or copied.

    Raises:
      InputError: the config lies in a run's folder, and names another, which has no run.
    """
    folder = config.run.folder
    if run_files.is_run(folder) or any(flag == "--run.folder" for flag, _ in flags_of(argv)):
        return
    for file in config_files(argv):
        if run_files.is_run(place := Path(file).parent):
            raise InputError(
                f"{file}: is of the run in {place}, but run.folder is {folder}, which has none; "
                f"give --run.folder {place} to go on, or --run.folder {folder} to begin anew"
            )


def _require_folder(config: Config, experts: Sequence[Config]) -> None:
    """Refuses before data are read what would be refused after, or for the second expert alone.

    Raises:
      InputError: the folder is no run's, or has a run of one model for two experts, or of two for
        none; the boundary is no longer that of the run; or the second one's weights are missing or
        another model's.
    """
    folder = Path(config.run.folder)
    if config.experts is None:
        if run_files.is_run(folder / EXPERTS[0]):
            raise InputError(
                f"{folder}: two experts were trained there; restore experts in the config, or name "
                "another run.folder"
            )
        run_files.require_run_or_new(folder)
        return
    if run_files.is_run(folder):
        raise InputError(f"{folder}: one model was trained there; name another run.folder")
    run_files.require_run_or_new(folder)
    first, second = experts
    before = values_in(folder / "config.yaml").get("experts.boundary", config.experts.boundary)
    if before != config.experts.boundary and run_files.is_run(first.run.folder):
        raise InputError(
            f"experts.boundary is {config.experts.boundary}, but {first.run.folder} was trained "
            f"with {before}; set it to this, or name another run.folder"
        )
    if second.run.initial_weights is None or run_files.is_run(second.run.folder):
        return
    place = Path(second.run.initial_weights)
    if not place.exists():
        raise InputError(f"experts.low_noise is {place}, which is not there; name its weights")
    model = None if run_files.is_run(place) else restore.described_model(place)
    if model is not None:
        require_same_architecture(config.model, model, place)


class _Run:
    """What a run has before it knows where it goes on.

    Attributes:
      config: with the policy in force.
      folder: of the run.
      cluster, stop, watchdog: its processes, whether it is asked to stop, what ends it if it hangs.
      data: its samples.
      mesh: all devices.
      plan: of its steps.
      policy_reason: why auto took the policy; "" if the config names it.
      identity: what it must keep when it goes on, by part.
      groups: mesh of each shape group; empty for none.
      tokens: most of a micro-batch; None without a bound.
      writer: draws its samples; None if nothing is drawn.
    """

    writer: "SampleWriter | None" = None

    def __init__(self, config: Config, cluster: Cluster, stop: StopRequest, watchdog: Watchdog):
        """Reads the data, plans the steps and checks what does not depend on where it goes on."""
        self.cluster, self.stop, self.watchdog = cluster, stop, watchdog
        self.folder, model, planning = Path(config.run.folder), config.model, config.planning
        self.data = read_data(config.data, config.validation, model, cluster)
        self.mesh = make_mesh(config.mesh)
        require_same_tables(cluster, self.mesh.devices.flat[0].device_kind)
        planning.refuse_foreign_costs(
            model.step_fields() | {"parameters": config.parameters.identity()},
            self.mesh.devices.flat[0].device_kind,
        )
        self.plan, self.policy_reason = plan_run(
            planning, model, self.data, config.run, self.mesh, cluster
        )
        self.config = config = dataclasses.replace(config, planning=self.plan.planning)
        self.identity: Json = {
            "validation": config.validation.identity(),
            "model": model.architecture(),
            "mixture": weights_identity(config.data.weights),
            "plan": self.plan.plan.identity(),
            "parameters": config.parameters.identity(),
            "optimizer": config.optimizer.identity(),
            "planning": config.planning.identity(),
            "data": self.data.manifest.identity(),
        }
        held_out = self.data.held_out.identity() if self.data.held_out else {}
        cluster.require_same(
            self.identity["plan"] | self.identity["data"] | held_out,
            "give all processes the same data folder, code and packages",
        )
        self.groups = group_meshes(self.mesh, self.plan.plan)
        self.tokens = config.planning.tokens_bound(self.plan.costs)
        if config.sampling.grids or config.sampling.prompts or config.evaluators:
            from alload_jax.sampling.samples import SampleWriter  # which imports the encoders

            self.writer = SampleWriter(
                self.folder / "samples",
                model,
                config.objective.timesteps,
                config.sampling,
                self.data.manifest,
                trained_null=getattr(config.objective, "condition_dropout", 0.0) > 0,
            )
        for evaluator in config.evaluators:
            evaluator.check(model, self.data.manifest)
        for tracker in config.trackers:
            tracker.check()


def train(
    config: Config,
    argv: Sequence[str],
    cluster: Cluster,
    stop: StopRequest,
    watchdog: Watchdog,
    whole: Config,
) -> int:
    """Trains, from the start or from where the run folder stands; returns the exit status.

    The config is known here alone: what is called takes the parts that it uses. The run is that of
    `whole`, or of one of its two experts; the config in the folder of `whole` continues it.
    """
    began, folder, root = time.monotonic(), Path(config.run.folder), Path(whole.run.folder)
    if cluster.heartbeat:
        cluster.heartbeat.remedy = partial(run_files.after_loss, folder, root, config.cluster)
    cluster.require_same(values_of(config), "start all processes with the same config")
    use_compilation_cache(config.run, cluster)
    run = _Run(config, cluster, stop, watchdog)
    config, mesh, run_plan, groups = run.config, run.mesh, run.plan, run.groups
    model, planning = config.model, config.planning
    defaults = model.later_fields | OptimizerConfig.usual_identity
    kept = folder / run_files.CHECKPOINTS, config.checkpoint, run.identity, defaults
    with run_files.locked(folder, cluster), Checkpoints(*kept) as checkpoints:
        # ------------------------------------------------------------ where the run goes on
        with cluster.report_failures():
            start, joined = checkpoints.continue_from(cluster), ""
            if start:
                joined = run_plan.restore(checkpoints.restore_recalibration(start), start)
                checkpoints.other_samples = bool(joined)
                checkpoints.check(start)
        total = run_steps(config.run, run_plan.plan)
        collator = make_collator(run_plan, run.data, model, mesh, config.run.seed)

        # ------------------------------------------------------------ what a step computes
        shapes = partial(collator.collation.shapes, run_plan.plan)
        spec, validator = _computation(run, shapes, total), None
        if held_out := run.data.held_out:
            validator = Validator(config.validation, spec, mesh, held_out, run.tokens)
        watchdog.progress()
        with stop, cluster.report_failures(), memory_named():
            # -------------------------------------------------------- state, new or restored
            summary = cluster.broadcast(partial(report.read_summary, folder, start))
            if summary and start >= total:
                report.print_summary(summary, folder)
                return 0
            if run.writer:
                run.writer.begin(partial(_weights_of_run, config, spec, mesh))
            state, state_to_train, source = _begin(spec, mesh, config.run, checkpoints, start)
            trainer = Trainer(spec, mesh, state, groups, single=planning.single_gradient)

            # -------------------------------------------------------- run folder, compilation
            square = cluster.broadcast(lambda: mean_square(collator.reader))
            if joined:
                joined = f"the data folder has changed since step {start}: {joined}"
            doubts = [*without_effect(whole), *unread(model, run.data.manifest)]
            doubts.append(report.scale_warning(square))
            if model.matmul == "float8" and run.tokens:
                doubts.append(float8_unused(model, run_plan.plan.topology.ranks * run.tokens))
            before, now = values_in(folder / "config.yaml") if start else {}, values_of(config)
            if not start:
                doubts.append(run_files.set_aside_metrics(folder))
            if checkpoints.base is None:
                doubts.append(report.unused_settings(before, now))
            lines, warnings = report.opening_lines(
                plan=run_plan.plan,
                policy=planning.policy,
                m_mem=run.tokens,
                cost_model=planning.predictor(run_plan.costs),
                timed=planning.cost_model is not None,
                steps=total,
                start=start,
                weights=source,
                excluded=len(run.data.excluded),
                validation=validator.told() if validator else "",
                policy_reason=run.policy_reason,
                doubts=[text for text in doubts if text],
            )
            lines += [joined, report.changed_settings(before, now)]
            report.show_opening(lines, warnings)
            _write_beginning(run, whole, argv, start)
            missing = shapes() if start < total else ()
            compile_seconds = _compile_all(run, spec, trainer, missing, state_to_train, validator)

            # -------------------------------------------------------- training
            log = run_files.MetricsLog(folder, start, cluster)
            callbacks, checkpointing, figures = _callbacks(
                run, checkpoints, log, validator, square, start, total
            )
            consensus = Consensus(cluster, mesh, lambda: stop.number, checkpointing.wants_save)
            place = partial(place_ahead, mesh=mesh, groups=groups, consensus=consensus)
            repair = BadSamples(
                trainer=trainer,
                plan=run_plan,
                collator=collator,
                place=lambda step: next(place(iter([step]))),
                folder=folder,
                most=config.data.loader.max_bad_records,
                progress=watchdog.progress,
            )
            loop = Loop(trainer, start, total, callbacks, repair)
            ready = run_files.process_seconds() if root == folder else time.monotonic() - began
            stop_at = start if consensus.signal() else total
            with closing(run_plan.steps(start, stop_at, collator, config.data.loader)) as steps:
                loop.run(place(steps))
            stopped_by = consensus.signal()

        # ------------------------------------------------------------ end
        if loop.refusal:
            raise InputError(f"{loop.refusal} (saved at step {loop.done})")
        if stopped_by:
            done = f"saved step {loop.done} of {total}"
            goes_on = run_files.continue_with(root, config.cluster)
            print(f"{stop_name(stopped_by)}: {done}; {goes_on}")
            return config.run.status_when_stopped
        compiled = len(trainer.programs), compile_seconds, ready
        _finish(loop, log, figures, compiled, start, began)
        return 0


def _computation(run: _Run, shapes: Callable[[], Sequence[AnyBatch]], steps: int) -> TrainingSpec:
    """What a step of a run of so many computes, with `model.remat: auto` replaced.

    Raises:
      InputError: a step does not fit a device's memory.
    """
    config, plan = run.config, run.plan.plan
    model = memory.fitting_model(
        model=config.model,
        parameters=config.parameters,
        optimizer=config.optimizer,
        mesh=config.mesh,
        run_plan=run.plan,
        shapes=shapes,
        cluster=run.cluster,
        folder=run.folder,
        kept=sum(getattr(callback, "kept_bytes", 0) for callback in config.callbacks),
    )
    by_token = getattr(config.objective, "weighting", "sample") == "token"
    weight = None  # each step is divided by its own
    if config.optimizer.gradient_mean != "step" and not by_token:
        # The mean number of samples of the plan's steps: one that is left out counts like one that
        # is found to be damaged.
        weight = float(times_placed(plan.epoch(0)).sum()) / plan.steps_per_epoch
    return training_spec(
        model=model,
        optimizer=config.optimizer,
        objective=config.objective,
        parameters=config.parameters,
        steps=steps,
        step_weight=weight,
    )


def _weights_of_run(config: Config, spec: TrainingSpec, mesh: Mesh, run: str) -> PyTree:
    """The values of the model in another run's newest checkpoint."""
    place = Path(run) / run_files.CHECKPOINTS
    return restore.restore_weights(
        place,
        restore.find_step(place),
        config=spec.model,
        parameters=config.parameters,
        mesh=mesh,
        weights="raw" if config.optimizer.ema_decay is None else "ema",
    ).merged()


def _begin(
    spec: TrainingSpec, mesh: Mesh, run: RunConfig, checkpoints: Checkpoints, start: int
) -> tuple[TrainState, Callable[[], TrainState], str]:
    """The state to train from, as `new_state` returns it, and in words where it comes from."""
    if start:
        source = f"checkpoint of step {start} in {run.folder}"
        restored = restore.state_of_checkpoint(spec, mesh, run, checkpoints, start)
        state, state_to_train = restored, lambda: restored
    else:
        source = run.initial_weights or f"new, drawn with run.seed {run.seed}"
        state, state_to_train, lacking = restore.new_state(spec, mesh, run, checkpoints)
        source += f"; {lacking}" if lacking else ""
    trained = describe_trained(state.params, state.frozen, spec.parameters)
    return state, state_to_train, f"{source}; {trained}" if trained else source


def _write_beginning(run: _Run, whole: Config, argv: Sequence[str], start: int) -> None:
    """Writes to the run folder what continues the run, what samples need, and what it runs on."""
    manifest = run.data.manifest
    write_config(run.config, run.folder / "config.yaml")
    if whole.experts is not None:
        write_config(whole, Path(whole.run.folder) / "config.yaml")
    facts = {  # which `alload sample` needs of the data, wherever they go
        "vae_stride": list(manifest.vae_stride),
        "text_length": manifest.longest_text(),
        "origin": manifest.origin,
    }
    run_files.write_json(run.folder / "data.json", facts)
    run_files.append_environment(run.folder / "environment.json", list(argv), start)


def _callbacks(
    run: _Run,
    checkpoints: Checkpoints,
    log: run_files.MetricsLog,
    validator: Validator | None,
    square: float | None,
    start: int,
    total: int,
) -> tuple[list[Callback], Checkpointing, Callable[[], dict[str, float]]]:
    """What acts beside the steps from `start` to `total`, in order.

    Returns:
      The callbacks; the one that saves; and what gives the figures of the others for the summary.
    """
    config, folder, cluster, mesh = run.config, run.folder, run.cluster, run.mesh
    bar = ProgressBar("training", total, start)
    tracker = Trackers(config.trackers, TrackerContext(folder, start, values_of(config)))
    checkpointing = Checkpointing(checkpoints, config.checkpoint, run.plan)
    drawing, evaluation = list[Callback](), None
    if writer := run.writer:
        from alload_jax.training.callbacks.drawing import Drawing, Evaluation

        drawing = [Drawing(writer, config.sampling.every, tracker, writer.progress(start))]
        evaluation = Evaluation(config.evaluators, writer, config.sampling.seed)
    validating = list[Validating]()
    if validator:
        best = BestCheckpoints(folder, config.checkpoint.keep_best, checkpoints, cluster)
        every, save = config.validation.every, checkpointing.save
        validating = [Validating(validator, every, log, tracker, bar.say, best, save)]
    nothing, of_nothing = None, getattr(config.objective, "loss_of_nothing", None)
    if of_nothing and square is not None:
        nothing = of_nothing(square, config.model)
    divergence = Divergence(config.divergence.stop_above, nothing)
    guard = DivergenceGuard(divergence, checkpoints, run.plan, folder)
    guard.follow(cluster.broadcast(log.losses))
    bad_records = run_files.BadRecords(folder / "bad_records.txt", cluster)
    most_bad = config.data.loader.max_bad_records
    schedule = learning_rate_schedule(config.optimizer, total)
    weighting = getattr(config.objective, "weighting", "sample")
    context = CallbackContext(folder, run.stop, weighting)
    callbacks: list[Callback] = [
        run.watchdog,
        Telemetry(run.plan, schedule, log, tracker, bad_records, most_bad, bar, guard),
        LayerLog(folder, config.model, start),
        # Before the state is saved, which then has what it found.
        DeviceSpeeds(run.plan, mesh, cluster, DeviceProbe(mesh, cluster)),
        checkpointing,
        *validating,
        *drawing,
        *(each.make(context) for each in config.callbacks),
        *([evaluation] if evaluation else []),
    ]

    def figures() -> dict[str, float]:
        evaluated = evaluation.figures if evaluation else {}
        return evaluated | (validating[0].figures() if validating else {})

    return callbacks, checkpointing, figures


def require_same_tables(cluster: Cluster, device_kind: str) -> None:
    """Refuses hosts with other results of `alload bench tune`, by which programs would differ.

    Raises:
      InputError: a process has another file for this kind of device than process 0.
    """
    table = tuning.read(device_kind)
    cluster.require_same(
        {f"the table of kernels of {device_kind}": table and checksum(repr(table).encode())},
        f"copy {tuning.path_of(device_kind)} of one host to the others, or remove it on all",
    )


def share_comparisons(cluster: Cluster, trace: Callable[[], object]) -> None:
    """Measures in process 0 what a program asks for, and takes its results in all processes.

    In a run of one process the kernels measure by themselves.

    Args:
      cluster: the processes.
      trace: traces a program, which asks for the comparisons that it needs.
    """
    if cluster.num_processes == 1:
        return

    def measured() -> dict[str, float]:
        COMPARISONS.use(None)
        trace()
        return COMPARISONS.known()

    COMPARISONS.use(cluster.broadcast(measured))


def _compile_all(
    run: _Run,
    spec: TrainingSpec,
    trainer: Trainer,
    missing: Sequence[AnyBatch],
    state_to_train: Callable[[], TrainState],
    validator: Validator | None,
) -> float:
    """Compiles programs for batches of these shapes, gives the trainer its state, and tells memory.

    Returns:
      Seconds that the programs of steps took.
    """
    if missing:
        of_group = run.groups[0] if run.groups else run.mesh
        batch = on_mesh(largest(missing), of_group)
        trace = partial(auxiliary_shapes, spec, of_group, trainer.state.weights, batch)
        share_comparisons(run.cluster, trace)
    began = time.monotonic()
    # What compiles in parallel ends where nothing holds the iterator any more.
    _compile(run, "compiling", len(missing), map(describe, trainer.compile(missing)))
    seconds = time.monotonic() - began
    with memory_named("the state", STATE_REMEDY):
        trainer.begin(jax.block_until_ready(state_to_train()))
    if trainer.programs and not run.stop:
        _show_memory(trainer)
        if validator:
            names, count = validator.compile(trainer.state), len(validator.classes)
            _compile(run, "compiling validation", count, names)
    return seconds


@waits("for programs to be compiled")
def _compile(run: _Run, title: str, count: int, compiled: Iterable[str]) -> None:
    """Compiles programs until the run is asked to stop."""
    with ProgressBar(title, count) as bar:
        for name in compiled:
            bar.advance(name)
            run.watchdog.progress()
            if run.stop:
                break


def _show_memory(trainer: Trainer) -> None:
    """Prints what a step needs of a device's memory."""
    memory = run_memory(trainer.state, trainer.programs.values())
    if memory is None or not first_process():
        return
    print(memory.line(), flush=True)
    if warning := memory.warning():
        print_stderr(f"warning: {warning}")


def _finish(
    loop: Loop,
    log: run_files.MetricsLog,
    figures: Callable[[], dict[str, float]],
    compiled: tuple[int, float, float],
    start: int,
    began: float,
) -> None:
    """Draws the last samples, measures them and writes the summary.

    `compiled` is the number of programs, the seconds for them, and those until the first step.
    """
    loop.finish()
    seconds = time.monotonic() - began
    if not first_process():  # another host may not see the last lines of metrics.jsonl
        return
    measured = figures()
    if log.first:
        programs, compile_seconds, ready = compiled
        measured |= {
            "programs": programs,
            "compile_seconds": compile_seconds,
            "first_step_seconds": ready + log.first["step_seconds"],
        }
    summary = report.summarise(log.rows, loop.done, measured, run_files.peak_memory(), seconds)
    run_files.write_json(log.folder / "summary.json", summary)
    report.print_summary(summary, log.folder)
