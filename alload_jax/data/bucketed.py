"""Bucketed collation: one row per sample, all rows of one shape or padded to one length."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from alload_jax.data.batch import AnyBatch, Batch, PackedBatch
from alload_jax.data.condition import Conditions
from alload_jax.data.condition_parts import bucketed_parts, put_parts
from alload_jax.data.manifest import Manifest
from alload_jax.data.packed import PackedCollation
from alload_jax.data.record import GIVEN, IMAGE, LATENTS, Arrays
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.plan import Plan
from alload_jax.planning.repeats import noise_epoch
from alload_jax.planning.step import MicroBatch


@dataclass(frozen=True)
class BucketedCollation:
    """Collates samples into rows (see `Collation`).

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

    @classmethod
    def of(
        cls, plan: Plan, manifest: Manifest, model: ModelConfig, conditions: Conditions
    ) -> "BucketedCollation":
        """Returns the collation of a bucketed plan."""
        _, tokens, shape = plan.bucket_shapes()
        lengths = np.unique(tokens[~shape.any(axis=1)]).tolist()
        seq_len, given = plan.samples.seq_len, (manifest, model, conditions)
        merged = {n: PackedCollation.of_single_samples(seq_len, n, *given) for n in lengths}
        return cls(manifest, conditions, merged)

    def shapes(self, plan: Plan) -> list[AnyBatch]:
        """See `Collation.shapes`."""
        rows, tokens, shape = plan.bucket_shapes()
        columns = np.column_stack([rows * plan.group_ranks, tokens, shape])
        found = np.unique(columns, axis=0).tolist()
        found.sort(key=lambda bucket: (-bucket[0] * bucket[1], bucket))
        return [self._of_bucket(count, length, tuple(size)) for count, length, *size in found]

    def _of_bucket(self, rows: int, tokens: int, shape: tuple[int, int, int]) -> AnyBatch:
        if not any(shape):
            return self.merged[tokens].abstract(rows)
        return self._abstract((rows, *self.manifest.latent_shape(shape)))

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

    def empty(self, parts: Sequence[MicroBatch], epoch: int) -> AnyBatch:
        """See `Collation.empty`."""
        if not any(parts[0].shape):
            merged = self.merged[parts[0].seq_len]
            return merged.empty([row for part in parts for row in merged.single_rows(part)], epoch)
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

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, Any]]:
        """See `Collation.places`; a place is a row, or that of a packed row."""
        if not any(parts[0].shape):
            merged = self.merged[parts[0].seq_len]
            yield from merged.places([row for part in parts for row in merged.single_rows(part)])
            return
        for part, first_row in zip(parts, _first_rows(parts), strict=True):
            for row, sample in enumerate(part.samples, start=first_row):
                yield sample, row

    def epoch_of(self, batch: AnyBatch, place: Any) -> int:
        """See `Collation.epoch_of`."""
        if isinstance(batch, PackedBatch):
            return self.merged[batch.tokens.shape[1]].epoch_of(batch, place)
        return int(batch.epoch[place])

    def put(self, batch: AnyBatch, place: Any, sample: int, arrays: Arrays, condition: Any) -> None:
        """See `Collation.put`."""
        if isinstance(batch, PackedBatch):
            self.merged[batch.tokens.shape[1]].put(batch, place, sample, arrays, condition)
            return
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
