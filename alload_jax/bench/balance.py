"""Measures training steps of one policy on all devices of this host.

Some steps of the planned epoch run with the training code under the profiler, which records when
each device computes. Latents and texts are random.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from alload_jax.bench.harness import provenance
from alload_jax.bench.trace import device_seconds, recorded
from alload_jax.data.batch import signature
from alload_jax.data.collate import Collation, Collator, collation_for
from alload_jax.data.condition import Conditions, conditions_for, form_for
from alload_jax.data.loader import PlacedStep, place_ahead
from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, TEXT
from alload_jax.errors import InputError, out_of_memory
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields
from alload_jax.planning.architecture import LABEL_TOKENS, from_fields
from alload_jax.planning.cost import micro_batch_costs, rank_costs
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.plan import Plan
from alload_jax.planning.samples import Geometry, Samples, digest
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import ASPECT_RATIOS, make_workload
from alload_jax.sharding.mesh import MeshConfig, group_meshes, make_mesh, ranks_of, ranks_per_group
from alload_jax.training.state import init_state
from alload_jax.training.trainer import Trainer
from alload_jax.training.trial_step import training_spec, without_zeros

# ---------------------------------------------------------------- random samples


def draw_samples(
    workload: str | None, shape: Sequence[int] | None, count: int, one_aspect: bool
) -> Samples:
    """Draws samples of a named workload, or makes samples of one shape.

    Args:
      workload: name of a workload, or None.
      shape: (frames, height, width) in pixels of every sample; used without a workload.
      count: number of samples.
      one_aspect: draw only 16:9 samples.
    """
    if workload:
        ratios = {(16, 9): 1.0} if one_aspect else ASPECT_RATIOS
        return make_workload(workload, count, aspect_ratios=ratios)
    same = np.tile(np.asarray(shape, np.int64), (count, 1))
    geometry = Geometry()
    if (geometry.latent_grid(*same[:1].T) % geometry.patch_size).any():
        given = " ".join(map(str, same[0]))
        raise InputError(f"--same {given}: is no whole tokens; give multiples of 16 pixels")
    return Samples(same, geometry.seq_len(*same.T))


class RandomReader:
    """Replaces `StoreReader`: the arrays of every record are parts of one random array."""

    def __init__(self, manifest: Manifest, conditions: Conditions):
        """Draws a random array of the size of the largest sample."""
        self.manifest = manifest
        rng = np.random.default_rng(0)
        shapes = np.unique(manifest.shape, axis=0)
        largest = max(math.prod(manifest.latent_shape(tuple(shape))) for shape in shapes)
        self._latents = rng.standard_normal(largest, np.float32)
        self._condition: dict[str, np.ndarray] = {LABELS: np.zeros(1, np.int32)}
        if conditions.text_dim is not None:
            text = rng.standard_normal((conditions.length, conditions.text_dim), np.float32)
            self._condition = {TEXT: text.astype(conditions.dtype)}
        for part in conditions.parts:
            tokens = rng.standard_normal((part.length, part.width), np.float32)
            self._condition[part.name] = tokens.astype(conditions.dtype)
        if (image := conditions.image()) is not None:
            self._condition[IMAGE] = rng.standard_normal(image.shape, np.float32)

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Random latents of the sample's shape and a random condition."""
        shape = self.manifest.latent_shape(tuple(self.manifest.shape[sample]))
        arrays = {LATENTS: self._latents[: math.prod(shape)].reshape(shape)} | self._condition
        if channels := self.manifest.form.given_channels:
            arrays[GIVEN] = np.zeros((*shape[:3], channels), np.float32)
        return arrays


def manifest_of(samples: Samples, model: ModelConfig) -> Manifest:
    """A manifest of the samples, without files on disk."""
    count, none = len(samples), np.zeros(len(samples), np.int64)
    form = form_for(model)
    # All tokens of each further kind of condition, for each sample.
    lengths = {part.name: part.length for part in model.condition_parts()}
    further = np.asarray([lengths[name] for name, _ in form.parts], np.int32)
    return Manifest(
        path=Path("random"),
        shard=np.full(count, "random", object),
        index=none,
        shape=samples.shape,
        channels=np.full(count, model.latent_channels),
        text_length=np.full(count, model.text.length if model.text else LABEL_TOKENS),
        checksum=none,
        vae_stride=Geometry().vae_stride,
        form=form,
        shard_bytes={},
        origin={},
        part_lengths=np.tile(further, (count, 1)) if form.parts else None,
    )


