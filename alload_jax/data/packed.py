"""The packed layout: rows of equally many tokens that hold many samples each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from alload_jax.data.batch import PackedBatch
from alload_jax.data.condition import Conditions
from alload_jax.data.manifest import Manifest
from alload_jax.data.row_sizes import RowSizes, row_sizes
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.patches import patchify
from alload_jax.models.common.segments import PackedMetadata, SplitRows, segments_of
from alload_jax.planning.plan import MicroBatch, Plan, RowPlan


class Place(NamedTuple):
    """Where a part of a sample lies in a packed batch.

    Attributes:
      row, slot: of the batch.
      offset: its first token in the row.
      first: that token's number in the sample.
      tokens: of the part.
    """

    row: int
    slot: int
    offset: int
    first: int
    tokens: int


@dataclass(frozen=True)
class PackedCollation:
    """Lays samples into packed rows (see `Collation`).

    What samples leave free of a row is padding, tokens of no segment: computed like others, they
    attend to nothing and weigh nothing. The parts of a sample that is split over ranks are segments
    each; together they weigh what a whole one does.

    Attributes:
      manifest: of the samples.
      model: whose patches are tokens.
      conditions: of every sample.
      grid: (t, h, w) in tokens of the largest sample along each.
      sizes: of the rows of each program, by the A tokens of its rows that hold split samples.
    """

    manifest: Manifest
    model: ModelConfig
    conditions: Conditions
    grid: tuple[int, int, int]
    sizes: dict[int, RowSizes]

    @classmethod
    def of(
        cls, plan: Plan, manifest: Manifest, model: ModelConfig, conditions: Conditions
    ) -> "PackedCollation":
        """The layout of a packed plan."""
        packing = plan.epoch(0).packing
        assert packing is not None
        grid = manifest.geometry(model.patch_size).token_grid(*manifest.shape.T).max(axis=0)
        return cls(
            manifest,
            model,
            conditions,
            tuple(grid.tolist()),
            {region: row_sizes(plan, conditions.length, region) for region in packing.split_sizes},
        )

    def shapes(self, plan: Plan) -> list[PackedBatch]:
        """See `Collation.shapes`: there is one for each A."""
        rows = plan.topology.ranks
        return [
            jax.tree.map(
                lambda part: jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype),
                self._batch(sizes, [RowPlan(sizes.region, (), (), (), (), ())]),
            )
            for _, sizes in sorted(self.sizes.items(), reverse=True)
        ]

    def empty(self, parts: Sequence[MicroBatch]) -> PackedBatch:
        """See `Collation.empty`: samples' places are laid out."""
        rows = [_packed(part) for part in parts]
        return self._batch(self.sizes[rows[0].split_tokens], rows)

    def _batch(self, sizes: RowSizes, rows: Sequence[RowPlan]) -> PackedBatch:
        """A batch without samples, from where they will lie in each row."""
        table = np.zeros((2, len(rows), sizes.slots), np.int32)
        of_condition = np.zeros_like(table)
        length = self.conditions.length
        for row, packed in enumerate(rows):
            for slot, place in enumerate(zip(packed.offsets, packed.tokens, strict=True)):
                table[:, row, slot] = place
                of_condition[:, row, slot] = slot * length, length
        channels = self.model.in_channels * int(np.prod(self.model.patch_size))
        return PackedBatch(
            tokens=np.zeros((len(rows), sizes.tokens, channels), np.float32),
            position=np.zeros((len(rows), sizes.tokens, 3), np.int32),
            metadata=PackedMetadata(
                tokens=segments_of(table, sizes.tokens),
                condition=segments_of(of_condition, sizes.condition),
                split=_split_rows(sizes, rows, table) if sizes.region else None,
                grid=self.grid,
                lengths=sizes.lengths,
                longest_condition=max(1, self.conditions.length),
            ),
            condition=self.conditions.empty(len(rows), sizes.condition),
            sample=np.full((len(rows), sizes.slots), -1, np.int32),
            weight=np.zeros((len(rows), sizes.slots), np.float32),
            first=np.zeros((len(rows), sizes.slots), np.int32),
            seq_len=table[1].copy(),
        )

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, Place]]:
        """See `Collation.places`."""
        for row, part in enumerate(parts):
            packed = _packed(part)
            for slot, (sample, offset, first, tokens) in enumerate(
                zip(part.samples, packed.offsets, packed.first, packed.tokens, strict=True)
            ):
                yield sample, Place(row, slot, offset, first, tokens)

    def put(
        self,
        batch: PackedBatch,
        place: Place,
        sample: int,
        latents: np.ndarray,
        condition: np.ndarray,
    ) -> None:
        """See `Collation.put`."""
        row, slot = place.row, place.slot
        here = slice(place.offset, place.offset + place.tokens)
        of_sample = slice(place.first, place.first + place.tokens)
        patches = patchify(latents[None], self.model.patch_size)[0]
        grid = [n // p for n, p in zip(latents.shape[:3], self.model.patch_size, strict=True)]
        batch.tokens[row, here] = patches[of_sample]
        batch.position[row, here] = np.indices(grid).reshape(3, -1).T[of_sample]
        begin = batch.metadata.condition.offset[row, slot]
        batch.condition[row, begin : begin + len(condition)] = condition
        batch.sample[row, slot] = sample
        batch.weight[row, slot] = place.tokens / len(patches)
        batch.first[row, slot] = place.first
        batch.seq_len[row, slot] = len(patches)


def _packed(part: MicroBatch) -> RowPlan:
    assert part.packed is not None
    return part.packed


def _split_rows(sizes: RowSizes, rows: Sequence[RowPlan], table: np.ndarray) -> SplitRows:
    """Where whole segments lie behind the region, and split ones in the joint rows."""
    joint = np.zeros((2, len(rows), sizes.joint), np.int32)
    whole = np.zeros((2, len(rows), sizes.whole), np.int32)
    for row, packed in enumerate(rows):
        for slot, place in enumerate(packed.joint):
            joint[:, row, slot] = place
        behind = table[:, row, table[0, row] >= sizes.region]
        whole[:, row, : behind.shape[1]] = behind - [[sizes.region], [0]]
    return SplitRows(
        whole=segments_of(whole, sizes.tokens - sizes.region),
        joint=segments_of(joint, sizes.context * sizes.region),
        region=sizes.region,
        lengths=(sizes.whole_lengths, sizes.joint_lengths),
    )
