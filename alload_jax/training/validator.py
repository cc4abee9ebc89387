"""Measures a model's errors on held-out samples at fixed noise levels, on all devices.

`split_data` says which samples these are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Compiled, Wrapped
from jaxtyping import PyTree

from alload_jax.data.batch import AnyBatch, Batch
from alload_jax.data.collate import BucketedCollation, Collator
from alload_jax.data.condition import Conditions, conditions_for
from alload_jax.data.loader import PatientReader, place_batch
from alload_jax.data.manifest import Manifest
from alload_jax.data.selection import content_order, is_held_out
from alload_jax.data.sources import SampleSource, SourceConfig, Subset
from alload_jax.data.sources.opening import open_source
from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, print_stderr
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import abstract_model
from alload_jax.objectives import MeasuresLevels
from alload_jax.planning.epoch import MicroBatch, Step
from alload_jax.planning.samples import Triple, digest
from alload_jax.sharding.mesh import batch_sharding, local_plan_ranks, ranks_of, replicated
from alload_jax.training import LOSS, SAMPLES, ValidationConfig
from alload_jax.training.state import TrainingSpec, TrainState
from alload_jax.training.trainer import in_parallel, on_mesh


class HeldOut(NamedTuple):
    """Held-out samples as a model takes them.

    Attributes:
      source: the samples.
      conditions: shape and dtype of their conditions, padded as those of training if attention
        includes the padding.
    """

    source: SampleSource
    conditions: Conditions

    @classmethod
    def of(
        cls, source: SampleSource, model: ModelConfig, trained: Conditions, data: Manifest
    ) -> "HeldOut":
        """Checks that held-out samples are of the kind of those of training.

        Args:
          source: the held-out samples.
          model: config of the model.
          trained: conditions of training.
          data: the samples of `data.folder`.

        Raises:
          InputError: they do not fit the model, or differ in kind.
        """
        held_out = source.manifest
        held_out.require(model.latent_channels, model.patch_size)
        if held_out.vae_stride != data.vae_stride:
            raise InputError(
                f"{held_out.path}: the latents have a stride of {held_out.vae_stride}, but those "
                f"of data.folder {data.vae_stride}; prepare both with one VAE"
            )
        found = conditions_for(model, held_out)
        if found.parts:  # whose padding no sample sees
            return cls(source, found)
        if found.length > trained.length:
            raise InputError(
                f"{held_out.path}: a sample has {found.length} classes, but samples of "
                f"data.folder have at most {trained.length}; leave it out of validation.folder"
            )
        if found.image_shape != trained.image_shape:
            raise InputError(
                f"{held_out.path}: image embeddings are {found.image_shape}, but those of "
                f"data.folder {trained.image_shape}; prepare both alike"
            )
        return cls(source, trained)

    def identity(self) -> dict[str, str]:
        """What tells these samples from others, as JSON values."""
        return {"validation": self.source.manifest.digest()}


def split_data(
    config: ValidationConfig,
    source: SampleSource,
    read_by: SourceConfig | None,
    excluded: frozenset[int],
) -> tuple[SampleSource, SampleSource | None, frozenset[int]]:
    """Holds out samples of the training data, or opens those of another folder.

    Args:
      config: which samples are held out.
      source: the samples of `data.folder`.
      read_by: `data.source`.
      excluded: numbers of the samples of `data.folder` to leave out, on both sides.

    Returns:
      The samples of the plan, those of the validation (None without one), and the numbers of the
      samples of the plan that are left out.

    Raises:
      InputError: no samples are left on a side, or the other folder cannot be read.
    """
    if config.folder is not None:
        try:
            held_out_source = open_source(config.folder, config.source or read_by)
            held_out_source.require_settings()
        except InputError as error:
            words = str(error).replace("data.folder", "validation.folder")
            raise InputError(f"validation.folder: {words}") from error
        ours, theirs = source.manifest, held_out_source.manifest
        if ours.tells_content and theirs.tells_content:
            same = int(np.isin(theirs.checksum, ours.checksum).sum())
            if same and first_process():
                print_stderr(
                    f"warning: {same:,} of {len(theirs):,} samples of validation.folder are also "
                    "trained on; leave them out of one of the folders"
                )
        return source, held_out_source, excluded
    if config.share is None:
        return source, None, excluded
    held_out = is_held_out(source.manifest, config.share)
    left_out = np.zeros_like(held_out)
    left_out[list(excluded)] = True
    training, kept = np.flatnonzero(~held_out), np.flatnonzero(held_out & ~left_out)
    sides = {"to train on": training[~left_out[training]], "to validate on": kept}
    for purpose, numbers in sides.items():
        if not len(numbers):
            raise InputError(
                f"data.exclude leaves no sample {purpose} with validation.share {config.share}; "
                "remove some of its lines, change the share, or give validation.folder"
            )
    among_training = np.flatnonzero(left_out[training]).tolist()
    return Subset(source, training), Subset(source, kept), frozenset(map(int, among_training))


@dataclass(frozen=True)
class SizeClass:
    """The measured samples of one size.

    Attributes:
      shape: (frames, height, width) in pixels.
      seq_len: tokens of a sample.
      samples: [K] int64, numbers among the held-out samples, in the order of their content.
    """

    shape: Triple
    seq_len: int
    samples: np.ndarray

    @property
    def name(self) -> str:
        """The size as in `17x16x16`: frames, height, width."""
        return "x".join(map(str, self.shape))

    def rows(self, ranks: int, tokens: int | None) -> int:
        """Rows of a rank in a batch.

        Args:
          ranks: number of ranks that share the samples.
          tokens: most tokens of a rank's rows; None for one row.
        """
        room = tokens // self.seq_len if tokens else 1
        return max(1, min(room, -(-len(self.samples) // ranks)))

    def steps(self, ranks: int, tokens: int | None) -> Iterator[Step]:
        """Yields the batches, each as a step of one micro-batch for every rank.

        A rank gets the next samples of the class; the last ranks may have rows without one.
        """
        rows = self.rows(ranks, tokens)
        for index, first in enumerate(range(0, len(self.samples), ranks * rows)):
            parts = []
            for rank in range(ranks):
                begin = first + rank * rows
                samples = tuple(self.samples[begin : begin + rows].tolist())
                parts.append(MicroBatch(rank, 0, rows, self.seq_len, self.shape, samples))
            yield Step(index, 0, tuple(parts))


def choose_samples(
    manifest: Manifest,
    patch_size: Triple,
    max_samples: int | None,
    max_shapes: int | None,
    condition_tokens: int = 0,
) -> list[SizeClass]:
    """Chooses the samples to measure: of the most frequent sizes, each by its share, at least one.

    The choice depends on the samples' content, not on their order.

    Args:
      manifest: the held-out samples.
      patch_size: latents per token.
      max_samples: most samples; None for all.
      max_shapes: most sizes; None for all.
      condition_tokens: tokens of a row beside those of the latents.

    Returns:
      the chosen samples by size, shortest first.
    """
    buckets = manifest.samples(patch_size).buckets()
    sizes = np.diff(buckets.offsets)
    most = min(len(sizes), max_shapes or len(sizes), max_samples or len(sizes))
    kept = np.sort(np.argsort(-sizes, kind="stable")[:most])
    counts = sizes[kept]
    if max_samples is not None and counts.sum() > max_samples:  # the largest remainder first
        others = counts - 1
        exact = 1 + others * ((max_samples - len(counts)) / max(1, others.sum()))
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: max_samples - counts.sum()]] += 1
    order = content_order(manifest.contents)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    chosen = []
    for bucket, count in zip(kept.tolist(), counts.tolist(), strict=True):
        members = buckets.members[buckets.offsets[bucket] : buckets.offsets[bucket + 1]]
        first = members[np.argsort(place[members], kind="stable")][:count]
        frames, height, width = buckets.shape[bucket].tolist()
        tokens = int(buckets.seq_len[bucket]) + condition_tokens
        chosen.append(SizeClass((frames, height, width), tokens, first))
    return chosen


class ClassErrors(NamedTuple):
    """Errors of the samples of one size.

    Attributes:
      name: of the size.
      errors: [levels, K] float32, of each sample at each noise level.
      measured: [K] bool; false for samples that cannot be read.
    """

    name: str
    errors: np.ndarray
    measured: np.ndarray


def validation_figures(
    classes: Sequence[ClassErrors], levels: Sequence[float]
) -> dict[str, int | float]:
    """The mean errors by name: of all samples, of each size and at each noise level.

    Every sample counts the same, whatever its length. Means are taken in float64.

    Args:
      classes: the errors of each size.
      levels: the noise levels.

    Returns:
      `validation/samples` and the losses, which may be infinite or NaN as the model's are. Without
      a sample that can be read there are no losses.
    """
    errors = {each.name: each.errors[:, each.measured].astype(np.float64) for each in classes}
    errors = {name: values for name, values in errors.items() if values.size}
    if not errors:
        return {SAMPLES: 0}
    together = np.concatenate(list(errors.values()), axis=1)
    by_level = zip(levels, together.mean(axis=1).tolist(), strict=True)
    return {
        SAMPLES: together.shape[1],
        LOSS: float(together.mean()),
        **{f"{LOSS}/{name}": float(values.mean()) for name, values in errors.items()},
        **{f"{LOSS}/sigma_{level:g}": value for level, value in by_level},
    }


def finite(figures: Mapping[str, int | float]) -> dict[str, int | float]:
    """The figures that are finite, which JSON can hold."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


