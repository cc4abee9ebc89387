"""What a run trains on, and where: reads the data, plans, and places nothing on devices yet."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from alload_jax.config import (
    Config,
    use_compilation_cache,
    values_in,
    values_of,
)
from alload_jax.data.collate import Collator
from alload_jax.data.collation import collation_for
from alload_jax.data.condition import conditions_for, samples_for
from alload_jax.data.datasets.dataset import prepare_dataset
from alload_jax.data.exclusion import exclusion_identity, read_excluded
from alload_jax.data.manifest import Manifest
from alload_jax.data.manifest_columns import read_paths
from alload_jax.data.patient_reading import PatientReader
from alload_jax.data.sources.opening import open_source
from alload_jax.data.sources.source import SampleSource
from alload_jax.data.store import StoreReader
from alload_jax.data.weights import weights_identity, with_weights
from alload_jax.distributed.cluster import Cluster
from alload_jax.models.families import family_of
from alload_jax.planning.cost import CostFile
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.registry import AUTO, find_policy
from alload_jax.planning.portfolio import Choice, RunLength, choose_policy
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import policy_config
from alload_jax.sampling.samples import SampleWriter
from alload_jax.sharding.groups import can_group, group_meshes, plan_on, ranks_per_group
from alload_jax.sharding.mesh import local_plan_ranks, make_mesh, ranks_of
from alload_jax.training.plan_costs import run_costs
from alload_jax.training.restore import CHECKPOINTS
from alload_jax.training.resume import after_loss
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.validation.held_out import HeldOut, SplitData, split_data


class Work(NamedTuple):
    """What a run trains on, and where.

    Attributes:
      config: the config, with the policy in force.
      policy_reason: why auto took it; "" if the config names it.
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

    config: Config
    policy_reason: str
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

    # ---------------------------------------------------------------- data
    source, data = _read_data(config, cluster)
    manifest, trained = source.manifest, data.training.manifest
    conditions = conditions_for(config.model, manifest)
    held_out = None
    if data.held_out:
        held_out = HeldOut.of(data.held_out, config.model, conditions, manifest)

    # ---------------------------------------------------------------- devices, plan
    mesh = make_mesh(config.mesh)
    config.planning.refuse_foreign_costs(
        config.model.step_fields() | {"parameters": config.parameters.identity()},
        mesh.devices.flat[0].device_kind,
    )
    costs = run_costs(config.model, config.planning)
    paths = read_paths(trained)

    def samples_of(policy: str) -> Samples:
        found = samples_for(config.model, trained, conditions, find_policy(policy).packed)
        return with_weights(found, config.data.weights, paths)

    planning, reason = _with_policy(config, mesh, samples_of, costs)
    config = dataclasses.replace(config, planning=planning)
    samples = samples_of(planning.policy)
    plan = plan_on(mesh, config.planning, samples, config.run.seed, costs)
    identity = _identity(config, manifest, plan)
    cluster.require_same(
        identity["plan"] | identity["data"] | (held_out.identity() if held_out else {}),
        "give all processes the same data folder, code and packages",
    )
    cluster.require_shared("run.folder", folder)
    run_plan = RunPlan(
        *(plan, config.planning, cluster, costs, config.model, data.excluded),
        number=trained.number,
    )

    # ---------------------------------------------------------------- reading, drawing
    collation = collation_for(plan, trained, config.model, conditions)
    ranks = local_plan_ranks(mesh, plan.topology.ranks, config.planning.context_value)
    reader, seed = PatientReader(data.training), config.run.seed
    collator = Collator(reader, ranks, collation, plan.group_ranks, data.excluded, seed)
    writer = _sample_writer(config, manifest)
    for evaluator in config.evaluators:
        evaluator.check(config.model, manifest)
    for tracker in config.trackers:
        tracker.check()
    groups = group_meshes(mesh, plan)
    return Work(
        *(config, reason, began, manifest, mesh, groups, costs, run_plan, collator, writer),
        *(held_out, identity),
    )


def _with_policy(
    config: Config, mesh: Mesh, samples_of: Callable[[str], Samples], costs: CostFile
) -> Choice:
    """The planning section with auto replaced; a run that is continued keeps its policy."""
    planning, folder = config.planning, Path(config.run.folder)
    if planning.policy != AUTO:
        return Choice(planning, "")
    before = values_in(folder / "config.yaml") if (folder / CHECKPOINTS).is_dir() else {}
    if (name := before.get("planning.policy", AUTO)) != AUTO:
        kept = policy_config(planning, name)
        mode = before.get("planning.ranks_mode")
        return Choice(dataclasses.replace(kept, ranks_mode=mode), "")
    packs = not family_of(config.model).packing_unsupported_reason(config.model)
    run, ranks, group = config.run, ranks_of(mesh), ranks_per_group(mesh)
    length = RunLength(run.epochs, run.steps or 0)
    return choose_policy(
        *(planning, samples_of, ranks, costs),
        packs=packs,
        independent=can_group(mesh),
        ranks_per_group=group,
        length=length,
    )


def _read_data(config: Config, cluster: Cluster) -> tuple[SampleSource, SplitData]:
    """The samples of the data folder, and those to train and to validate on."""
    if config.data.dataset:
        cluster.broadcast(partial(prepare_dataset, config.data.folder, config.data.dataset))
    source = open_source(config.data.folder, config.data.source)
    source.require_settings()
    if isinstance(source, StoreReader):
        source.require_shards(config.data.loader.max_bad_records)
    source.manifest.require(config.model.latent_channels, config.model.patch_size)
    excluded = read_excluded(config.data.exclude, len(source.manifest))
    cluster.require_same(
        exclusion_identity(excluded), "give all processes the same file of samples"
    )
    return source, split_data(config.validation, source, config.data.source, excluded)


def _identity(config: Config, manifest: Manifest, plan: Plan) -> dict[str, Any]:
    """What a checkpoint of the run belongs to."""
    return {
        "validation": config.validation.identity(),
        "model": config.model.architecture(),
        "mixture": weights_identity(config.data.weights),
        "plan": plan.identity(),
        "parameters": config.parameters.identity(),
        "optimizer": config.optimizer.identity(),
        "planning": config.planning.identity(),
        "data": manifest.identity(),
    }


def _sample_writer(config: Config, manifest: Manifest) -> SampleWriter:
    return SampleWriter(
        Path(config.run.folder) / "samples",
        config.model,
        config.objective.timesteps,
        config.sampling,
        manifest,
        trained_null=getattr(config.objective, "condition_dropout", 0.0) > 0,
    )
