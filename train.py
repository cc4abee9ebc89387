"""Train a video diffusion transformer: `python train.py --config configs/digits.yaml`.

Flags such as `--run.steps 200` override keys of the config; `--help` lists all keys. To continue a
stopped run, run the same command again. In a cluster, run the same command in every process
(docs/many-gpus.md).
"""

import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from alload_jax.config import (
    Config,
    read_config,
    run_steps,
    use_compilation_cache,
    values_in,
    values_of,
    with_policy,
    write_config,
)
from alload_jax.data.batch import describe
from alload_jax.data.collate import Collator
from alload_jax.data.collation import collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.datasets.dataset import prepare_dataset
from alload_jax.data.exclusion import exclusion_identity, read_excluded
from alload_jax.data.manifest import Manifest
from alload_jax.data.manifest_columns import read_paths
from alload_jax.data.patient_reading import PatientReader
from alload_jax.data.placement import place_ahead
from alload_jax.data.sources.opening import open_source
from alload_jax.data.weights import weights_identity, with_weights
from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.consensus import Consensus
from alload_jax.distributed.initialize import initialize
from alload_jax.encoders.devices import share_memory
from alload_jax.errors import InputError, run_command
from alload_jax.planning.cost import CostFile
from alload_jax.report.opening import Opening, changed_settings, show_opening
from alload_jax.report.summary import print_summary, read_summary, summarise
from alload_jax.sampling.samples import SampleWriter
from alload_jax.sharding.groups import group_meshes, plan_on
from alload_jax.sharding.mesh import local_plan_ranks, make_mesh
from alload_jax.sharding.xla_flags import set_xla_flags
from alload_jax.training.best import BestCheckpoints
from alload_jax.training.callbacks.callback import CallbackContext
from alload_jax.training.callbacks.checkpointing import Checkpointing
from alload_jax.training.callbacks.drawing import Drawing
from alload_jax.training.callbacks.evaluation import Evaluation
from alload_jax.training.callbacks.layer_log import LayerLog
from alload_jax.training.callbacks.telemetry import Telemetry
from alload_jax.training.callbacks.validating import Validating
from alload_jax.training.callbacks.watchdog import Watchdog
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.loop import Loop
from alload_jax.training.optimizer import learning_rate_schedule, make_optimizer
from alload_jax.training.parameters import describe_trained
from alload_jax.training.plan_costs import run_costs
from alload_jax.training.progress import ProgressBar
from alload_jax.training.quiet_threads import hush_threads, leave
from alload_jax.training.resume import after_loss, continue_with
from alload_jax.training.run_files import (
    BadRecords,
    MetricsLog,
    append_environment,
    peak_memory,
    write_json,
)
from alload_jax.training.run_lock import locked
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.shape_groups import make_trainer
from alload_jax.training.signals import StopRequest, stop_name
from alload_jax.training.start import Origin, new_state, state_of_checkpoint
from alload_jax.training.state import TrainingSpec
from alload_jax.training.trackers.tracker import TrackerContext, Trackers
from alload_jax.training.validation.held_out import HeldOut, split_data
from alload_jax.training.validation.validator import Validator


def main(argv: list[str]) -> int:
    """Runs the training that the command line asks for; returns the exit status."""
    set_xla_flags()
    config = read_config(argv)
    if config.sampling.encoders.vae:  # it decodes samples beside the model
        share_memory()
    with initialize(config.cluster) as cluster:
        config = with_policy(config)
        work = prepare(config, cluster)
        with locked(Path(config.run.folder), cluster):
            return train(config, cluster, work, argv)


def entry() -> None:
    """Runs `main` as a program: errors that a user can cause are one line and status 2."""
    hush_threads()
    leave(run_command(main, sys.argv[1:]))


class Work(NamedTuple):
    """What a run trains on, and where.

    Attributes:
      began: `time.monotonic()` of the start.
      manifest: the samples.
      mesh: the devices.
      groups: the mesh of each shape group; empty if all devices are one.
      costs: the cost model that plans the first step.
      run_plan: the plan.
      collator: reads and collates its steps.
      writer: draws samples.
      held_out: samples of the validation; None without one.
      identity: what a checkpoint of the run belongs to.
    """

    began: float
    manifest: Manifest
    mesh: Mesh
    groups: tuple[Mesh, ...]
    costs: CostFile
    run_plan: RunPlan
    collator: Collator
    writer: SampleWriter
    held_out: HeldOut | None
    identity: dict[str, Any]


