"""Packed collation: rows of a fixed number of tokens with several samples each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from alload_jax.data.batch import PackedBatch
from alload_jax.data.condition import Conditions
from alload_jax.data.condition_parts import packed_parts, part_room, put_parts
from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LATENTS, Arrays
from alload_jax.data.row_sizes import RowSizes, row_sizes, single_sample_sizes
from alload_jax.data.tiling import PlacedSample, Tiling
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.patches import patchify
from alload_jax.models.common.segments import PADDING, PackedMetadata, SplitRows, segments_of
from alload_jax.models.common.tile_layout import SplitTiles, TileLayout
from alload_jax.planning.plan import Plan
from alload_jax.planning.repeats import noise_epoch
from alload_jax.planning.step import MicroBatch, RowPlan


class Place(NamedTuple):
    """Position of a sample, or a part of one, in a packed batch.

    Attributes:
      row: row of the batch.
      slot: slot of the segment in the row.
      offset: first token in the row.
      first: index of that token in the sample.
      tokens: number of tokens of the part.
    """

    row: int
    slot: int
    offset: int
    first: int
    tokens: int


@dataclass(frozen=True)
class PackedCollation:
    """Collates samples into packed rows (see `Collation`).

    The rest of a row is padding, tokens of no segment: they are computed but attend to nothing and
    have weight 0. Each part of a split sample is a segment; the weights of the parts sum to 1.

    Attributes:
      manifest: manifest of the samples.
      model: config of the model, which gives the patch size.
      conditions: shape and dtype of the conditions.
      grid: maximum (t, h, w) of the samples in tokens.
      sizes: row sizes of each program by A, its number of split tokens per row.
      tiling: tiles of sparse self-attention; None if no sample has it.
      part_tokens: [N, K] most tokens of each sample of each of `conditions.parts`; None if samples
        have equal numbers of condition tokens.
    """

    manifest: Manifest
    model: ModelConfig
    conditions: Conditions
    grid: tuple[int, int, int]
    sizes: dict[int, RowSizes]
    tiling: Tiling | None = None
    part_tokens: np.ndarray | None = None

    @classmethod
    def of(
        cls, plan: Plan, manifest: Manifest, model: ModelConfig, conditions: Conditions
    ) -> "PackedCollation":
        """Returns the collation of a packed plan."""
        packing = plan.epoch(0).packing
        assert packing is not None
        grid = manifest.geometry(model.patch_size).token_grid(*manifest.shape.T).max(axis=0)
        equal = 0 if conditions.parts else conditions.length
        sizes = {size: row_sizes(plan, equal, size) for size in packing.split_sizes}
        tokens = None
        if conditions.parts:
            tokens = conditions.part_tokens(manifest)
            lengths = plan.samples.seq_len
            sizes = {
                size: replace(
                    each, parts=tuple(part_room(tokens, lengths, each.tokens, each.slots, size > 0))
                )
                for size, each in sizes.items()
            }
        beside = max(1, conditions.length) if model.joint_attention else 0
        tiling = Tiling.of(manifest, model, beside)
        return cls(manifest, model, conditions, tuple(grid.tolist()), sizes, tiling, tokens)

    @classmethod
    def of_single_samples(
        cls,
        seq_len: np.ndarray,
        tokens: int,
        manifest: Manifest,
        model: ModelConfig,
        conditions: Conditions,
    ) -> "PackedCollation":
        """Returns the collation of rows of one sample each, padded to a number of tokens.

        Args:
          seq_len: [N] int64, tokens of every sample in a row.
          tokens: of a row.
          manifest: of the samples.
          model: config of the model.
          conditions: shape and dtype of the rows' conditions.
        """
        grid = manifest.geometry(model.patch_size).token_grid(*manifest.shape.T).max(axis=0)
        sizes = single_sample_sizes(tokens, 0 if conditions.parts else conditions.length)
        part_tokens = None
        if conditions.parts:
            part_tokens = conditions.part_tokens(manifest)
            sizes = replace(sizes, parts=tuple(part_room(part_tokens, seq_len, tokens, 1, False)))
        tiling = Tiling.of(manifest, model, max(1, conditions.length) * model.joint_attention)
        grid = tuple(grid.tolist())
        return cls(manifest, model, conditions, grid, {0: sizes}, tiling, part_tokens)

    def abstract(self, rows: int, split_tokens: int = 0) -> PackedBatch:
        """A batch of so many rows whose split region has `split_tokens` tokens, without arrays."""
        batch = self._batch(self.sizes[split_tokens], [_empty_row(split_tokens)], [()], 0)
        return jax.tree.map(
            lambda part: jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype), batch
        )

    def single_rows(self, part: MicroBatch) -> list[MicroBatch]:
        """The rows of a micro-batch of one sample each, as packed rows."""
        geometry = self.manifest.geometry(self.model.patch_size)
        found = []
        for row in range(part.rows):
            held = slice(row, row + 1)
            tokens = [int(geometry.seq_len(*self.manifest.shape[n])) for n in part.samples[held]]
            found.append(
                replace(
                    part,
                    rows=1,
                    samples=part.samples[held],
                    repetitions=part.repetitions[held],
                    row_plan=replace(
                        _empty_row(0),
                        tokens=tuple(tokens),
                        offsets=(0,) * len(tokens),
                        is_split=(False,) * len(tokens),
                        first=(0,) * len(tokens),
                        split_slots=(PADDING,) * len(tokens),
                    ),
                )
            )
        return found

    def _latent_tokens(self, sample: int, first: int, tokens: int) -> int:
        """How many of `tokens` tokens of a sample from `first` on are tokens of its latents.

        With joint attention those of its condition follow, where rows have room for them.
        """
        if not self.model.joint_attention:
            return tokens
        geometry = self.manifest.geometry(self.model.patch_size)
        latents = int(geometry.seq_len(*self.manifest.shape[sample]))
        return max(0, min(first + tokens, latents) - first)

    def shapes(self, plan: Plan) -> list[PackedBatch]:
        """See `Collation.shapes`; there is one shape for each A."""
        return [self.abstract(plan.topology.ranks, size) for size in sorted(self.sizes)[::-1]]

    def empty(self, parts: Sequence[MicroBatch], epoch: int) -> PackedBatch:
        """See `Collation.empty`; the metadata already holds the segments."""
        rows = [_row_plan(part) for part in parts]
        samples = [part.samples for part in parts]
        batch = self._batch(self.sizes[rows[0].split_tokens], rows, samples, epoch)
        for row, part in enumerate(parts):
            for slot, repetition in enumerate(part.repetitions):
                batch.epoch[row, slot] = noise_epoch(epoch, repetition)
        return batch

    def _batch(
        self,
        sizes: RowSizes,
        rows: Sequence[RowPlan],
        samples: Sequence[tuple[int, ...]],
        epoch: int,
    ) -> PackedBatch:
        """Builds a batch without the content of its samples from the plans of its rows."""
        table = np.zeros((2, len(rows), sizes.slots), np.int32)
        condition_table = np.zeros_like(table)
        epochs = np.full(table.shape[1:], epoch, np.int32)
        length = 0 if self.conditions.parts else self.conditions.length
        for row, row_plan in enumerate(rows):
            places = zip(samples[row], row_plan.first, row_plan.tokens, strict=True)
            for slot, (sample, first, tokens) in enumerate(places):
                latents = self._latent_tokens(sample, first, tokens)
                table[:, row, slot] = row_plan.offsets[slot], latents
                condition_table[:, row, slot] = slot * length, length
        volume, here = math.prod(self.model.patch_size), (len(rows), sizes.tokens)
        given, image = self.conditions.given(*here, volume), self.conditions.image(*table.shape[1:])
        return PackedBatch(
            tokens=np.zeros((*here, volume * self.model.latent_channels), np.float32),
            position=np.zeros((len(rows), sizes.tokens, 3), np.int32),
            metadata=PackedMetadata(
                tokens=segments_of(table, sizes.tokens),
                condition=segments_of(condition_table, sizes.condition),
                split=self._split(sizes, rows, samples, table) if sizes.split_tokens else None,
                grid=self.grid,
                lengths=sizes.lengths,
                longest_condition=max(1, length),
                row_tiles=None if sizes.split_tokens else self._row_tiles(sizes, rows, samples),
            ),
            condition=self._empty_condition(sizes, samples),
            sample=np.full((len(rows), sizes.slots), -1, np.int32),
            epoch=epochs,
            weight=np.zeros((len(rows), sizes.slots), np.float32),
            first=np.zeros((len(rows), sizes.slots), np.int32),
            seq_len=table[1].copy(),
            frame_tokens=np.ones(table.shape[1:], np.int32),
            given=None if given is None else np.zeros(given.shape, given.dtype).reshape(*here, -1),
            image=None if image is None else np.zeros(image.shape, image.dtype),
        )

    def _empty_condition(self, sizes: RowSizes, samples: Sequence[tuple[int, ...]]) -> Any:
        if self.part_tokens is None:
            return self.conditions.empty(len(samples), sizes.condition)
        reserved = [self.part_tokens[list(row)] for row in samples]
        return packed_parts(self.conditions, sizes.parts, sizes.slots, reserved)

    def _row_tiles(
        self, sizes: RowSizes, rows: Sequence[RowPlan], samples: Sequence[tuple[int, ...]]
    ) -> TileLayout | None:
        """Tiles of the tokens behind the split region; None if no sample is in tiles."""
        behind = sizes.tokens - sizes.split_tokens
        if self.tiling is None or not behind:
            return None
        slots = sizes.whole if sizes.split_tokens else sizes.slots
        return self.tiling.layout(list(map(_whole_samples, rows, samples)), behind, slots)

    def _split(
        self,
        sizes: RowSizes,
        rows: Sequence[RowPlan],
        samples: Sequence[tuple[int, ...]],
        table: np.ndarray,
    ) -> SplitRows:
        """Positions of whole samples behind the split region, and of the group's split samples."""
        split = np.zeros((2, len(rows), sizes.split), np.int32)
        whole = np.zeros((2, len(rows), sizes.whole), np.int32)
        slots = np.full((len(rows), sizes.slots), PADDING, np.int32)
        for row, row_plan in enumerate(rows):
            pairs = zip(row_plan.split_samples, row_plan.split_segments, strict=True)
            for slot, (sample, (offset, tokens)) in enumerate(pairs):
                split[:, row, slot] = offset, self._latent_tokens(sample, 0, tokens)
            slots[row, : len(row_plan.split_slots)] = row_plan.split_slots
            behind = table[:, row, table[0, row] >= sizes.split_tokens]
            whole[:, row, : behind.shape[1]] = behind - [[sizes.split_tokens], [0]]
        together, tiles = sizes.context * sizes.split_tokens, None
        if self.tiling is not None:
            in_group = self.tiling.layout(list(map(_split_samples, rows)), together, sizes.split)
            tiles = SplitTiles(self._row_tiles(sizes, rows, samples), in_group)
        return SplitRows(
            whole=segments_of(whole, sizes.tokens - sizes.split_tokens),
            split=segments_of(split, together),
            slots=slots if self.model.joint_attention else None,
            split_tokens=sizes.split_tokens,
            lengths=(sizes.whole_lengths, sizes.split_lengths),
            tiles=tiles,
        )

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, Place]]:
        """See `Collation.places`."""
        for row, part in enumerate(parts):
            row_plan = _row_plan(part)
            for slot, (sample, offset, first, tokens) in enumerate(
                zip(part.samples, row_plan.offsets, row_plan.first, row_plan.tokens, strict=True)
            ):
                yield sample, Place(row, slot, offset, first, tokens)

    def epoch_of(self, batch: PackedBatch, place: Place) -> int:
        """See `Collation.epoch_of`."""
        return int(batch.epoch[place.row, place.slot])

    def put(
        self,
        batch: PackedBatch,
        place: Place,
        sample: int,
        arrays: Arrays,
        condition: Any,
    ) -> None:
        """See `Collation.put`."""
        latents = arrays[LATENTS]
        row, slot = place.row, place.slot
        tokens = self._latent_tokens(sample, place.first, place.tokens)
        here = slice(place.offset, place.offset + tokens)
        in_sample = slice(place.first, place.first + tokens)
        patches = patchify(latents[None], self.model.patch_size)[0]
        grid = [n // p for n, p in zip(latents.shape[:3], self.model.patch_size, strict=True)]
        batch.tokens[row, here] = patches[in_sample]
        if batch.given is not None and GIVEN in arrays:
            given = patchify(arrays[GIVEN][None], self.model.patch_size)[0]
            batch.given[row, here] = given[in_sample]
        if batch.image is not None:
            batch.image[row, slot] = arrays[IMAGE]
        batch.position[row, here] = np.indices(grid).reshape(3, -1).T[in_sample]
        if self.conditions.parts:
            put_parts(batch.condition, row, slot, condition)
        else:
            begin = batch.metadata.condition.offset[row, slot]
            batch.condition[row, begin : begin + len(condition)] = condition
        batch.sample[row, slot] = sample
        batch.weight[row, slot] = tokens / len(patches)
        batch.first[row, slot] = place.first
        batch.seq_len[row, slot] = len(patches)
        batch.frame_tokens[row, slot] = grid[1] * grid[2]


def _row_plan(part: MicroBatch) -> RowPlan:
    assert part.row_plan is not None
    return part.row_plan


def _empty_row(split_tokens: int) -> RowPlan:
    return RowPlan(
        split_tokens,
        tokens=(),
        offsets=(),
        is_split=(),
        first=(),
        split_segments=(),
        split_samples=(),
        split_slots=(),
    )


def _whole_samples(row_plan: RowPlan, samples: tuple[int, ...]) -> list[PlacedSample]:
    """The samples of a row that are not split, behind its split region."""
    parts = zip(samples, row_plan.offsets, row_plan.is_split, strict=True)
    whole = [(sample, offset) for sample, offset, is_split in parts if not is_split]
    return [
        PlacedSample(sample, slot, offset - row_plan.split_tokens)
        for slot, (sample, offset) in enumerate(whole)
    ]


def _split_samples(row_plan: RowPlan) -> list[PlacedSample]:
    """The split samples of a row's context group."""
    offsets = (offset for offset, _ in row_plan.split_segments)
    pairs = enumerate(zip(row_plan.split_samples, offsets, strict=True))
    return [PlacedSample(sample, slot, offset) for slot, (sample, offset) in pairs]
