"""The training program, read from top to bottom: data, plan, model, state, loop, summary."""

import dataclasses
import gc
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from alload_jax.config import (
    Config,
    experts_of,
    run_steps,
    use_compilation_cache,
    values_in,
    values_of,
    with_context,
    write_config,
)
from alload_jax.data.batch import AnyBatch, describe
from alload_jax.data.condition import unread
from alload_jax.data.loader import place_ahead
from alload_jax.data.manifest import Manifest
from alload_jax.data.selection import weights_identity
from alload_jax.data.store import mean_square
from alload_jax.distributed.cluster import Cluster, Consensus, first_process
from alload_jax.distributed.initialize import initialize
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import Json
from alload_jax.models.weights import require_same_architecture
from alload_jax.objectives import Objective
from alload_jax.planning.epoch import times_placed
from alload_jax.planning.plan import Plan
from alload_jax.processes import waits
from alload_jax.report.summary import (
    Opening,
    changed_settings,
    print_summary,
    read_summary,
    scale_warning,
    show_opening,
    summarise,
    unused_settings,
)
from alload_jax.run.prepare import RunData, make_collator, plan_run, read_data
from alload_jax.sampling.samples import SampleWriter
from alload_jax.sharding.mesh import group_meshes, make_mesh, ranks_of
from alload_jax.training import EXPERTS, RunConfig
from alload_jax.training.callbacks import Callback, CallbackContext
from alload_jax.training.callbacks.telemetry import DeviceProbe, DeviceSpeeds, LayerLog, Telemetry
from alload_jax.training.callbacks.validating import Checkpointing, Drawing, Evaluation, Validating
from alload_jax.training.callbacks.watchdog import Watchdog
from alload_jax.training.checkpoint import BestCheckpoints, Checkpoints
from alload_jax.training.device_memory import STATE_REMEDY, memory_named, run_memory
from alload_jax.training.divergence import MOST_FOLLOWED, Divergence, DivergenceGuard
from alload_jax.training.loop import BadSamples, Loop
from alload_jax.training.optimizer import OptimizerConfig, learning_rate_schedule
from alload_jax.training.parameters import describe_trained
from alload_jax.training.progress import ProgressBar
from alload_jax.training.remat_choice import (
    least_budget,
    replicas_of,
    require_fit,
    resolved_model,
)
from alload_jax.training.restore import (
    CHECKPOINTS,
    WeightsKind,
    described_model,
    find_step,
    is_run,
    new_state,
    restore_weights,
    state_of_checkpoint,
)
from alload_jax.training.run_files import (
    BadRecords,
    MetricsLog,
    after_loss,
    append_environment,
    continue_with,
    locked,
    peak_memory,
    process_seconds,
    write_json,
)
from alload_jax.training.signals import (
    StopRequest,
    leave,
    stop_name,
    termination_as_interrupt,
)
from alload_jax.training.state import TrainingSpec, TrainState, training_spec
from alload_jax.training.step import auxiliary_shapes
from alload_jax.training.trackers import TrackerContext, Trackers
from alload_jax.training.trainer import Trainer, largest, on_mesh
from alload_jax.training.validation.validator import Validator
from pallas_kernels.first_use import COMPARISONS


def run(config: Config, argv: Sequence[str]) -> int:
    """Runs the training of a config; returns the exit status.

    Args:
      config: the config as it was read.
      argv: the command line, for the advice to continue.
    """
    if config.sampling.encoders.vae:  # it decodes samples beside the model
        from alload_jax.encoders.loading import share_memory

        share_memory()
    status = config.run.status_when_stopped or 128 + signal.SIGTERM
    with (
        initialize(config.cluster, config.run.folder) as cluster,
        termination_as_interrupt(status, leave),
    ):
        stop = StopRequest()
        remedy = partial(continue_with, Path(config.run.folder), config.cluster)
        experts = experts_of(config)
        with cluster.report_failures():
            _require_experts(config, experts)
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


