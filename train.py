"""Train a video diffusion transformer: `python train.py --config configs/digits.yaml`.

Any key of the config can follow on the command line, such as `--run.steps 200`; `--help` lists
them all. The same command again continues a run that was stopped. In a cluster it is the same
command in every process (docs/clusters.md).
"""

import signal
import sys
import time
from functools import partial
from pathlib import Path

from alload_jax.config import (
    Config,
    read_config,
    use_compilation_cache,
    values_of,
    with_policy,
    write_config,
)
from alload_jax.data.batch import describe
from alload_jax.data.collate import Collator
from alload_jax.data.collation import collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.datasets.digits import prepare_digits
from alload_jax.data.manifest import read_manifest
from alload_jax.data.placement import place_ahead
from alload_jax.data.source import PlanSource, StepLoader
from alload_jax.data.store import StoreReader
from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.consensus import Consensus
from alload_jax.distributed.initialize import initialize
from alload_jax.errors import InputError, run_command
from alload_jax.models.common.weights import initial_weights
from alload_jax.report.summary import print_summary, read_summary, summarise
from alload_jax.sampling.samples import SampleWriter
from alload_jax.sharding.groups import group_meshes, plan_on
from alload_jax.sharding.mesh import local_plan_ranks, make_mesh
from alload_jax.sharding.xla_flags import set_xla_flags
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.monitor import Monitor
from alload_jax.training.optimizer import learning_rate_schedule, make_optimizer
from alload_jax.training.progress import ProgressBar
from alload_jax.training.resume import after_loss, resume_command
from alload_jax.training.shape_groups import make_trainer
from alload_jax.training.signals import StopRequest
from alload_jax.training.state import abstract_state, init_state
from alload_jax.training.telemetry import (
    BadRecords,
    MetricsLog,
    append_environment,
    peak_memory,
    write_json,
)
from alload_jax.training.trainer import TrainingSpec


def main(argv: list[str]) -> int:
    """Runs the training that the command line asks for; returns the exit status."""
    set_xla_flags()
    config = read_config(argv)
    with initialize(config.cluster) as cluster:
        return train(with_policy(config), cluster, argv)


def train(config: Config, cluster: Cluster, argv: list[str]) -> int:
    """Trains, from the start or from where the run folder stands; returns the exit status."""
    began = time.monotonic()
    use_compilation_cache(config.run)
    folder = Path(config.run.folder)
    cluster.set_remedy(partial(after_loss, folder, config.cluster))
    cluster.require_same(values_of(config), "start all processes with the same config")

    # ---------------------------------------------------------------- data, devices, plan
    if config.data.digits:
        cluster.broadcast(partial(prepare_digits, config.data.folder, config.data.digits))
    manifest = read_manifest(config.data.folder)
    manifest.require(config.model.in_channels, config.model.patch_size)
    samples = manifest.samples(config.model.patch_size)
    mesh = make_mesh(config.mesh)
    config.planning.refuse_foreign_costs(
        config.model.step_fields(), mesh.devices.flat[0].device_kind
    )
    plan = plan_on(mesh, config.planning, samples, config.run.seed)
    identity = {"model": config.model.architecture(), "plan": plan.identity()}
    cluster.require_same(
        identity["plan"] | {"records": manifest.digest()},
        "give all processes the same data folder, code and packages",
    )
    cluster.require_shared("run.folder", folder)
    conditions = conditions_for(config.model, manifest)
    collation = collation_for(plan, manifest, config.model, conditions)
    ranks = local_plan_ranks(mesh, plan.topology.ranks, config.planning.context)
    groups = group_meshes(mesh, plan)
    collator = Collator(StoreReader(manifest), ranks, collation, plan.group_ranks)
    sampler = SampleWriter(
        folder / "samples", config.model, config.diffusion.timesteps, config.sampling, manifest
    )

    # ---------------------------------------------------------------- state, new or restored
    optimizer = make_optimizer(config.optimizer, config.run.steps)
    with (
        Checkpoints(folder / "checkpoints", config.checkpoint, identity) as checkpoints,
        StopRequest() as stop,
        cluster.report_failures(),
    ):
        start = cluster.broadcast(checkpoints.latest) or 0
        if start:
            checkpoints.check(start)
        summary = cluster.broadcast(partial(read_summary, folder, start))
        if summary and start >= config.run.steps:
            print_summary(summary, folder)
            return 0
        if start:
            print(f"continuing {folder} at step {start}")
            like = abstract_state(config.model, optimizer, mesh, config.run.seed)
            state = checkpoints.restore(start, like)
        else:
            weights = initial_weights(config.run.initial_weights, config.model, mesh)
            state = init_state(config.model, optimizer, mesh, config.run.seed, weights)
        recipe = TrainingSpec(config.model, config.diffusion, optimizer, config.optimizer)
        trainer = make_trainer(recipe, mesh, state, groups)

        # ------------------------------------------------------------ run folder
        write_config(config, folder / "config.yaml")
        known = {"vae_stride": list(manifest.vae_stride), "text_length": manifest.longest_text()}
        write_json(folder / "data.json", known)  # for `alload sample`, wherever the data goes
        append_environment(folder / "environment.json", argv, start)
        monitor = Monitor(
            plan,
            config.planning.predictor(),
            config.planning.seconds_per_split_token(),
            learning_rate_schedule(config.optimizer, config.run.steps),
            MetricsLog(folder, resumed_at=start),
            BadRecords(folder / "bad_records.txt", cluster),
            config.data.loader.max_bad_records,
        )

        # ------------------------------------------------------------ compilation
        missing = collation.shapes(plan) if start < config.run.steps else []
        with ProgressBar("compiling", len(missing)) as bar:
            for shape in trainer.compile(missing):
                bar.advance(describe(shape))
                if stop:
                    break

        # ------------------------------------------------------------ training
        done = start
        consensus = Consensus(cluster, mesh, lambda: stop.number)
        source = PlanSource(plan, start, start if consensus.signal() else config.run.steps)
        with (
            StepLoader(source, collator, config.data.loader) as loader,
            ProgressBar("training", config.run.steps, start) as bar,
            monitor.watching(bar),
        ):
            for step in place_ahead(loader, mesh, groups=groups, consensus=consensus):
                if step.signal or not monitor.accepts(step):
                    break
                monitor.note(step, trainer.step(step))
                done = step.number + 1
                if done == config.run.steps:
                    break
                if sampler.due(done):
                    with monitor.paused():
                        sampler.write(done, trainer.state.ema)
                if done % config.checkpoint.every == 0:
                    with monitor.paused():
                        checkpoints.save(done, trainer.state)
        checkpoints.save(done, trainer.state)
        stopped_by = consensus.signal()
    if monitor.refusal:
        raise InputError(f"{monitor.refusal} (saved at step {done})")
    if stopped_by:
        command = resume_command(folder, config.cluster)
        name = signal.Signals(stopped_by).name
        print(f"{name}: saved step {done} of {config.run.steps}; continue with: {command}")
        return config.run.status_when_stopped

    # ---------------------------------------------------------------- samples and summary
    sampler.write(done, trainer.state.ema)
    accuracy = sampler.digit_accuracy(trainer.state.ema) if config.data.digits else None
    seconds = time.monotonic() - began
    summary = summarise(monitor.rows, done, accuracy, peak_memory(), seconds)
    write_json(folder / "summary.json", summary)
    print_summary(summary, folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
