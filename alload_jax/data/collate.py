"""Builds the arrays of a planned step's micro-batches: rows of one shape, or packed ones."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from typing import Generic, NamedTuple, TypeAlias

import jax
import numpy as np

from alload_jax.data.batch import AnyBatch, Batch, HostBatch, T, abstract
from alload_jax.data.condition import Conditions, Tokens, put_condition, whole_windows
from alload_jax.data.manifest import Manifest
from alload_jax.data.packed import PackedCollation, Place, RowSizes, row_sizes
from alload_jax.data.record import GIVEN, IMAGE, LATENTS, Arrays, with_text_of_epoch
from alload_jax.data.sources import SampleReader
from alload_jax.data.store import BadRecordError
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.epoch import MicroBatch, Step, WindowContent, noise_epoch
from alload_jax.planning.plan import Plan
from alload_jax.planning.samples import Triple


@dataclass(frozen=True)
class BucketedCollation:
    """Collates the samples of micro-batches into rows of one sample each.

    A bucket of one shape becomes a `Batch`. One of several shapes becomes a `PackedBatch`: rows of
    one sample each, padded to the length of the bucket.

    Attributes:
      manifest: manifest of the samples.
      conditions: shape and dtype of the rows' conditions.
      merged: the collation of buckets of several shapes, by their length.
    """

    manifest: Manifest
    conditions: Conditions
    merged: Mapping[int, PackedCollation] = field(default_factory=dict)

    def shapes(self, plan: Plan) -> list[AnyBatch]:
        """Returns every micro-batch of a shape group in a plan, as `jax.ShapeDtypeStruct`s.

        Unless ranks are independent, all ranks are one group. The micro-batches that need the most
        memory come first.
        """
        rows, tokens, shape = plan.bucket_shapes()
        columns = np.column_stack([rows * plan.group_ranks, tokens, shape])
        found = np.unique(columns, axis=0).tolist()
        found.sort(key=lambda bucket: (-bucket[0] * bucket[1], bucket))
        return [
            abstract(self._zeros(1, (frames, height, width), 0), count)
            if any((frames, height, width))
            else self.merged[length].abstract(count)
            for count, length, frames, height, width in found
        ]

    def _zeros(self, rows: int, shape: Triple, epoch: int) -> Batch[np.ndarray]:
        latents = (rows, *self.manifest.latent_shape(shape))
        return Batch(
            latents=np.zeros(latents, np.float32),
            condition=self.conditions.empty(rows),
            sample=np.full(rows, -1, np.int32),
            epoch=np.full(rows, epoch, np.int32),
            weight=np.zeros(rows, np.float32),
            given=self.conditions.given(*latents[:4]),
            image=self.conditions.image(rows),
        )

    def of_parts(self, parts: Sequence[MicroBatch]) -> tuple["Collation", Sequence[MicroBatch]]:
        """The collation of a micro-batch, and its parts: packed rows if its shapes differ."""
        if any(parts[0].shape):
            return self, parts
        merged = self.merged[parts[0].seq_len]
        return merged, [row for part in parts for row in merged.single_rows(part)]

    def empty(self, parts: Sequence[MicroBatch], epoch: int) -> Batch[np.ndarray]:
        """Builds a micro-batch of a step of `epoch` for the parts of these ranks, weights 0."""
        return self._zeros(sum(part.rows for part in parts), parts[0].shape, epoch)

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, int, Place]]:
        """Yields each sample of the parts, which of its times it is, and its place in the batch."""
        first_row = 0
        for part in parts:
            times = zip_longest(part.samples, part.repetitions, fillvalue=0)
            for row, (sample, repetition) in enumerate(times, start=first_row):
                yield sample, repetition, Place(row)
            first_row += part.rows

    def put(
        self, batch: HostBatch, place: Place, sample: int, arrays: Arrays, condition: Tokens
    ) -> None:
        """Writes the arrays of a sample to its place in the batch, with weight 1.

        Its condition is what `Conditions.of` returns.
        """
        assert isinstance(batch, Batch)
        row = place.row
        batch.latents[row] = arrays[LATENTS]
        if batch.given is not None and GIVEN in arrays:
            batch.given[row] = arrays[GIVEN]
        if batch.image is not None:
            batch.image[row] = arrays[IMAGE]
        put_condition(batch.condition, row, 0, 0, condition)
        batch.sample[row] = self.manifest.number(sample)
        batch.weight[row] = 1.0


Collation = BucketedCollation | PackedCollation


def collation_for(
    plan: Plan, manifest: Manifest, model: ModelConfig, conditions: Conditions
) -> Collation:
    """Returns the collation of a plan's micro-batches."""
    packing, seq_len = plan.epoch(0).packing, plan.samples.seq_len
    equal, given = 0 if conditions.parts else conditions.length, (manifest, model, conditions)
    if packing is not None:
        sizes = {size: row_sizes(plan, equal, size) for size in packing.split_sizes}
        return PackedCollation.of(sizes, seq_len, *given)
    _, tokens, shape = plan.bucket_shapes()
    windows, merged = int(whole_windows(equal, equal)), {}
    for length in np.unique(tokens[~shape.any(axis=1)]).tolist():  # rows of one sample each
        row = RowSizes(length, windows, lengths=((0, 1), (length, 0)))
        merged[length] = PackedCollation.of({0: row}, seq_len, *given)
    return BucketedCollation(manifest, conditions, merged)


