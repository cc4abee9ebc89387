"""Measures training steps of a workload under several policies, in a separate process.

Plan, collation and compiled programs are those of training. Latents and texts are random.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from alload_jax.bench.harness import provenance
from alload_jax.data.batch import AnyBatch, Signature, describe, signature
from alload_jax.data.collate import Collation, Collator, collation_for
from alload_jax.data.condition import Conditions, conditions_for, form_for
from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, TEXT
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields
from alload_jax.planning.architecture import LABEL_TOKENS, Architecture, from_fields
from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import Plan
from alload_jax.planning.samples import Geometry, Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import ASPECT_RATIOS, make_workload
from alload_jax.training.device_memory import out_of_memory
from alload_jax.training.run_files import peak_memory
from alload_jax.training.trial_step import Step, training_spec


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
    return Samples(same, Geometry().seq_len(*same.T))


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


class Measured(NamedTuple):
    """Times of the steps of one program.

    Attributes:
      name: description of the program.
      seconds: time of each timed step.
      squares: of each timed step, the sum over its samples of squared tokens. Nothing else differs
        between the steps of one program.
    """

    name: str
    seconds: list[float]
    squares: list[float]

    def mean_seconds(self, squares: np.ndarray) -> float:
        """Mean seconds of all steps of the program, from the timed steps.

        A line over the squares is fitted to the timed steps, because their mean square can differ
        from that of all steps.

        Args:
          squares: [steps] sums of squared tokens of all steps of the program.
        """
        if np.ptp(self.squares) <= _MIN_RELATIVE_RANGE * np.mean(self.squares):
            return statistics.fmean(self.seconds)
        slope, _ = np.polyfit(self.squares, self.seconds, 1)
        beyond = float(np.mean(squares) - np.mean(self.squares))
        return statistics.fmean(self.seconds) + float(slope) * beyond


_MIN_RELATIVE_RANGE = 0.01
"""Minimum range of squares, relative to their mean, over which a line is fitted."""


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


def programs_of(plan: Plan) -> list[list[int]]:
    """Groups the steps of an epoch by program, that is by the shape of their micro-batches."""
    epoch = plan.epoch(0)
    kinds = np.column_stack([epoch.rows, epoch.padded_len, epoch.shape])
    _, kind = np.unique(kinds, axis=0, return_inverse=True)
    return [epoch.step[kind == number].tolist() for number in range(kind.max() + 1)]


def measure(
    *,
    model: Json,
    plannings: list[Json],
    workload: str | None,
    shape: Sequence[int] | None,
    samples: int,
    one_aspect: bool,
    steps: int,
) -> Json:
    """Throughput and peak memory of each policy; or the error that ended the measurement.

    Args:
      model: fields of the model's config; `text` as a dict.
      plannings: fields of `PlanningConfig`, for each policy.
      workload, shape, samples, one_aspect: see `draw_samples`.
      steps: number of steps to time if all steps run one program; otherwise one step of each
        program is timed.
    """
    settings = dict(locals())
    config = config_from_fields(model)
    drawn = draw_samples(workload, shape, samples, one_aspect)
    if config.joint_attention:  # the lengths that samples have in the model's rows
        conditions = conditions_for(config, manifest_of(drawn, config))
        drawn = dataclasses.replace(drawn, seq_len=drawn.seq_len + conditions.length)
    recorded = provenance(["jax", "jaxlib", "flax"]) | {
        "settings": settings,
        "samples": len(drawn),
        "tokens": int(drawn.seq_len.sum()),
    }
    plans = [make_plan(PlanningConfig(**planning), drawn, 1, 0) for planning in plannings]
    runner = _Runner(config)
    try:
        cases = [runner.measure(plan, steps) for plan in plans]
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return recorded | {"error": "out of memory"}
    return recorded | {
        "peak_bytes": peak_memory(),
        "cases": [
            {"policy": planning["policy"], "planning": planning} | case
            for planning, case in zip(plannings, cases, strict=True)
        ],
    }


def random_collator(plan: Plan, model: ModelConfig) -> tuple[Collator, Collation]:
    """Makes the arrays of a plan's steps from random latents and conditions; and their shapes."""
    manifest = manifest_of(plan.samples, model)
    conditions = conditions_for(model, manifest)
    collation = collation_for(plan, manifest, model, conditions)
    reader: Any = RandomReader(manifest, conditions)
    ranks = frozenset(range(plan.topology.ranks))
    return Collator(reader, ranks, collation, plan.group_ranks), collation


class _Runner:
    """Compiles and runs the steps of plans for the same samples; each program is timed once."""

    def __init__(self, model: ModelConfig):
        self._model = model
        self._architecture = from_fields(model.architecture())
        self._step = step = Step(training_spec(model))
        step.update = step.update.lower(step.state, step.accumulator).compile()
        self._programs: dict[Signature, Compiled] = {}
        self._measured: dict[Signature, Measured] = {}

    def measure(self, plan: Plan, most: int) -> Json:
        """Measures a plan's epoch by timing at most `most` steps of each program."""
        collate, collation = random_collator(plan, self._model)

        def placed(number: int) -> AnyBatch:
            (batch,) = collate(plan.step(number)).batches
            return jax.block_until_ready(jax.tree.map(jnp.asarray, batch))

        def run(batch: AnyBatch) -> float:
            return self._step.run(self._programs[signature(batch)], batch)

        begin = time.perf_counter()
        shapes = collation.shapes(plan)
        missing = [shape for shape in shapes if signature(shape) not in self._programs]
        # Fewer workers than cores because XLA compiles one program on several cores already.
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            programs = pool.map(self._step.compile_for, missing)
            self._programs.update(zip(map(signature, missing), programs, strict=True))
        compiled = time.perf_counter() - begin
        counted = []
        # Of the tokens of each step's samples, on which attention's cost depends: [steps].
        epoch = plan.epoch(0)
        tokens = epoch.part_tokens().astype(np.float64)
        squares = np.bincount(epoch.step[epoch.micro_batch_of_part()], tokens**2, epoch.steps)
        by_program = programs_of(plan)
        for steps in by_program:
            first = placed(steps[0])
            key = signature(first)
            if key not in self._measured:
                run(first)
                chosen = representative(steps, squares, most if len(by_program) == 1 else 1)
                seconds = [run(placed(number)) for number in chosen]
                self._measured[key] = Measured(describe(first), seconds, squares[chosen].tolist())
            counted.append((squares[steps], self._measured[key]))
        found = summary(plan, counted, self._architecture)
        return found | {"compile_seconds": compiled}


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


def summary(
    plan: Plan,
    counted: Sequence[tuple[np.ndarray, Measured]],
    architecture: Architecture,
) -> Json:
    """Metrics of an epoch, of the samples that it places: packed ones leave some for the next.

    Args:
      plan: the plan of the epoch, of one rank.
      counted: for each program, the squares of all its steps and the times of the timed ones.
      architecture: of the model, for its FLOPs.
    """
    epoch = plan.epoch(0)
    seq_len = plan.samples.seq_len[epoch.sample]
    tokens = float(seq_len.sum())
    seconds = sum(len(squares) * each.mean_seconds(squares) for squares, each in counted)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "samples_per_second": len(seq_len) / seconds,
        "flops": architecture.step_flops(seq_len),
        "steps": plan.steps_per_epoch,
        "programs": len(counted),
        "padding": 1 - tokens / float((epoch.rows * epoch.padded_len).sum()),
        "measured": [{"steps": len(squares)} | each._asdict() for squares, each in counted],
    }
