"""From a planned step to the arrays of its micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from alload_jax.data.batch import AnyBatch
from alload_jax.data.layout import Layout
from alload_jax.data.record import LATENTS
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.planning.plan import MicroBatch, Step


class HostStep(NamedTuple):
    """A step's arrays in host memory, as far as this process's ranks need them.

    Attributes:
      number: of the step, from the start of training.
      epoch: of the step.
      batches: one for each micro-batch.
      problems: what was wrong with records that were skipped.
    """

    number: int
    epoch: int
    batches: tuple[AnyBatch, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Collator:
    """Reads and collates a plan's steps.

    Attributes:
      reader: of the samples.
      ranks: the plan's ranks that this process feeds; only their records are read.
      layout: of the plan's micro-batches.
    """

    reader: StoreReader
    ranks: frozenset[int]
    layout: Layout

    def __call__(self, step: Step) -> HostStep:
        """Reads the step's records. Damaged ones get no weight, and are reported."""
        problems: list[str] = []
        batches = tuple(
            self._batch([part for part in group if part.rank in self.ranks], problems)
            for _, group in groupby(step.micro_batches, key=lambda part: part.index)
        )
        # Every part of a sample that is split over ranks meets the same damage.
        return HostStep(step.index, step.epoch, batches, tuple(dict.fromkeys(problems)))

    def _batch(self, parts: Sequence[MicroBatch], problems: list[str]) -> AnyBatch:
        """One micro-batch of the ranks' parts, rank by rank."""
        batch = self.layout.empty(parts)
        for sample, place in self.layout.places(parts):
            try:
                arrays = self.reader.read(sample)
                condition = self._condition(arrays, sample)
            except BadRecordError as error:
                problems.append(str(error))
                continue
            self.layout.put(batch, place, sample, arrays[LATENTS], condition)
        return batch

    def _condition(self, arrays: dict[str, np.ndarray], sample: int) -> np.ndarray:
        try:
            return self.layout.conditions.of(arrays)
        except ValueError as error:
            place = f"{self.reader.manifest.path}: sample {sample}"
            raise BadRecordError(f"{place} {error}") from error