def random_collator(plan: Plan, model: ModelConfig) -> tuple[Collator, Collation]:
    """Makes the arrays of a plan's steps from random latents and conditions; and their shapes."""
    manifest = manifest_of(plan.samples, model)
    conditions = conditions_for(model, manifest)
    reader: Any = RandomReader(manifest, conditions)
    collation = collation_for(plan, manifest, model, conditions)
    ranks = frozenset(range(plan.topology.ranks))
    return Collator(reader, ranks, collation, plan.group_ranks), collation


def representative(steps: Sequence[int], cost: np.ndarray, most: int) -> list[int]:
    """Chooses steps that represent the distribution of cost: one from each of `most` quantiles.

    Args:
      steps: steps of an epoch to choose from.
      cost: [steps of the epoch] cost of every step, or the part of it that differs between steps.
      most: maximum number of steps to choose.
    """
    if len(steps) <= most:
        return list(steps)
    order = np.asarray(steps)[np.argsort(cost[list(steps)], kind="stable")]
    middles = (np.arange(most) + 0.5) * len(steps) / most
    return order[middles.astype(int)].tolist()


# ---------------------------------------------------------------- steps on all devices


def run_steps(
    model: ModelConfig, mesh: Mesh, plan: Plan, chosen: Sequence[int], repeats: int = 1
) -> Json:
    """Runs the chosen steps of a plan.

    Returns:
      Means over the repeats: `seconds` of each step from dispatch until its results are ready, and
      `busy` and `exposed` as `device_seconds` has them, None if the profiler shows no GPU;
      `rounds`, the seconds of the steps in each repeat; `programs`, the number of programs of the
      plan; `compiled`, the number of programs that these steps need, and `compile_seconds`, the
      time to compile them, None with a compilation cache, which may hold some; `peak_bytes` of each
      device, None where devices do not report it.

    Raises:
      FloatingPointError: the loss of a step is not finite.
    """
    groups, (collate, collation) = group_meshes(mesh, plan), random_collator(plan, model)
    placed = place_ahead((collate(plan.step(number)) for number in chosen), mesh, groups=groups)
    steps = jax.block_until_ready(list(placed))
    spec = training_spec(model)
    trainer = Trainer(spec, mesh, without_zeros(init_state(spec, mesh, 0)), groups)

    def run(step: PlacedStep) -> None:
        loss = float(trainer.step(step)["loss"])
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")

    begin = time.perf_counter()
    shapes = {signature(batch): batch for step in steps for batch in step.batches}
    list(trainer.compile(list(shapes.values())))
    cached = jax.config.values["jax_compilation_cache_dir"]
    compile_seconds = None if cached else time.perf_counter() - begin
    warm: set[object] = set()
    for step in steps:  # those that run a program that no earlier step has run
        groups_of = step.groups or (0,) * len(step.batches)
        programs_of = {*zip(groups_of, map(signature, step.batches), strict=True)}
        if programs_of - warm:
            warm |= programs_of
            run(step)
    seconds, profile = recorded([partial(run, step) for _ in range(repeats) for step in steps])
    rounds = np.reshape(seconds, (repeats, len(steps)))
    found = {"seconds": rounds.mean(axis=0).tolist(), "busy": None, "exposed": None}
    for name, value in zip(("busy", "exposed"), device_seconds(profile) or (), strict=False):
        by_round = np.reshape(value, (repeats, len(steps), -1))
        found[name] = by_round.mean(axis=0).tolist()
    stats = [device.memory_stats() for device in jax.local_devices()]
    return found | {
        "rounds": rounds.tolist(),
        "programs": len(collation.shapes(plan)),
        "compiled": len(shapes),
        "compile_seconds": compile_seconds,
        "peak_bytes": [each["peak_bytes_in_use"] for each in stats if each] or None,
    }