def _require_experts(config: Config, experts: Sequence[Config]) -> None:
    """Refuses before the first expert is trained what the second would be refused for.

    Raises:
      InputError: the second one's weights are missing or another model's; the boundary is no longer
        that of the run; or the folder has a run of one model, or of two where there are no experts.
    """
    folder = Path(config.run.folder)
    if config.experts is None:
        if is_run(folder / EXPERTS[0]):
            raise InputError(
                f"{folder}: two experts were trained there; restore experts in the config, or name "
                "another run.folder"
            )
        return
    if is_run(folder):
        raise InputError(f"{folder}: one model was trained there; name another run.folder")
    first, second = experts
    before = values_in(folder / "config.yaml").get("experts.boundary", config.experts.boundary)
    if before != config.experts.boundary and is_run(first.run.folder):
        raise InputError(
            f"experts.boundary is {config.experts.boundary}, but {first.run.folder} was trained "
            f"with {before}; set it to this, or name another run.folder"
        )
    if second.run.initial_weights is None or is_run(second.run.folder):
        return
    place = Path(second.run.initial_weights)
    if not place.exists():
        raise InputError(f"experts.low_noise is {place}, which is not there; name its weights")
    model = None if is_run(place) else described_model(place)
    if model is not None:
        require_same_architecture(config.model, model, place)


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
    use_compilation_cache(config.run)
    if cluster.heartbeat:
        cluster.heartbeat.remedy = partial(after_loss, folder, root, config.cluster)
    cluster.require_same(values_of(config), "start all processes with the same config")

    # ---------------------------------------------------------------- data
    data = read_data(config.data, config.validation, config.model, cluster)

    # ---------------------------------------------------------------- devices, plan, loader
    mesh = make_mesh(config.mesh)
    config.planning.refuse_foreign_costs(
        config.model.step_fields() | {"parameters": config.parameters.identity()},
        mesh.devices.flat[0].device_kind,
    )
    run_plan, policy_reason = plan_run(
        config.planning, config.model, data, config.run, mesh, cluster
    )
    plan, planning, costs = run_plan.plan, run_plan.planning, run_plan.costs
    config = dataclasses.replace(config, planning=planning)
    values = values_of(config)
    identity = _identity(config, data, plan)
    held_out = data.held_out.identity() if data.held_out else {}
    cluster.require_same(
        identity["plan"] | identity["data"] | held_out,
        "give all processes the same data folder, code and packages",
    )
    groups, tokens = group_meshes(mesh, plan), planning.tokens_bound(costs)
    writer = SampleWriter(
        folder / "samples",
        config.model,
        config.objective.timesteps,
        config.sampling,
        data.manifest,
        trained_null=getattr(config.objective, "condition_dropout", 0.0) > 0,
    )
    for evaluator in config.evaluators:
        evaluator.check(config.model, data.manifest)
    for tracker_config in config.trackers:
        tracker_config.check()

    defaults = config.model.later_fields | OptimizerConfig.usual_identity
    with (
        locked(folder, cluster),
        Checkpoints(folder / CHECKPOINTS, config.checkpoint, identity, defaults) as checkpoints,
    ):
        # ------------------------------------------------------------ where the run goes on
        with cluster.report_failures():
            start, joined = checkpoints.continue_from(cluster), ""
            if start:
                joined = run_plan.restore(checkpoints.restore_recalibration(start), start)
                checkpoints.other_samples = bool(joined)
                checkpoints.check(start)
        plan, total = run_plan.plan, run_steps(config.run, run_plan.plan)
        collator = make_collator(run_plan, data, config.model, mesh, config.run.seed)

        # ------------------------------------------------------------ what a step computes
        shapes = partial(collator.collation.shapes, plan)
        spec = _computation(config, plan, tokens, shapes, total, cluster)
        validator = None
        if data.held_out:
            validator = Validator(config.validation, spec, mesh, data.held_out, tokens)
        watchdog.progress()
        with stop, cluster.report_failures(), memory_named():
            # -------------------------------------------------------- state, new or restored
            summary = cluster.broadcast(partial(read_summary, folder, start))
            if summary and start >= total:
                print_summary(summary, folder)
                return 0
            kind: WeightsKind = "raw" if config.optimizer.ema_decay is None else "ema"
            found = partial(
                restore_weights,
                config=spec.model,
                parameters=config.parameters,
                mesh=mesh,
                weights=kind,
            )
            writer.begin(
                lambda run: found(place := Path(run) / CHECKPOINTS, find_step(place)).merged()
            )
            state, state_to_train, source = _begin(spec, mesh, config.run, checkpoints, start)
            trainer = Trainer(spec, mesh, state, groups, single=planning.single_gradient)

            # -------------------------------------------------------- run folder, compilation
            square = cluster.broadcast(lambda: mean_square(collator.reader))
            before = values_in(folder / "config.yaml") if start else {}
            unused = unused_settings(before, values) if checkpoints.base is None else ""
            doubts = (unread(config.model, data.manifest), scale_warning(square), unused)
            opening = Opening(
                plan=run_plan.plan,
                policy=planning.policy,
                m_mem=tokens,
                cost_model=planning.predictor(costs),
                timed=planning.cost_model is not None,
                steps=total,
                start=start,
                weights=source,
                excluded=len(data.excluded),
                validation=validator.told() if validator else "",
                policy_reason=policy_reason,
                doubts=[text for text in doubts if text],
            )
            if joined:
                joined = f"the data folder has changed since step {start}: {joined}"
            show_opening(opening, [joined, changed_settings(before, values)])
            _write_beginning(config, whole, data.manifest, argv, start)
            missing: Sequence[AnyBatch] = ()
            if start < total:
                missing = collator.collation.shapes(run_plan.plan)
                of_group = groups[0] if groups else mesh
                batch = on_mesh(largest(missing), of_group)
                trace = partial(auxiliary_shapes, spec, of_group, state.weights, batch)
                share_comparisons(cluster, trace)
            compile_began = time.monotonic()
            # What compiles in parallel ends where nothing holds the iterator any more.
            _compile(
                "compiling",
                len(missing),
                map(describe, trainer.compile(missing)),
                stop,
                watchdog.progress,
            )
            compile_seconds = time.monotonic() - compile_began
            with memory_named("the state", STATE_REMEDY):
                trainer.begin(jax.block_until_ready(state_to_train()))
            if trainer.programs and not stop:
                _show_memory(trainer)
                if validator:
                    _compile(
                        "compiling validation",
                        len(validator.classes),
                        validator.compile(trainer.state),
                        stop,
                        watchdog.progress,
                    )

            # -------------------------------------------------------- callbacks
            log, bar = MetricsLog(folder, resumed_at=start), ProgressBar("training", total, start)
            tracker = Trackers(config.trackers, TrackerContext(folder, start, values))
            checkpointing = Checkpointing(checkpoints, config.checkpoint, run_plan)
            evaluation = Evaluation(config.evaluators, writer, config.sampling.seed)
            validating = None
            if validator:
                best = BestCheckpoints(folder, config.checkpoint.keep_best, checkpoints, cluster)
                every, save = config.validation.every, checkpointing.save
                validating = Validating(validator, every, log, tracker, bar.say, best, save)
            of_nothing = getattr(config.objective, "loss_of_nothing", None)
            nothing = None
            if of_nothing and square is not None:
                nothing = of_nothing(square, config.model)
            divergence = Divergence(config.divergence.stop_above, nothing)
            guard = DivergenceGuard(divergence, checkpoints, run_plan, folder)
            guard.follow(cluster.broadcast(lambda: log.losses(MOST_FOLLOWED) if start else []))
            bad_records = BadRecords(folder / "bad_records.txt", cluster)
            most_bad = config.data.loader.max_bad_records
            schedule = learning_rate_schedule(config.optimizer, total)
            every, progress = config.sampling.every, writer.progress(start)
            # Devices of a CPU share its cores.
            unlike = ranks_of(mesh) > 1 and mesh.devices.flat[0].platform != "cpu"
            follows = unlike and run_plan.planning.recalibrate == "window"
            probe = DeviceProbe(mesh, cluster) if follows else None
            callbacks: list[Callback] = [
                watchdog,
                Telemetry(run_plan, schedule, log, tracker, bad_records, most_bad, bar, guard),
                LayerLog(folder, config.model, start),
                # Before the state is saved, which then has what they found.
                *([DeviceSpeeds(run_plan, mesh, cluster, probe)] if probe else []),
                checkpointing,
                *([validating] if validating else []),
                Drawing(writer, every, tracker, progress),
                *(each.make(CallbackContext(folder, stop)) for each in config.callbacks),
                evaluation,
            ]

            # -------------------------------------------------------- training
            consensus = Consensus(cluster, mesh, lambda: stop.number, checkpointing.wants_save)
            place = partial(place_ahead, mesh=mesh, groups=groups, consensus=consensus)
            repair = BadSamples(
                trainer=trainer,
                plan=run_plan,
                collator=collator,
                place=lambda step: next(place(iter([step]))),
                folder=folder,
                most=most_bad,
                progress=watchdog.progress,
            )
            loop = Loop(trainer, start, total, callbacks, repair)
            ready = process_seconds() if root == folder else time.monotonic() - began
            stop_at = start if consensus.signal() else total
            with closing(run_plan.steps(start, stop_at, collator, config.data.loader)) as steps:
                loop.run(place(steps))
            stopped_by = consensus.signal()

        # ------------------------------------------------------------ end
        if loop.refusal:
            raise InputError(f"{loop.refusal} (saved at step {loop.done})")
        if stopped_by:
            done = f"saved step {loop.done} of {total}"
            print(f"{stop_name(stopped_by)}: {done}; {continue_with(root, config.cluster)}")
            return config.run.status_when_stopped
        figures: dict[str, float] = {}
        if first_process() and (steps_done := log.rows[start:]):
            figures = {
                "programs": len(trainer.programs),
                "compile_seconds": compile_seconds,
                "first_step_seconds": ready + steps_done[0]["step_seconds"],
            }
        _finish(folder, loop, log, evaluation, validating, figures, began)
        return 0