def prepare(config: Config, cluster: Cluster) -> Work:
    """Reads the manifest and plans, without writing to the run folder."""
    began = time.monotonic()
    use_compilation_cache(config.run)
    folder = Path(config.run.folder)
    cluster.set_remedy(partial(after_loss, folder, config.cluster))
    cluster.require_same(values_of(config), "start all processes with the same config")

    # ---------------------------------------------------------------- data, devices, plan
    if config.data.dataset:
        cluster.broadcast(partial(prepare_dataset, config.data.folder, config.data.dataset))
    source = open_source(config.data.folder, config.data.source)
    source.require_settings()
    manifest = source.manifest
    manifest.require(config.model.latent_channels, config.model.patch_size)
    excluded = read_excluded(config.data.exclude, len(manifest))
    cluster.require_same(
        exclusion_identity(excluded), "give all processes the same file of samples"
    )
    data = split_data(config.validation, source, config.data.source, excluded)
    conditions = conditions_for(config.model, manifest)
    held_out = None
    if data.held_out:
        held_out = HeldOut.of(data.held_out, config.model, conditions, manifest)
    mesh = make_mesh(config.mesh)
    config.planning.refuse_foreign_costs(
        config.model.step_fields() | {"parameters": config.parameters.identity()},
        mesh.devices.flat[0].device_kind,
    )
    costs = run_costs(config.model, config.planning)
    trained = data.training.manifest
    samples = with_weights(
        trained.samples(config.model.patch_size), config.data.weights, read_paths(trained)
    )
    plan = plan_on(mesh, config.planning, samples, config.run.seed, costs)
    identity = {
        "validation": config.validation.identity(),
        "model": config.model.architecture(),
        "mixture": weights_identity(config.data.weights),
        "plan": plan.identity(),
        "parameters": config.parameters.identity(),
        "optimizer": config.optimizer.identity(),
        "planning": config.planning.identity(),
        "data": manifest.identity(),
    }
    cluster.require_same(
        identity["plan"] | identity["data"] | (held_out.identity() if held_out else {}),
        "give all processes the same data folder, code and packages",
    )
    cluster.require_shared("run.folder", folder)
    run_plan = RunPlan(
        *(plan, config.planning, cluster, costs, config.model, data.excluded),
        number=trained.number,
    )
    collation = collation_for(plan, trained, config.model, conditions)
    ranks = local_plan_ranks(mesh, plan.topology.ranks, config.planning.context_value)
    reader, seed = PatientReader(data.training), config.run.seed
    collator = Collator(reader, ranks, collation, plan.group_ranks, data.excluded, seed)
    groups = group_meshes(mesh, plan)
    writer = SampleWriter(
        folder / "samples",
        config.model,
        config.objective.timesteps,
        config.sampling,
        manifest,
        trained_null=getattr(config.objective, "condition_dropout", 0.0) > 0,
    )
    for evaluator in config.evaluators:
        evaluator.check(config.model, manifest)
    for tracker in config.trackers:
        tracker.check()
    return Work(
        *(began, manifest, mesh, groups, costs, run_plan, collator, writer, held_out, identity)
    )


