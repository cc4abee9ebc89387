"""From a planned step to the arrays of its micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from alload_jax.data.batch import AnyBatch
from alload_jax.data.collation import Collation
from alload_jax.data.record import LATENTS
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.planning.plan import MicroBatch, Step


class HostStep(NamedTuple):
    """A step's arrays in host memory, as far as this process's ranks need them.

    Attributes:
      number: of the step, from the start of training.
      epoch: of the step.
      batches: one for each micro-batch; where ranks are independent, of each shape group.
      problems: what was wrong with records that were skipped.
      groups: the shape group of each batch.
    """

    number: int
    epoch: int
    batches: tuple[AnyBatch, ...]
    problems: tuple[str, ...]
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Collator:
    """Reads and collates a plan's steps.

    Attributes:
      reader: of the samples.
      ranks: the plan's ranks that this process feeds; only their records are read.
      collation: of the plan's micro-batches.
      group_ranks: ranks of a shape group; None for all.
    """

    reader: StoreReader
    ranks: frozenset[int]
    collation: Collation
    group_ranks: int | None = None

    def __call__(self, step: Step) -> HostStep:
        """Reads the step's records. Damaged ones get no weight, and are reported."""
        problems: list[str] = []
        batches, groups = [], []
        local = (part for part in step.micro_batches if part.rank in self.ranks)
        for (_, group), parts in groupby(local, key=self._place):
            batches.append(self._batch(list(parts), problems))
            groups.append(group)
        # Every part of a sample that is split over ranks meets the same damage.
        told = tuple(dict.fromkeys(problems))
        return HostStep(step.index, step.epoch, tuple(batches), told, tuple(groups))

    def _place(self, part: MicroBatch) -> tuple[int, int]:
        return part.index, part.rank // self.group_ranks if self.group_ranks else 0

    def _batch(self, parts: Sequence[MicroBatch], problems: list[str]) -> AnyBatch:
        """One micro-batch of the ranks' parts, rank by rank."""
        batch = self.collation.empty(parts)
        for sample, place in self.collation.places(parts):
            try:
                arrays = self.reader.read(sample)
                condition = self._condition(arrays, sample)
            except BadRecordError as error:
                problems.append(str(error))
                continue
            self.collation.put(batch, place, sample, arrays[LATENTS], condition)
        return batch

    def _condition(self, arrays: dict[str, np.ndarray], sample: int) -> np.ndarray:
        try:
            return self.collation.conditions.of(arrays)
        except ValueError as error:
            place = f"{self.reader.manifest.path}: sample {sample}"
            raise BadRecordError(f"{place} {error}") from error
