"""From a planned step to the arrays of its micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from alload_jax.data.batch import Batch
from alload_jax.data.condition import Conditions
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
    batches: tuple[Batch, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Collator:
    """Reads and collates the steps of a synchronous, bucketed plan.

    Attributes:
      reader: of the samples.
      ranks: the plan's ranks that this process feeds; only their records are read.
      conditions: how the model takes the samples' conditions.
    """

    reader: StoreReader
    ranks: frozenset[int]
    conditions: Conditions

    def __call__(self, step: Step) -> HostStep:
        """Reads the step's records. Damaged ones become zero-weight rows and are reported."""
        batches: list[Batch] = []
        problems: list[str] = []
        for _, group in groupby(step.micro_batches, key=lambda part: part.index):
            parts = [part for part in group if part.rank in self.ranks]
            batches.append(self._batch(parts, problems))
        return HostStep(step.index, step.epoch, tuple(batches), tuple(problems))

    def _batch(self, parts: Sequence[MicroBatch], problems: list[str]) -> Batch:
        """One micro-batch of the ranks' parts, rank by rank."""
        batch = self._filler(sum(part.rows for part in parts), parts[0])
        first_row = 0
        for part in parts:
            for row, sample in enumerate(part.samples, start=first_row):
                try:
                    arrays = self.reader.read(sample)
                    condition = self._condition(arrays, sample)
                except BadRecordError as error:
                    problems.append(str(error))
                    continue
                batch.latents[row] = arrays[LATENTS]
                batch.condition[row, : len(condition)] = condition
                batch.sample[row] = sample
                batch.weight[row] = 1.0
            first_row += part.rows
        return batch

    def _condition(self, arrays: dict[str, np.ndarray], sample: int) -> np.ndarray:
        try:
            return self.conditions.of(arrays)
        except ValueError as error:
            place = f"{self.reader.manifest.path}: sample {sample}"
            raise BadRecordError(f"{place} {error}") from error

    def _filler(self, rows: int, part: MicroBatch) -> Batch:
        """Rows without weight, of the part's shape."""
        return Batch(
            latents=np.zeros((rows, *self.reader.manifest.latent_shape(part.shape)), np.float32),
            condition=self.conditions.empty(rows),
            sample=np.full(rows, -1, np.int32),
            weight=np.zeros(rows, np.float32),
        )