def _identity(config: Config, data: RunData, plan: Plan) -> Json:
    """What a run must keep when it goes on, by part."""
    return {
        "validation": config.validation.identity(),
        "model": config.model.architecture(),
        "mixture": weights_identity(config.data.weights),
        "plan": plan.identity(),
        "parameters": config.parameters.identity(),
        "optimizer": config.optimizer.identity(),
        "planning": config.planning.identity(),
        "data": data.manifest.identity(),
    }


def _computation(
    config: Config,
    plan: Plan,
    tokens: int | None,
    shapes: Callable[[], Sequence[AnyBatch]],
    steps: int,
    cluster: Cluster,
) -> TrainingSpec:
    """What a step computes, with `model.remat: auto` replaced.

    Args:
      config: with the policy in force.
      plan: of the steps.
      tokens: most of a micro-batch; None without a bound.
      shapes: gives those of the plan's micro-batches.
      steps: of the run.
      cluster: the processes.

    Raises:
      InputError: a step does not fit a device's memory.
    """
    model = resolved_model(
        model=config.model,
        parameters=config.parameters,
        optimizer=config.optimizer,
        mesh=config.mesh,
        planning=config.planning,
        tokens=tokens,
        shapes=shapes,
        cluster=cluster,
        folder=Path(config.run.folder),
    )
    if (budget := least_budget(model, cluster)) is not None:
        epoch = plan.epoch(0)
        require_fit(
            model=model,
            tokens=int((epoch.rows * epoch.padded_len).max()),
            budget=budget,
            parameters=config.parameters,
            optimizer=config.optimizer,
            mesh=config.mesh,
            replicas=replicas_of(config.mesh),
            single=config.planning.single_gradient,
        )
    return training_spec(
        model=model,
        optimizer=config.optimizer,
        objective=config.objective,
        parameters=config.parameters,
        steps=steps,
        step_weight=_step_weight(config.optimizer, config.objective, plan),
    )