class LoadedStep(NamedTuple, Generic[T]):
    """The arrays of a step: of this process's ranks in host memory, or of all on the devices.

    Attributes:
      number: number of the step, counted from the start of training.
      epoch: epoch of the step.
      batches: one batch per micro-batch, or per micro-batch and shape group; on the devices with
        rows split over the ranks (of its shape group).
      problems: errors of the records that were skipped; on the devices those in all processes.
      signal: number of the signal that stops the run before this step; 0 for none.
      wait_seconds: seconds of waiting for the loader when this step was requested; the loader then
        returned the step `depth` later.
      groups: shape group of each batch.
      save: whether a process wants a checkpoint after this step.
    """

    number: int
    epoch: int
    batches: tuple[AnyBatch[T], ...]
    problems: tuple[str, ...]
    signal: int = 0
    wait_seconds: float = 0.0
    groups: tuple[int, ...] = ()
    save: bool = False


HostStep: TypeAlias = LoadedStep[np.ndarray]
PlacedStep: TypeAlias = LoadedStep[jax.Array]


@dataclass(frozen=True)
class Collator:
    """Reads and collates the steps of a plan.

    Attributes:
      reader: reader of the samples.
      ranks: ranks of the plan that belong to this process; only their records are read.
      collation: collation of the plan's micro-batches.
      group_ranks: number of ranks per shape group; None for all ranks.
      excluded: samples that are not read and get weight 0.
      not_finite: samples that also get weight 0, and are reported as damaged records are.
      seed: of the run, which draws one of a sample's texts in each epoch.
      dropout: [N] float64, share of the times that it draws none; None for never.
      keys: [N], what messages call the samples of a stream; None for their numbers.
    """

    reader: SampleReader
    ranks: frozenset[int]
    collation: Collation
    group_ranks: int | None = None
    excluded: frozenset[int] = frozenset()
    seed: int = 0
    not_finite: frozenset[int] = frozenset()
    dropout: np.ndarray | None = None
    keys: np.ndarray | None = None
    _windows: dict[int, "Collator"] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def __call__(self, step: Step) -> HostStep:
        """Reads the step's records. Damaged records get weight 0 and are reported."""
        if step.window is not None:
            return self._of_window(step.epoch, step.window)(replace(step, window=None))
        problems: list[str] = []
        batches, groups = [], []
        local = (part for part in step.micro_batches if part.rank in self.ranks)
        size = self.group_ranks or sys.maxsize
        for (_, group), parts in groupby(local, key=lambda part: (part.index, part.rank // size)):
            collation, held = self.collation.of_parts(list(parts))  # of the ranks, in their order
            batch = collation.empty(held, step.epoch)
            epochs = batch.epoch.reshape(len(batch.epoch), -1)
            for sample, repetition, place in collation.places(held):
                epochs[place.row, place.slot] = epoch = noise_epoch(step.epoch, repetition)
                if sample in self.excluded:
                    continue
                number = self.reader.manifest.number(sample)
                name = number if self.keys is None else self.keys[sample]
                place_of = f"{self.reader.manifest.path}: sample {name}"
                if sample in self.not_finite:
                    problems.append(f"{place_of} gives a loss or gradient that is not finite")
                    continue
                try:
                    arrays = self.reader.read(sample)
                    dropout = 0.0 if self.dropout is None else self.dropout[sample]
                    arrays = with_text_of_epoch(arrays, self.seed, epoch, number, dropout)
                    condition = collation.conditions.of(arrays)
                except BadRecordError as error:
                    problems.append(str(error))
                except ValueError as error:
                    problems.append(str(BadRecordError(f"{place_of} {error}")))
                else:
                    collation.put(batch, place, sample, arrays, condition)
            batches.append(batch)
            groups.append(group)
        # Each part of a split sample reports the same damaged record.
        distinct = tuple(dict.fromkeys(problems))
        return HostStep(step.index, step.epoch, tuple(batches), distinct, groups=tuple(groups))

    def _of_window(self, number: int, window: WindowContent) -> "Collator":
        """The collator of the samples of a window."""
        if (found := self._windows.get(number)) is None:
            reader, collation = self.reader.of_window(window), self.collation
            assert isinstance(collation, PackedCollation)  # streams are planned by `balanced`
            of_rows = collation.of_rows(reader.manifest, window.rows)
            found = replace(self, reader=reader, collation=of_rows, keys=window.keys)
            self._windows[number] = found
            self._windows.pop(number - 2, None)
        return found
