"""Steps of one policy on all devices of this host, measured in a process of its own.

`python -m alload_jax.bench.balance '{"model": {...}, ...}'` prints one line of JSON. Some steps of
the planned epoch run as training runs them, under the profiler, which shows when each device
computed. Latents and texts are random.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from alload_jax.bench.device_trace import traced
from alload_jax.bench.provenance import provenance
from alload_jax.bench.step import out_of_memory, training_spec
from alload_jax.bench.weights import without_zeros
from alload_jax.bench.workload_step import RandomReader, drawn, manifest_of, representative
from alload_jax.data.batch import signature
from alload_jax.data.collate import Collator
from alload_jax.data.collation import collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.placement import PlacedStep, place_ahead
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields
from alload_jax.planning.digest import digest
from alload_jax.planning.plan import Plan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.step_costs import micro_batch_costs, rank_costs
from alload_jax.sharding.groups import group_meshes, plan_on
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.shape_groups import GroupTrainer, make_trainer
from alload_jax.training.state import init_state
from alload_jax.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      model: fields of the model's config; `text` as a dict.
      planning: fields of `PlanningConfig`.
      workload: named; or None for samples of one shape.
      samples: of the epoch that is planned.
      one_aspect: 16:9 alone, so that bucketed policies have few shapes to compile.
      steps: of the epoch that are run.
      shape: (frames, height, width) in pixels of all samples, without a workload.
      longest: tokens of a sample; longer ones are left out. None for all.
      split: whether ranks are context groups: of all devices, if `context` does not say.
      context: ranks of a group.
      fsdp: devices that share the parameters.
      measured: the case that each plan was measured for, by its digest; not measured again.
    """

    model: dict[str, Any]
    planning: dict[str, Any]
    workload: str | None
    samples: int
    one_aspect: bool
    steps: int
    shape: tuple[int, int, int] | None = None
    longest: int | None = None
    split: bool = False
    context: int | None = None
    fsdp: int = 1
    measured: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def mesh(self) -> Mesh:
        """Over all devices."""
        context = (self.context or jax.device_count()) if self.split else 1
        return make_mesh(MeshConfig(context=context, fsdp=self.fsdp))

    def plan(self, mesh: Mesh) -> tuple[Plan, PlanningConfig]:
        """The epoch's plan, and its settings."""
        samples = drawn(self.workload, self.shape, self.samples, self.one_aspect)
        if self.longest:
            kept = samples.seq_len <= self.longest
            samples = Samples(samples.shape[kept], samples.seq_len[kept])
        config = PlanningConfig(**self.planning, context=mesh.shape["context"])
        return plan_on(mesh, config, samples, seed=0), config


def run_steps(model: ModelConfig, mesh: Mesh, plan: Plan, chosen: Sequence[int]) -> dict[str, Any]:
    """Runs chosen steps of a plan.

    Returns:
      the fields of `Traced`; programs of the plan, and those that the steps needed with the
      seconds to compile them; the most bytes that each device held.

    Raises:
      FloatingPointError: the loss of a step is not finite.
    """
    groups = group_meshes(mesh, plan)
    steps, programs = _placed_steps(model, mesh, plan, chosen, groups)
    trainer = _trainer(model, mesh, groups)

    def run(step: PlacedStep) -> None:
        loss = float(trainer.step(step)["loss"])
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")

    begin = time.perf_counter()
    shapes = {signature(batch): batch for step in steps for batch in step.batches}
    list(trainer.compile(list(shapes.values())))
    compile_seconds = time.perf_counter() - begin
    for step in _unlike(steps):
        run(step)
    return traced([partial(run, step) for step in steps])._asdict() | {
        "programs": programs,
        "compiled": len(shapes),
        "compile_seconds": compile_seconds,
        "peak_bytes": _peaks(),
    }


def _placed_steps(
    model: ModelConfig, mesh: Mesh, plan: Plan, chosen: Sequence[int], groups: Sequence[Mesh]
) -> tuple[list[PlacedStep], int]:
    """The steps' arrays on the devices; how many programs the whole plan has."""
    manifest = manifest_of(plan.samples, model)
    conditions = conditions_for(model, manifest)
    collation = collation_for(plan, manifest, model, conditions)
    reader: Any = RandomReader(manifest, conditions)
    collate = Collator(reader, frozenset(range(plan.topology.ranks)), collation, plan.group_ranks)
    placed = place_ahead((collate(plan.step(number)) for number in chosen), mesh, groups=groups)
    return jax.block_until_ready(list(placed)), len(collation.shapes(plan))


def _trainer(model: ModelConfig, mesh: Mesh, groups: Sequence[Mesh]) -> Trainer | GroupTrainer:
    spec = training_spec(model)
    return make_trainer(spec, mesh, without_zeros(init_state(spec, mesh, 0)), groups)


def _unlike(steps: Sequence[PlacedStep]) -> Iterator[PlacedStep]:
    """Steps of which each runs a program, for a group, that none before it runs."""
    seen: set[Any] = set()
    for step in steps:
        groups = step.groups or (0,) * len(step.batches)
        runs = {*zip(groups, map(signature, step.batches), strict=True)}
        if runs - seen:
            seen |= runs
            yield step


def _digest(plan: Plan, mesh: Mesh) -> str:
    """The same for plans whose first epochs run the same programs on the same samples."""
    epoch, packing = plan.epoch(0), plan.epoch(0).packing
    columns = [epoch.step, epoch.micro_batch, epoch.rank, epoch.rows, epoch.offsets, epoch.sample]
    if packing:
        columns += [packing.offset, packing.tokens, packing.split_tokens]
        columns += [np.asarray([packing.segments, *packing.split_sizes])]
    return digest(np.asarray([*mesh.shape.values(), plan.group_ranks]), *columns)


def _peaks() -> list[int] | None:
    """Most bytes that each device has held."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return [found["peak_bytes_in_use"] for found in stats if found] or None


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of steps and of ranks, predicted and measured; or the error it ended in."""
    model, mesh = config_from_fields(settings.model), settings.mesh()
    noted = provenance(["jax", "jaxlib", "flax"]) | {"devices": jax.device_count()}
    plan, config = settings.plan(mesh)
    known_by = _digest(plan, mesh)
    if known_by in settings.measured:
        return noted | {"same_as": settings.measured[known_by]}
    epoch, seq_len = plan.epoch(0), plan.samples.seq_len
    costs = micro_batch_costs(epoch, seq_len, config.predictor(), config.seconds_per_split_token())
    predicted = rank_costs(epoch, costs).max(axis=1)
    chosen = representative(range(epoch.steps), predicted, settings.steps)
    try:
        found = run_steps(model, mesh, plan, chosen)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return noted | {"error": "out of memory"}
    return (
        noted
        | found
        | {
            "mesh": dict(mesh.shape),
            "samples": len(plan.samples),
            "tokens": int(seq_len.sum()),
            "steps": epoch.steps,
            "digest": known_by,
            "predicted_epoch": float(predicted.sum()),
            "predicted": predicted[chosen].tolist(),
        }
    )


def main() -> None:
    """Measures what the first argument asks for."""
    print(json.dumps(measure(Settings(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