def _step_weight(optimizer: OptimizerConfig, objective: Objective, plan: Plan) -> float | None:
    """The mean number of samples of a step; None where each step is divided by its own weight.

    Of the plan's: one that is left out counts like one that is found to be damaged.
    """
    by_token = getattr(objective, "weighting", "sample") == "token"
    if optimizer.gradient_mean == "step" or by_token:
        return None
    times = times_placed(plan.epoch(0))
    return float(times.sum()) / plan.steps_per_epoch


def _write_beginning(
    config: Config, whole: Config, manifest: Manifest, argv: Sequence[str], start: int
) -> None:
    """Writes to the run folder what continues the run, what samples need, and what it runs on."""
    folder = Path(config.run.folder)
    write_config(config, folder / "config.yaml")
    if whole.experts is not None:
        write_config(whole, Path(whole.run.folder) / "config.yaml")
    facts = {  # which `alload sample` needs of the data, wherever they go
        "vae_stride": list(manifest.vae_stride),
        "text_length": manifest.longest_text(),
        "origin": manifest.origin,
    }
    write_json(folder / "data.json", facts)
    append_environment(folder / "environment.json", list(argv), start)


def _begin(
    spec: TrainingSpec, mesh: Mesh, run: RunConfig, checkpoints: Checkpoints, start: int
) -> tuple[TrainState, Callable[[], TrainState], str]:
    """The state to train from, as `new_state` returns it, and in words where it comes from."""
    if start:
        source = f"checkpoint of step {start} in {run.folder}"
        restored = state_of_checkpoint(spec, mesh, run, checkpoints, start)
        state, state_to_train = restored, lambda: restored
    else:
        source = run.initial_weights or f"new, drawn with run.seed {run.seed}"
        state, state_to_train, lacking = new_state(spec, mesh, run, checkpoints)
        source += f"; {lacking}" if lacking else ""
    trained = describe_trained(state.params, state.frozen, spec.parameters)
    return state, state_to_train, f"{source}; {trained}" if trained else source


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


@waits("for programs to be compiled")
def _compile(
    title: str,
    count: int,
    compiled: Iterable[str],
    stop: StopRequest,
    progress: Callable[[], None],
) -> None:
    """Compiles programs until the run is asked to stop; `progress` is called after each."""
    with ProgressBar(title, count) as bar:
        for name in compiled:
            bar.advance(name)
            progress()
            if stop:
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
    folder: Path,
    loop: Loop,
    log: MetricsLog,
    evaluation: Evaluation,
    validating: Validating | None,
    figures: dict[str, float],
    began: float,
) -> None:
    """Draws the last samples, measures them and writes the summary."""
    loop.finish()
    seconds = time.monotonic() - began
    if not first_process():  # another host may not see the last lines of metrics.jsonl
        return
    measured = evaluation.figures | (validating.figures() if validating else {}) | figures
    summary = summarise(log.rows, loop.done, measured, peak_memory(), seconds)
    write_json(folder / "summary.json", summary)
    print_summary(summary, folder)
