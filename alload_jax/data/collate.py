"""Builds the arrays of a planned step's micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from alload_jax.data.batch import AnyBatch
from alload_jax.data.collation import Collation
from alload_jax.data.sample_texts import with_text_of_epoch
from alload_jax.data.sources.source import SampleReader
from alload_jax.data.store import BadRecordError
from alload_jax.planning.step import MicroBatch, Step


class HostStep(NamedTuple):
    """The arrays of a step for this process's ranks, in host memory.

    Attributes:
      number: number of the step, counted from the start of training.
      epoch: epoch of the step.
      batches: one batch per micro-batch, or per micro-batch and shape group.
      problems: errors of the records that were skipped.
      groups: shape group of each batch.
    """

    number: int
    epoch: int
    batches: tuple[AnyBatch, ...]
    problems: tuple[str, ...]
    groups: tuple[int, ...] = ()


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
    """

    reader: SampleReader
    ranks: frozenset[int]
    collation: Collation
    group_ranks: int | None = None
    excluded: frozenset[int] = frozenset()
    seed: int = 0
    not_finite: frozenset[int] = frozenset()

    def __call__(self, step: Step) -> HostStep:
        """Reads the step's records. Damaged records get weight 0 and are reported."""
        problems: list[str] = []
        batches, groups = [], []
        local = (part for part in step.micro_batches if part.rank in self.ranks)
        for (_, group), parts in groupby(local, key=self._place):
            batches.append(self._batch(list(parts), step.epoch, problems))
            groups.append(group)
        # Each part of a split sample reports the same damaged record.
        distinct = tuple(dict.fromkeys(problems))
        return HostStep(step.index, step.epoch, tuple(batches), distinct, tuple(groups))

    def _place(self, part: MicroBatch) -> tuple[int, int]:
        return part.index, part.rank // self.group_ranks if self.group_ranks else 0

    def _batch(self, parts: Sequence[MicroBatch], epoch: int, problems: list[str]) -> AnyBatch:
        """Builds one micro-batch from the parts of the ranks, in the order of the ranks."""
        batch = self.collation.empty(parts, epoch)
        for sample, place in self.collation.places(parts):
            if sample in self.excluded:
                continue
            if sample in self.not_finite:
                problems.append(
                    f"{self._place_of(sample)} gives a loss or gradient that is not finite"
                )
                continue
            try:
                arrays = self.reader.read(sample)
                epoch_of_sample = self.collation.epoch_of(batch, place)
                arrays = with_text_of_epoch(arrays, self.seed, epoch_of_sample, sample)
                condition = self._condition(arrays, sample)
            except BadRecordError as error:
                problems.append(str(error))
                continue
            self.collation.put(batch, place, sample, arrays, condition)
        return batch

    def _condition(self, arrays: dict[str, np.ndarray], sample: int) -> Any:
        try:
            return self.collation.conditions.of(arrays)
        except ValueError as error:
            raise BadRecordError(f"{self._place_of(sample)} {error}") from error

    def _place_of(self, sample: int) -> str:
        manifest = self.reader.manifest
        return f"{manifest.path}: sample {manifest.number(sample)}"
