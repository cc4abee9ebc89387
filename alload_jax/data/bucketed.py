"""Bucketed collation: one row per sample, all rows of one shape."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from alload_jax.data.batch import Batch
from alload_jax.data.condition import Conditions
from alload_jax.data.condition_parts import bucketed_parts, put_parts
from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LATENTS, Arrays
from alload_jax.planning.plan import Plan
from alload_jax.planning.repeats import noise_epoch
from alload_jax.planning.step import MicroBatch


@dataclass(frozen=True)
class BucketedCollation:
    """Collates samples into rows (see `Collation`).

    Attributes:
      manifest: manifest of the samples.
      conditions: shape and dtype of the rows' conditions.
    """

    manifest: Manifest
    conditions: Conditions

    def shapes(self, plan: Plan) -> list[Batch]:
        """See `Collation.shapes`."""
        rows, _, shape = plan.bucket_shapes()
        distinct = np.unique(np.column_stack([rows * plan.group_ranks, shape]), axis=0)
        found = [(n, *self.manifest.latent_shape(tuple(size))) for n, *size in distinct.tolist()]
        found.sort(key=lambda shape: (-math.prod(shape), shape))
        return [self._abstract(shape) for shape in found]

    def _abstract(self, latents: tuple[int, ...]) -> Batch:
        rows = latents[0]
        return Batch(
            latents=jax.ShapeDtypeStruct(latents, np.float32),
            condition=self._abstract_condition(rows),
            sample=jax.ShapeDtypeStruct((rows,), np.int32),
            epoch=jax.ShapeDtypeStruct((rows,), np.int32),
            weight=jax.ShapeDtypeStruct((rows,), np.float32),
            given=self.conditions.given(*latents[:4]),
            image=self.conditions.image(rows),
        )

    def _abstract_condition(self, rows: int) -> Any:
        conditions = self.conditions
        if not conditions.parts:
            return jax.ShapeDtypeStruct(conditions.shape(rows), conditions.dtype)
        arrays = bucketed_parts(conditions, rows)
        return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), arrays)

    def empty(self, parts: Sequence[MicroBatch], epoch: int) -> Batch:
        """See `Collation.empty`."""
        rows = sum(part.rows for part in parts)
        shapes = self._abstract((rows, *self.manifest.latent_shape(parts[0].shape)))
        zeros: Batch = jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), shapes)
        epochs = np.full(rows, epoch, np.int32)
        for part, first_row in zip(parts, _first_rows(parts), strict=True):
            for row, repetition in enumerate(part.repetitions, start=first_row):
                epochs[row] = noise_epoch(epoch, repetition)
        return zeros._replace(
            condition=bucketed_parts(self.conditions, rows)
            if self.conditions.parts
            else self.conditions.empty(rows),
            sample=np.full(rows, -1, np.int32),
            epoch=epochs,
        )

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, int]]:
        """See `Collation.places`; a place is a row."""
        for part, first_row in zip(parts, _first_rows(parts), strict=True):
            for row, sample in enumerate(part.samples, start=first_row):
                yield sample, row

    def epoch_of(self, batch: Batch, place: int) -> int:
        """See `Collation.epoch_of`."""
        return int(batch.epoch[place])

    def put(self, batch: Batch, place: int, sample: int, arrays: Arrays, condition: Any) -> None:
        """See `Collation.put`."""
        batch.latents[place] = arrays[LATENTS]
        if batch.given is not None and GIVEN in arrays:
            batch.given[place] = arrays[GIVEN]
        if batch.image is not None:
            batch.image[place] = arrays[IMAGE]
        if self.conditions.parts:
            put_parts(batch.condition, place, 0, condition)
        else:
            batch.condition[place, : len(condition)] = condition
        batch.sample[place] = sample
        batch.weight[place] = 1.0


def _first_rows(parts: Sequence[MicroBatch]) -> list[int]:
    """The first row of each part, rows of all parts counted on."""
    return [0, *itertools.accumulate(part.rows for part in parts)][:-1]