def train(config: Config, cluster: Cluster, work: Work, argv: list[str]) -> int:
    """Trains, from the start or from where the run folder stands; returns the exit status."""
    folder = Path(config.run.folder)
    manifest, mesh, run_plan = work.manifest, work.mesh, work.run_plan
    collator, writer = work.collator, work.writer
    plan, collation = run_plan.plan, collator.collation

    # ---------------------------------------------------------------- state, new or restored
    total = run_steps(config.run, plan)
    spec = TrainingSpec(
        config.model,
        config.objective,
        make_optimizer(config.optimizer, total),
        config.optimizer.ema_decay,
        config.parameters,
        config.optimizer.accumulate_dtype,
    )
    origin = Origin(config.run.seed, config.run.initial_weights, config.run.initial_lora)
    tokens = config.planning.tokens_bound(work.costs)
    validator = None
    if work.held_out:
        validator = Validator(config.validation, spec, mesh, work.held_out, tokens)
    stop = StopRequest()
    remedy = partial(continue_with, folder, config.cluster)
    with (
        Watchdog(config.watchdog, folder, cluster, stop, remedy) as watchdog,
        Checkpoints(
            folder / "checkpoints", config.checkpoint, work.identity, config.model.later_fields
        ) as checkpoints,
        stop,
        cluster.report_failures(),
    ):
        start = checkpoints.continue_from(cluster)
        if start:
            checkpoints.check(start)
        summary = cluster.broadcast(partial(read_summary, folder, start))
        if summary and start >= total:
            print_summary(summary, folder)
            return 0
        if start:
            source = f"checkpoint of step {start} in {folder}"
            state = state_of_checkpoint(spec, mesh, origin, checkpoints, start)
            run_plan.restore(checkpoints.restore_recalibration(start))
        else:
            source = config.run.initial_weights or f"new, drawn with run.seed {config.run.seed}"
            state = new_state(spec, mesh, origin, checkpoints)
        trained = describe_trained(state.params, state.frozen, config.parameters)
        trainer = make_trainer(spec, mesh, state, work.groups)

        # ------------------------------------------------------------ run folder
        before = values_in(folder / "config.yaml") if start else {}
        show_opening(
            Opening(
                plan,
                config.planning.policy,
                tokens,
                config.planning.predictor(work.costs),
                total,
                start,
                f"{source}; {trained}" if trained else source,
                len(collator.excluded),
                validator.told() if validator else "",
            ),
            changed_settings(before, values_of(config)),
        )
        write_config(config, folder / "config.yaml")
        known = {
            "vae_stride": list(manifest.vae_stride),
            "text_length": manifest.longest_text(),
            "origin": manifest.origin,
        }
        write_json(folder / "data.json", known)  # for `alload sample`, wherever the data goes
        append_environment(folder / "environment.json", argv, start)

        # ------------------------------------------------------------ compilation
        missing = collation.shapes(plan) if start < total else []
        with ProgressBar("compiling", len(missing)) as bar:
            for shape in trainer.compile(missing):
                bar.advance(describe(shape))
                if stop:
                    break
        if validator and missing and not stop:
            with ProgressBar("compiling validation", len(validator.classes)) as bar:
                for name in validator.compile(state):
                    bar.advance(name)
                    if stop:
                        break

        # ------------------------------------------------------------ training
        log = MetricsLog(folder, resumed_at=start)
        tracker = Trackers(config.trackers, TrackerContext(folder, start, values_of(config)))
        evaluation = Evaluation(config.evaluators, writer, config.sampling.seed)
        bar = ProgressBar("training", total, start)
        checkpointing = Checkpointing(checkpoints, config.checkpoint, run_plan)
        best = BestCheckpoints(folder, config.checkpoint.keep_best, checkpoints, cluster)
        validating = []
        if validator:
            when = config.validation.every
            shown = (log, tracker, bar.say)
            validating = [Validating(validator, when, *shown, best, checkpointing.save)]
        callbacks = [
            watchdog,
            Telemetry(
                run_plan,
                learning_rate_schedule(config.optimizer, total),
                log,
                tracker,
                BadRecords(folder / "bad_records.txt", cluster),
                config.data.loader.max_bad_records,
                bar,
            ),
            LayerLog(folder, config.model, start),
            *validating,
            checkpointing,
            Drawing(writer, config.sampling.every, tracker, writer.progress(start)),
            *(each.make(CallbackContext(folder, stop)) for each in config.callbacks),
            evaluation,
        ]
        loop = Loop(trainer, start, total, callbacks)
        consensus = Consensus(cluster, mesh, lambda: stop.number, checkpointing.wants_save)
        stop_at = start if consensus.signal() else total
        with closing(run_plan.steps(start, stop_at, collator, config.data.loader)) as steps:
            loop.run(place_ahead(steps, mesh, groups=work.groups, consensus=consensus))
        stopped_by = consensus.signal()
    if loop.refusal:
        raise InputError(f"{loop.refusal} (saved at step {loop.done})")
    if stopped_by:
        done = f"saved step {loop.done} of {total}"
        print(f"{stop_name(stopped_by)}: {done}; {continue_with(folder, config.cluster)}")
        return config.run.status_when_stopped

    # ---------------------------------------------------------------- samples and summary
    loop.finish()
    seconds = time.monotonic() - work.began
    figures = evaluation.figures | (validating[0].figures() if validating else {})
    summary = summarise(log.rows, loop.done, figures, peak_memory(), seconds)
    write_json(folder / "summary.json", summary)
    print_summary(summary, folder)
    return 0


if __name__ == "__main__":
    entry()
