"""Steps of one policy on all devices of this host, measured in a process of its own.

`python -m alload_jax.bench.balance '{"model": {...}, ...}'` prints one line of JSON. Some steps of
the planned epoch are run twice over: as training runs them, and once more with each group of ranks
on its own, which shows how long each was busy. Latents and texts are random.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from alload_jax.bench.jax_step import model_config, out_of_memory
from alload_jax.bench.surroundings import surroundings
from alload_jax.bench.workload_step import RandomReader, drawn, manifest_of, representative
from alload_jax.data.batch import AnyBatch, signature
from alload_jax.data.collate import Collator
from alload_jax.data.condition import conditions_for
from alload_jax.data.layout import Layout, layout_for
from alload_jax.data.placement import PlacedStep, place_ahead
from alload_jax.models.config import DiTConfig
from alload_jax.planning.plan import Plan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.step_costs import micro_batch_costs, rank_costs
from alload_jax.sharding.groups import group_meshes, plan_on, split_mesh
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.objective import DiffusionConfig
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.shape_groups import GroupTrainer, make_trainer
from alload_jax.training.state import init_state
from alload_jax.training.trainer import Recipe, Trainer

_LR_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      model: fields of `DiTConfig`; `text` as a dict.
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
      alone: whether groups of ranks are measured on their own too.
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
    alone: bool = True

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


class Bench:
    """Runs chosen steps of a plan."""

    def __init__(self, model: DiTConfig, mesh: Mesh, plan: Plan, chosen: Sequence[int]):
        """Draws what the readers give out."""
        self._model, self._mesh, self._plan, self._chosen = model, mesh, plan, chosen
        manifest = manifest_of(plan.samples, model)
        conditions = conditions_for(model, manifest)
        self._reader: Any = RandomReader(manifest, conditions)
        self.layout: Layout = layout_for(plan, manifest, model, conditions)

    def whole_steps(self) -> tuple[list[float], dict[str, Any]]:
        """Seconds of each step as training runs it; programs and memory."""
        groups = group_meshes(self._mesh, self._plan)
        steps = self._placed(groups, self._plan.group_ranks)
        trainer = self._trainer(groups)
        compiled = _compile(trainer, steps)
        for step in steps:
            _wait(trainer.step(step))
        seconds = [_timed(lambda step=step: _wait(trainer.step(step))) for step in steps]
        return seconds, compiled | {"peak_bytes": _peaks()}

    def busy(self) -> list[list[float]]:
        """[steps][groups] seconds from a step's start until a group's gradient is done.

        A group is an index along `data`; ranks within one wait for each other.
        """
        groups = split_mesh(self._mesh)
        alike = self._plan.layout.ranks // len(groups)
        steps = self._placed(groups, alike)
        trainer = self._trainer(groups)
        assert isinstance(trainer, GroupTrainer)
        _compile(trainer, steps)
        with ThreadPoolExecutor(len(groups)) as pool:
            return [_busy(trainer, step, pool) for step in [*steps, *steps]][len(steps) :]

    def _placed(self, groups: Sequence[Mesh], group_ranks: int) -> list[PlacedStep]:
        ranks = frozenset(range(self._plan.layout.ranks))
        collate = Collator(self._reader, ranks, self.layout, group_ranks)
        steps = (collate(self._plan.step(number)) for number in self._chosen)
        return jax.block_until_ready(list(place_ahead(steps, self._mesh, groups=groups)))

    def _trainer(self, groups: Sequence[Mesh]) -> Trainer | GroupTrainer:
        config = OptimizerConfig()
        optimizer = make_optimizer(config, _LR_STEPS)
        state = init_state(self._model, optimizer, self._mesh, 0)
        recipe = Recipe(self._model, DiffusionConfig(), optimizer, config)
        return make_trainer(recipe, self._mesh, state, groups)


def _compile(trainer: Trainer | GroupTrainer, steps: Sequence[PlacedStep]) -> dict[str, Any]:
    """Compiles what the steps run; how many programs of micro-batches, and seconds."""
    shapes: dict[Any, AnyBatch] = {}
    for step in steps:
        for batch in step.batches:
            shapes[signature(batch)] = jax.tree.map(
                lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), batch
            )
    begin = time.perf_counter()
    list(trainer.compile(list(shapes.values())))
    return {"compiled": len(shapes), "compile_seconds": time.perf_counter() - begin}


def _busy(trainer: GroupTrainer, step: PlacedStep, pool: ThreadPoolExecutor) -> list[float]:
    begin = time.perf_counter()

    def until_done(sums: Any) -> float:
        jax.block_until_ready(sums)
        return time.perf_counter() - begin

    # The sums are given up by the update, which must wait for those who wait.
    waiting = list(pool.map(until_done, trainer.add(step).values()))
    _wait(trainer.finish())
    return waiting


def _wait(metrics: dict[str, jax.Array]) -> None:
    """Until a step is done.

    Raises:
      FloatingPointError: its loss is not finite.
    """
    loss = float(metrics["loss"])
    if not np.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")


def _timed(run: Any) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _peaks() -> list[int] | None:
    """Most bytes that each device has held."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return [found["peak_bytes_in_use"] for found in stats if found] or None


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of steps and of ranks, predicted and measured; or the error it ended in."""
    model, mesh = model_config(settings.model), settings.mesh()
    noted = surroundings(["jax", "jaxlib", "flax"]) | {"devices": jax.device_count()}
    plan, config = settings.plan(mesh)
    epoch, seq_len = plan.epoch(0), plan.samples.seq_len
    costs = micro_batch_costs(epoch, seq_len, config.predictor(), config.anchor_seconds())
    predicted = rank_costs(epoch, costs).max(axis=1)
    chosen = representative(range(epoch.steps), predicted, settings.steps)
    bench = Bench(model, mesh, plan, chosen)
    try:
        seconds, found = bench.whole_steps()
        busy = bench.busy() if settings.alone else None
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
            "programs": len(bench.layout.shapes(plan)),
            "predicted_epoch": float(predicted.sum()),
            "predicted": predicted[chosen].tolist(),
            "seconds": seconds,
            "busy": busy,
        }
    )


def main() -> None:
    """Measures what the first argument asks for."""
    print(json.dumps(measure(Settings(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