class Validator:
    """Computes the error of each chosen sample at each noise level.

    A sample's noise depends on the seed, its content and the level alone, so that errors are those
    of the same noise in every step and start, and on any number of devices.

    Attributes:
      classes: the chosen samples by size.
      levels: the noise levels.
      measured_set: digest of what is measured.
    """

    def __init__(
        self,
        config: ValidationConfig,
        spec: TrainingSpec,
        mesh: Mesh,
        held_out: HeldOut,
        tokens: int | None,
    ):
        """Chooses the samples.

        Args:
          config: which samples and noise levels.
          spec: the model and the objective.
          mesh: all devices.
          held_out: the samples.
          tokens: most tokens of a rank's rows; None for one row at a time.

        Raises:
          InputError: the objective has no errors at fixed noise levels.
        """
        if not isinstance(spec.objective, MeasuresLevels):
            name = getattr(spec.objective, "name", type(spec.objective).__name__)
            raise InputError(
                f"objective.name is {name}, which defines no errors at fixed noise levels "
                "(errors_at); leave validation out, or add the method"
            )
        manifest, patch = held_out.source.manifest, spec.model.patch_size
        self.levels = config.noise_levels
        beside = held_out.conditions.length if spec.model.joint_attention else 0
        self.classes = choose_samples(
            manifest, patch, config.max_samples, config.max_shapes, condition_tokens=beside
        )
        chosen = [
            np.asarray(column)
            for each in self.classes
            for column in (each.shape, manifest.checksum[each.samples])
        ]
        settings = np.asarray([config.seed, config.weights == "ema"], np.int64)
        self.measured_set = digest(settings, np.asarray(config.noise_levels), *chosen)
        self._config, self._mesh, self._tokens = config, mesh, tokens
        self._held_out = manifest
        self._ranks = ranks_of(mesh)
        self._collation = BucketedCollation(manifest, held_out.conditions)
        reader = PatientReader(held_out.source)
        self._collate = Collator(reader, local_plan_ranks(mesh, self._ranks), self._collation)
        ascending = np.argsort(manifest.sample_numbers)
        self._numbers = manifest.sample_numbers[ascending]
        self._marks = manifest.contents[ascending].astype(np.uint32).view(np.int32)

        @partial(jax.jit, out_shardings=replicated(mesh))
        def level_key(sigma: jax.Array) -> tuple[jax.Array, jax.Array]:
            """(σ, key data of its noise), on every device. It depends on no other level."""
            bits = jax.lax.bitcast_convert_type(sigma, jnp.uint32)
            return sigma, jax.random.key_data(jax.random.fold_in(jax.random.key(config.seed), bits))

        self._keys = [level_key(jnp.float32(level)) for level in self.levels]
        self._measure = make_measure(spec, mesh)
        self._programs: dict[str, Compiled] = {}
        self._reported: set[str] = set()

    def told(self) -> str:
        """What is measured and when, in words."""
        manifest, every = self._held_out, self._config.every
        sizes = len(np.unique(manifest.shape, axis=0))
        samples = sum(len(each.samples) for each in self.classes)
        when = "at the end" if every is None else f"every {every:,} steps and at the end"
        return (
            f"{samples:,} of {len(manifest):,} held-out samples, {len(self.classes)} of {sizes} "
            f"sizes, at {len(self.levels)} noise levels, {when}"
        )

    def compile(self, state: TrainState) -> Iterator[str]:
        """Compiles the program of each size, which may need too much memory; yields its name."""
        values, (sigma, key) = self._values(state), self._keys[0]

        def compile_one(shape: AnyBatch) -> Compiled:
            batch = on_mesh(shape, self._mesh)
            return self._measure.lower(values, batch, key, sigma).compile()

        shapes = [self._shape(each) for each in self.classes]
        compiled = in_parallel(compile_one, shapes)
        for each, (_, program) in zip(self.classes, compiled, strict=True):
            self._programs[each.name] = program
            yield each.name

    def measure(self, state: TrainState) -> list[ClassErrors]:
        """Measures the state's weights. A collective operation.

        Samples that cannot be read are left out, with a warning.
        """
        if len(self._programs) < len(self.classes):
            for _ in self.compile(state):
                pass
        values = self._values(state)
        return [self._errors(values, each) for each in self.classes]

    def _errors(self, values: PyTree, of_class: SizeClass) -> ClassErrors:
        program, parts = self._programs[of_class.name], []
        steps = list(of_class.steps(self._ranks, self._tokens))
        with ThreadPoolExecutor(1) as pool:  # which reads the next batch meanwhile
            pending = pool.submit(self._read, steps[0])
            for following in (*steps[1:], None):
                placed = place_batch(pending.result(), self._mesh)
                if following is not None:
                    pending = pool.submit(self._read, following)
                found = [program(values, placed, key, sigma) for sigma, key in self._keys]
                parts.append(np.stack([np.asarray(one) for one in found]))
        together = np.concatenate(parts, axis=2)[:, :, : len(of_class.samples)]
        return ClassErrors(of_class.name, together[:, 0], together[0, 1] > 0)

    def _read(self, step: Step) -> Batch[np.ndarray]:
        """This process's rows; their noise is that of their content."""
        found = self._collate(step)
        for problem in found.problems:
            if problem not in self._reported:
                self._reported.add(problem)
                print_stderr(f"warning: validation leaves out: {problem}")
        (batch,) = found.batches
        assert isinstance(batch, Batch)
        marks = self._marks[np.searchsorted(self._numbers, batch.sample)]
        return batch._replace(sample=np.where(batch.sample < 0, -1, marks))

    def _shape(self, of_class: SizeClass) -> Batch:
        """Shapes and dtypes of a batch of all ranks."""
        step = next(of_class.steps(self._ranks, self._tokens))
        batch = self._collation.empty(step.micro_batches, 0)
        return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), batch)

    def _values(self, state: TrainState) -> PyTree:
        """The average of the weights, or the raw ones where there is none or the config says so."""
        averaged = self._config.weights == "ema"
        return (state.averaged_weights if averaged else state.weights).merged()


def make_measure(spec: TrainingSpec, mesh: Mesh) -> Wrapped:
    """Builds a jitted function (values, batch, key data, sigma) → [2, B] errors and weights.

    The result is on every device.
    """
    graph = abstract_model(spec.model).graph

    @partial(jax.jit, out_shardings=replicated(mesh))
    def measure(values: PyTree, batch: Batch, key: jax.Array, sigma: jax.Array) -> jax.Array:
        model, noise = nnx.merge(graph, values), jax.random.wrap_key_data(key)
        assert isinstance(spec.objective, MeasuresLevels)
        errors = spec.objective.errors_at(model, batch, noise, sigma, batch_sharding(mesh))
        return jnp.stack([errors, batch.weight])

    return measure
