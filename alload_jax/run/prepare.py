"""The samples and the plan of a run: reads the data and plans, and writes nothing."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from alload_jax.config import DataConfig, values_in
from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import Conditions, conditions_for, samples_for
from alload_jax.data.datasets import prepare_dataset
from alload_jax.data.loader import PatientReader
from alload_jax.data.manifest import Manifest, read_paths
from alload_jax.data.selection import SourceWeight, exclusion_identity, read_excluded, with_weights
from alload_jax.data.sources import SampleSource
from alload_jax.data.sources.grain_samples import GrainStream
from alload_jax.data.sources.opening import open_source
from alload_jax.data.store import StoreReader
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.cudnn import packed_unsupported_reason
from alload_jax.models.families import family_of
from alload_jax.planning.cost import CostFile
from alload_jax.planning.factory import Choice, RunLength, choose_policy, make_plan
from alload_jax.planning.policies import AUTO, find_policy
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig, policy_config
from alload_jax.planning.stream import StreamPlan, enough_samples
from alload_jax.sharding.mesh import can_group, local_plan_ranks, ranks_of, ranks_per_group
from alload_jax.training import RunConfig, ValidationConfig
from alload_jax.training.run_files import is_run
from alload_jax.training.run_plan import RunPlan, run_costs
from alload_jax.training.validator import HeldOut, split_data


class RunData(NamedTuple):
    """The samples of a run.

    Attributes:
      manifest: all samples of the data folder.
      training: those that the plan is made of.
      excluded: numbers of samples of the plan that are left out.
      weights: how often samples stand in an epoch.
      conditions: shape and dtype of their conditions, as the model takes them.
      held_out: samples of the validation; None without one.
      stream: the samples for training, if they are a stream.
    """

    manifest: Manifest
    training: SampleSource
    excluded: frozenset[int]
    weights: tuple[SourceWeight, ...]
    conditions: Conditions
    held_out: HeldOut | None
    stream: GrainStream | None


def read_data(
    data: DataConfig, validation: ValidationConfig, model: ModelConfig, cluster: Cluster
) -> RunData:
    """Opens the data folder, and holds out the samples of the validation.

    Raises:
      InputError: the data cannot be read or do not fit the model.
    """
    if data.dataset:
        cluster.broadcast(partial(prepare_dataset, data.folder, data.dataset))
    source = open_source(data.folder, data.source)
    source.require_settings()
    source.manifest.require(model.latent_channels, model.patch_size)
    stream = source if isinstance(source, GrainStream) else None
    if stream is not None:
        numbered = {"data.weights": data.weights, "data.exclude": data.exclude}
        _refuse_for_stream(numbered, "its samples have keys and no paths or numbers")
    excluded = read_excluded(data.exclude, source.manifest.sample_numbers)
    cluster.require_same(
        exclusion_identity(excluded), "give all processes the same file of samples"
    )
    training, validated, among_training = split_data(validation, source, data.source, excluded)
    for each, left_out in ((source, excluded), (validated, ())):
        if isinstance(each, StoreReader):
            each.require_shards(data.loader.max_bad_records, left_out)
    conditions = conditions_for(model, source.manifest)
    held_out = None
    if validated:
        held_out = HeldOut.of(validated, model, conditions, source.manifest)
    return RunData(
        source.manifest, training, among_training, data.weights, conditions, held_out, stream
    )


def plan_run(
    planning: PlanningConfig,
    model: ModelConfig,
    data: RunData,
    run: RunConfig,
    mesh: Mesh,
    cluster: Cluster,
) -> tuple[RunPlan, str]:
    """Plans the steps of a run on a mesh.

    Returns:
      The plan, with the policy in force, and why auto took it; "" if the config names it.

    Raises:
      InputError: a sample cannot be placed, or a bound is missing.
    """
    trained, costs, reason = data.training.manifest, run_costs(model, planning), ""
    paths, given = read_paths(trained), (ranks_of(mesh), run.seed, costs, ranks_per_group(mesh))

    def samples_of(policy: str) -> Samples:
        samples = samples_for(model, trained, data.conditions, find_policy(policy).packed)
        return with_weights(samples, data.weights, paths)

    if data.stream is None:
        planning, reason = _with_policy(planning, model, run, mesh, samples_of, costs)
        plan = make_plan(planning, samples_of(planning.policy), *given)
    else:
        planning = _of_stream(planning, run)
        m_mem, ranks = planning.required_m_mem(costs), planning.ranks or ranks_of(mesh)
        samples = enough_samples(samples_of(planning.policy), m_mem, ranks, planning.look_ahead)
        listed = make_plan(planning, samples, *given)
        plan = StreamPlan(samples, listed.policy, listed.topology, run.seed, data.stream)
    run_plan = RunPlan(
        plan=plan,
        planning=planning,
        cluster=cluster,
        costs=costs,
        model=model,
        excluded=data.excluded,
        manifest=trained,
    )
    return run_plan, reason


def _of_stream(planning: PlanningConfig, run: RunConfig) -> PlanningConfig:
    """The planning section of a stream."""
    unending = {"planning.recalibrate": planning.recalibrate, "run.epochs": run.epochs}
    _refuse_for_stream(unending, "it has no epochs")
    if planning.policy not in (AUTO, "balanced"):
        raise InputError(
            f"planning.policy is {planning.policy}, but data.source is a stream, which "
            "balanced alone plans; choose it"
        )
    return policy_config(planning, "balanced")


def _refuse_for_stream(settings: Mapping[str, object], why: str) -> None:
    for name, value in settings.items():
        if value:
            raise InputError(
                f"{name} is {value}, but data.source is a stream: {why}; leave {name} out"
            )


def _with_policy(
    planning: PlanningConfig,
    model: ModelConfig,
    run: RunConfig,
    mesh: Mesh,
    samples_of: Callable[[str], Samples],
    costs: CostFile,
) -> Choice:
    """The planning section with auto replaced; a run that is continued keeps its policy."""
    folder = Path(run.folder)
    if planning.policy != AUTO:
        return Choice(planning, "")
    before = values_in(folder / "config.yaml") if is_run(folder) else {}
    if (name := before.get("planning.policy", AUTO)) != AUTO:
        kept = policy_config(planning, name)
        mode = before.get("planning.ranks_mode")
        return Choice(dataclasses.replace(kept, ranks_mode=mode), "")
    return choose_policy(
        planning,
        samples_of,
        ranks_of(mesh),
        costs,
        packs=packs_rows(model, costs),
        independent=can_group(mesh),
        ranks_per_group=ranks_per_group(mesh),
        length=RunLength(run.epochs, run.steps or 0),
    )


def packs_rows(model: ModelConfig, costs: CostFile) -> bool:
    """Whether packed rows are worth it here: always by cuDNN, by Triton where it was measured."""
    if family_of(model).packing_unsupported_reason(model):
        return False
    return not packed_unsupported_reason() or costs.packed_ratio is not None


def make_collator(
    plan: RunPlan, data: RunData, model: ModelConfig, mesh: Mesh, seed: int
) -> Collator:
    """Reads and collates the samples of this process's ranks."""
    steps = plan.plan
    collation = collation_for(steps, data.training.manifest, model, data.conditions)
    ranks = local_plan_ranks(mesh, steps.topology.ranks, plan.planning.context_value)
    reader = PatientReader(data.training)
    dropout = data.training.manifest.dropout
    return Collator(
        reader, ranks, collation, steps.group_ranks, data.excluded, seed, dropout=dropout
    )