def _digest(plan: Plan, mesh: Mesh) -> str:
    """A digest that is equal if the first epochs run the same programs on the same samples."""
    epoch, packing = plan.epoch(0), plan.epoch(0).packing
    columns = [epoch.step, epoch.micro_batch, epoch.rank, epoch.rows, epoch.offsets, epoch.sample]
    if packing:
        columns += [packing.offset, packing.tokens, packing.split_tokens]
        columns += [np.asarray([packing.segments, *packing.split_sizes])]
    return digest(np.asarray([*mesh.shape.values(), plan.group_ranks]), *columns)


def measure(
    *,
    model: Json,
    planning: Json,
    workload: str | None,
    samples: int,
    one_aspect: bool,
    steps: int,
    repeats: int = 1,
    shape: Sequence[int] | None = None,
    longest: int | None = None,
    split: bool = False,
    context: int | None = None,
    fsdp: int = 1,
    measured: Mapping[str, str] | None = None,
) -> Json:
    """Predicted and measured seconds of the steps; or the error that ended the measurement.

    Args:
      model: fields of the model's config; `text` as a dict.
      planning: fields of `PlanningConfig`.
      workload, shape, samples, one_aspect: see `draw_samples`.
      steps: number of steps of the epoch to run.
      repeats: how often these steps are run.
      longest: maximum tokens of a sample; longer samples are excluded. None for no maximum.
      split: whether the devices form context groups that split samples.
      context: devices of a context group; None for all devices.
      fsdp: number of devices that shard the parameters.
      measured: digest of a plan → the case that was already measured with this plan. Such a plan
        is not measured again.
    """
    group = (context or jax.device_count()) if split else 1
    mesh = make_mesh(MeshConfig(context=group, fsdp=fsdp))
    drawn = draw_samples(workload, shape, samples, one_aspect)
    if longest:
        kept = drawn.seq_len <= longest
        if not kept.any():
            shortest = int(drawn.seq_len.min())
            raise InputError(f"--longest {longest}: the shortest sample has {shortest:,} tokens")
        drawn = Samples(drawn.shape[kept], drawn.seq_len[kept])
    trained = config_from_fields(model)
    if trained.joint_attention:  # the lengths that samples have in the model's rows
        conditions = conditions_for(trained, manifest_of(drawn, trained))
        drawn = replace(drawn, seq_len=drawn.seq_len + conditions.length)
    config = PlanningConfig(**planning, context=mesh.shape["context"])
    recorded = provenance(["jax", "jaxlib", "flax"]) | {"devices": jax.device_count()}
    plan = make_plan(config, drawn, ranks_of(mesh), 0, ranks_per_group=ranks_per_group(mesh))
    plan_digest = _digest(plan, mesh)
    if measured and plan_digest in measured:
        return recorded | {"same_as": measured[plan_digest]}
    epoch, seq_len = plan.epoch(0), plan.samples.seq_len
    costs = micro_batch_costs(epoch, config.predictor())
    predicted = rank_costs(epoch, costs).max(axis=1)
    metrics = plan_metrics(epoch, config.predictor(), config.m_mem)
    chosen = representative(range(epoch.steps), predicted, steps)
    try:
        found = run_steps(trained, mesh, plan, chosen, repeats)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return recorded | {"error": "out of memory"}
    return (
        recorded
        | found
        | {
            "mesh": dict(mesh.shape),
            "samples": len(plan.samples),
            "tokens": int(seq_len.sum()),
            "flops": from_fields(trained.architecture()).step_flops(seq_len),
            "padding": metrics.padding,
            "steps": epoch.steps,
            "digest": plan_digest,
            # Of an epoch that places all samples: packed plans leave some to the next one.
            "predicted_epoch": float(seq_len.sum() / metrics.tokens_per_second),
            "predicted_imbalance": metrics.imbalance,
            "row_tokens": int(epoch.padded_len.max()),
            "predicted": predicted[chosen].tolist(),
        }
    )
