"""Packed collation: rows of a fixed number of tokens with several samples each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from alload_jax.data.batch import HostBatch, PackedBatch, abstract
from alload_jax.data.condition import Conditions, Tokens, part_room, put_condition, whole_windows
from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LATENTS, Arrays
from alload_jax.models.common import segments
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.parts import patchify
from alload_jax.planning.epoch import MicroBatch, RowPlan
from alload_jax.planning.plan import Plan

THINNED = 0.75
"""A length starts a new class if the number of longer segments falls below this fraction."""


@dataclass(frozen=True)
class RowSizes:
    """Sizes of the rows of one program.

    Attributes:
      tokens: T, tokens per row.
      condition: condition tokens per row.
      lengths: bounds on the lengths of all segments of a row.
      split_tokens: A, tokens of the split region at the start of each row.
      context: c, ranks per context group.
      whole: maximum number of samples behind the split region.
      split: maximum number of split samples in a context group, and of their parts in a row.
      whole_lengths: bounds on the lengths of the segments behind the split region.
      split_lengths: bounds on the lengths of the split samples of a context group.
      parts: tokens per row of each kind of condition tokens whose number differs by sample.
    """

    tokens: int
    condition: int
    lengths: segments.Lengths
    split_tokens: int = 0
    context: int = 1
    whole: int = 1
    split: int = 0
    whole_lengths: segments.Lengths = ()
    split_lengths: segments.Lengths = ()
    parts: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """Maximum number of segments per row."""
        return self.whole + self.split


def row_sizes(plan: Plan, condition: int, split_tokens: int) -> RowSizes:
    """Returns the sizes of rows whose split region has `split_tokens` tokens.

    Args:
      plan: a packed plan.
      condition: condition tokens per sample.
      split_tokens: A, one of the plan's allowed split sizes.
    """
    epoch = plan.epoch(0)
    packing = epoch.packing
    assert packing is not None
    tokens, whole = int(epoch.padded_len[0]), packing.segments
    split = packing.region_segments if split_tokens else 0
    behind, together = tokens - split_tokens, packing.context * split_tokens
    seq_len = np.unique(plan.samples.seq_len)
    never_split = seq_len[seq_len <= packing.longest_whole]
    whole_range = _Range(behind, never_split, whole)
    parts_range = _Range(split_tokens, seq_len, split, cut=2)
    return RowSizes(
        tokens=tokens,
        split_tokens=split_tokens,
        context=packing.context,
        whole=whole,
        split=split,
        condition=int(whole_windows((whole + split) * condition, condition)),
        lengths=_lengths(whole_range, parts_range),
        whole_lengths=_lengths(whole_range),
        split_lengths=_lengths(_Range(together, seq_len, split)),
    )


class _Range(NamedTuple):
    """A range of consecutive tokens in which segments lie.

    Attributes:
      tokens: number of tokens of the range.
      seq_len: distinct lengths of the samples that can lie there, in tokens, ascending.
      samples: maximum number of samples.
      cut: number of ends of the range that samples may cross, 0 to 2.
    """

    tokens: int
    seq_len: np.ndarray
    samples: int
    cut: int = 0

    def longer(self, above: int) -> int:
        """Returns the maximum number of segments with more than `above` tokens."""
        longer = self.seq_len[np.searchsorted(self.seq_len, above, side="right") :]
        if not len(longer):
            return 0
        fit = self.tokens // int(longer[0]) + self.cut
        return min(self.samples, fit, self.tokens // (above + 1))


def _lengths(*ranges: _Range) -> segments.Lengths:
    """Returns bounds on the lengths of the segments in these ranges of a row."""
    lengths = [(0, max(1, sum(each.longer(0) for each in ranges)))]
    bounds = np.concatenate(
        [[1, *(each.tokens for each in ranges)], *(each.seq_len for each in ranges)]
    )
    for above in np.unique(bounds[bounds > 0]).tolist():
        if (found := sum(each.longer(above) for each in ranges)) < THINNED * lengths[-1][1]:
            lengths.append((above, found))
    return tuple(lengths)


@dataclass(frozen=True)
class Tiling:
    """Which samples are ordered in tiles, and the room that they need.

    A row has no room of its own for tiles: tokens stay one after another, and only attention sees
    them in blocks. Only a sample's last block has empty places, which bounds the blocks of a row.
    The tokens of split samples stand in the order of their tiles, so that a rank holds whole blocks
    but for two.

    Attributes:
      grids: [N, 3], the (t, h, w) of each sample in tokens.
      block: tokens of a block.
      min_tokens: samples of fewer tokens are in no tile.
      blocks_per_token: most blocks of a sample over its tokens.
      longest: most blocks of a sample.
      covers_all: whether every sample is in tiles.
      shortest: tokens of the shortest sample that is in tiles.
      condition_blocks: most blocks of a condition that stands in the row beside its sample; 0 for
        conditions that stand in no row.
    """

    grids: np.ndarray
    block: int
    min_tokens: int
    blocks_per_token: float
    longest: int
    covers_all: bool
    shortest: int
    condition_blocks: int

    @classmethod
    def of(
        cls, manifest: Manifest, model: ModelConfig, condition_tokens: int = 0
    ) -> "Tiling | None":
        """The tiling of a manifest's samples; None if none of them has sparse self-attention.

        Args:
          manifest: of the samples.
          model: config of the model.
          condition_tokens: most tokens of a condition that stands in the row beside its sample.
        """
        sparse = model.sparse_attention
        if sparse is None:
            return None
        grids = manifest.geometry(model.patch_size).token_grid(*manifest.shape.T)
        is_long = grids.prod(axis=1) >= sparse.min_tokens
        if not is_long.any():
            return None
        distinct = np.unique(grids[is_long], axis=0)
        counts = -(-distinct.prod(axis=1) // sparse.block)  # blocks are full but for the last
        return cls(
            grids=grids,
            block=sparse.block,
            min_tokens=sparse.min_tokens,
            blocks_per_token=float((counts / distinct.prod(axis=1)).max()),
            longest=int(counts.max()),
            covers_all=bool(is_long.all()),
            shortest=int(distinct.prod(axis=1).min()),
            condition_blocks=-(-condition_tokens // sparse.block),
        )

    def order(self, sample: int) -> np.ndarray:
        """The tokens of a sample, in the order of its tiles if it has any."""
        grid, tokens = self.grids[sample].tolist(), int(self.grids[sample].prod())
        if tokens < self.min_tokens:
            return np.arange(tokens)
        return segments.cached_tile_order(tuple(grid), block=self.block).source[:tokens]

    def layout(
        self,
        rows: Sequence[Sequence[tuple[int, int]]],
        tokens: int,
        slots: int,
        ordered: bool = False,
    ) -> segments.TileLayout:
        """The layout of rows of whole samples.

        Args:
          rows: the samples of each row in the order of their slots, each as its row number in the
            manifest and its first token.
          tokens: of a row.
          slots: most samples of a row.
          ordered: whether tokens are in the order of their tiles.
        """
        # A little more than the bound, which is a fraction computed in floating point.
        by_sample = int(tokens * self.blocks_per_token + 1e-6)
        blocks = max(1, min(by_sample, tokens // self.block + slots))
        layout = segments.empty_layout(len(rows), tokens, blocks, self.block)
        for row, samples in enumerate(rows):
            held = []
            for slot, (sample, offset) in enumerate(samples):
                frames, height, width = self.grids[sample].tolist()
                if (count := frames * height * width) >= self.min_tokens:
                    grid = (1, 1, count) if ordered else (frames, height, width)
                    held.append(segments.TiledSegment(slot, offset, grid))
            segments.lay_out(layout, row, held)
        return replace(
            layout,
            longest=min(self.longest, blocks),
            covers_all=self.covers_all,
            condition_blocks=self.condition_blocks * max(1, min(slots, tokens // self.shortest)),
            longest_condition=self.condition_blocks,
        )


class Place(NamedTuple):
    """Position of a sample, or a part of one, in a batch. A bucketed one has rows alone.

    Attributes:
      row: row of the batch.
      slot: slot of the segment in the row.
      offset: first token in the row.
      first: index of that token in the sample.
      tokens: number of tokens of the part.
      is_split: whether it is a part of a split sample.
    """

    row: int
    slot: int = 0
    offset: int = 0
    first: int = 0
    tokens: int = 0
    is_split: bool = False


@dataclass(frozen=True)
class PackedCollation:
    """Collates samples into packed rows; its methods are as those of `BucketedCollation`.

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
        cls,
        sizes: dict[int, RowSizes],
        seq_len: np.ndarray,
        manifest: Manifest,
        model: ModelConfig,
        conditions: Conditions,
    ) -> "PackedCollation":
        """The collation of rows of these sizes, of samples of `seq_len` [N] tokens."""
        grids = manifest.geometry(model.patch_size).token_grid(*manifest.shape.T)
        frames, height, width = grids.max(axis=0).tolist()
        tokens = conditions.part_tokens(manifest) if conditions.parts else None
        if tokens is not None:
            for size, each in sizes.items():
                room = part_room(tokens, seq_len, each.tokens, each.slots, size > 0)
                sizes[size] = replace(each, parts=tuple(room))
        tiling = Tiling.of(manifest, model, max(1, conditions.length) * model.joint_attention)
        return cls(manifest, model, conditions, (frames, height, width), sizes, tiling, tokens)

    def of_rows(self, manifest: Manifest, rows: np.ndarray) -> "PackedCollation":
        """The collation of a manifest whose samples are like those of these numbers, [n] int64."""
        tiling = self.tiling and replace(self.tiling, grids=self.tiling.grids[rows])
        tokens = None if self.part_tokens is None else self.part_tokens[rows]
        return replace(self, manifest=manifest, tiling=tiling, part_tokens=tokens)

    def abstract(self, rows: int, split_tokens: int = 0) -> PackedBatch:
        """A batch of so many rows whose split region has `split_tokens` tokens, without arrays."""
        batch = self._batch(self.sizes[split_tokens], [_empty_row(split_tokens)], [()], 0)
        return abstract(batch, rows)

    def single_rows(self, part: MicroBatch) -> list[MicroBatch]:
        """The rows of a micro-batch of one sample each, as packed rows."""
        geometry = self.manifest.geometry(self.model.patch_size)
        found = []
        for row in range(part.rows):
            held = slice(row, row + 1)
            plan = _empty_row(0)
            if samples := part.samples[held]:
                tokens = int(geometry.seq_len(*self.manifest.shape[samples[0]]))
                plan = RowPlan(0, (tokens,), (0,), (False,), (0,), (), (), (segments.PADDING,))
            times = part.repetitions[held]
            found.append(replace(part, rows=1, samples=samples, repetitions=times, row_plan=plan))
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
        """Every micro-batch of a plan; there is one shape for each A."""
        return [self.abstract(plan.topology.ranks, size) for size in sorted(self.sizes)[::-1]]

    def empty(self, parts: Sequence[MicroBatch], epoch: int) -> PackedBatch[np.ndarray]:
        """Builds a micro-batch without content; the metadata already holds the segments."""
        rows = [part.row_plan for part in parts if part.row_plan is not None]
        samples = [part.samples for part in parts]
        return self._batch(self.sizes[rows[0].split_tokens], rows, samples, epoch)

    def _batch(
        self,
        sizes: RowSizes,
        rows: Sequence[RowPlan],
        samples: Sequence[tuple[int, ...]],
        epoch: int,
    ) -> PackedBatch[np.ndarray]:
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
        given = self.conditions.given(*here, volume)
        reserved = []
        if self.part_tokens is not None:
            reserved = [self.part_tokens[list(row)] for row in samples]
        return PackedBatch(
            tokens=np.zeros((*here, volume * self.model.latent_channels), np.float32),
            position=np.zeros((len(rows), sizes.tokens, 3), np.int32),
            metadata=segments.PackedMetadata(
                tokens=segments.segments_of(table, sizes.tokens),
                condition=segments.segments_of(condition_table, sizes.condition),
                split=self._split(sizes, rows, samples, table) if sizes.split_tokens else None,
                grid=self.grid,
                lengths=sizes.lengths,
                longest_condition=max(1, length),
                row_tiles=None if sizes.split_tokens else self._row_tiles(sizes, rows, samples),
            ),
            condition=self.conditions.empty(
                len(rows), sizes.condition, sizes.parts, sizes.slots, reserved
            ),
            sample=np.full((len(rows), sizes.slots), -1, np.int32),
            epoch=epochs,
            weight=np.zeros((len(rows), sizes.slots), np.float32),
            seq_len=table[1].copy(),
            frame_tokens=np.ones(table.shape[1:], np.int32),
            line_tokens=np.ones(table.shape[1:], np.int32),
            given=None if given is None else given.reshape(*here, -1),
            image=self.conditions.image(*table.shape[1:]),
        )

    def _row_tiles(
        self, sizes: RowSizes, rows: Sequence[RowPlan], samples: Sequence[tuple[int, ...]]
    ) -> segments.TileLayout | None:
        """Tiles of the tokens behind the split region; None if no sample is in tiles."""
        behind = sizes.tokens - sizes.split_tokens
        if self.tiling is None or not behind:
            return None
        slots = sizes.whole if sizes.split_tokens else sizes.slots
        whole = []
        for row, held in zip(rows, samples, strict=True):
            placed = zip(held, row.offsets, row.is_split, strict=True)
            whole.append([(n, at - row.split_tokens) for n, at, split in placed if not split])
        return self.tiling.layout(whole, behind, slots)

    def _split(
        self,
        sizes: RowSizes,
        rows: Sequence[RowPlan],
        samples: Sequence[tuple[int, ...]],
        table: np.ndarray,
    ) -> segments.SplitRows:
        """Positions of whole samples behind the split region, and of the group's split samples."""
        split = np.zeros((2, len(rows), sizes.split), np.int32)
        whole = np.zeros((2, len(rows), sizes.whole), np.int32)
        slots = np.full((len(rows), sizes.slots), segments.PADDING, np.int32)
        for row, row_plan in enumerate(rows):
            pairs = zip(row_plan.split_samples, row_plan.split_segments, strict=True)
            for slot, (sample, (offset, tokens)) in enumerate(pairs):
                split[:, row, slot] = offset, self._latent_tokens(sample, 0, tokens)
            slots[row, : len(row_plan.split_slots)] = row_plan.split_slots
            behind = table[:, row, table[0, row] >= sizes.split_tokens]
            whole[:, row, : behind.shape[1]] = behind - [[sizes.split_tokens], [0]]
        together, tiles = sizes.context * sizes.split_tokens, None
        if self.tiling is not None:
            placed = (zip(row.split_samples, row.split_segments, strict=True) for row in rows)
            of_group = [[(sample, offset) for sample, (offset, _) in each] for each in placed]
            in_group = self.tiling.layout(of_group, together, sizes.split, ordered=True)
            tiles = segments.SplitTiles(self._row_tiles(sizes, rows, samples), in_group)
        return segments.SplitRows(
            whole=segments.segments_of(whole, sizes.tokens - sizes.split_tokens),
            split=segments.segments_of(split, together),
            slots=slots if self.model.joint_attention else None,
            split_tokens=sizes.split_tokens,
            lengths=(sizes.whole_lengths, sizes.split_lengths),
            tiles=tiles,
        )

    def of_parts(
        self, parts: Sequence[MicroBatch]
    ) -> tuple["PackedCollation", Sequence[MicroBatch]]:
        """The collation of a micro-batch, and its parts."""
        return self, parts

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, int, Place]]:
        """Yields each sample of the parts, which of its times it is, and its place in the batch."""
        for row, part in enumerate(parts):
            plan = part.row_plan
            assert plan is not None
            places = zip(plan.offsets, plan.first, plan.tokens, plan.is_split, strict=True)
            times = zip_longest(part.samples, part.repetitions, fillvalue=0)
            for slot, ((sample, time), place) in enumerate(zip(times, places, strict=True)):
                yield sample, time, Place(row, slot, *place)

    def put(
        self, batch: HostBatch, place: Place, sample: int, arrays: Arrays, condition: Tokens
    ) -> None:
        """Writes the arrays of a sample to its place in the batch."""
        assert isinstance(batch, PackedBatch)
        latents = arrays[LATENTS]
        row, slot = place.row, place.slot
        tokens = self._latent_tokens(sample, place.first, place.tokens)
        here = slice(place.offset, place.offset + tokens)
        in_sample: slice | np.ndarray = slice(place.first, place.first + tokens)
        if self.tiling is not None and place.is_split:
            in_sample = self.tiling.order(sample)[in_sample]
        patches = patchify(latents[None], self.model.patch_size)[0]
        grid = [n // p for n, p in zip(latents.shape[:3], self.model.patch_size, strict=True)]
        batch.tokens[row, here] = patches[in_sample]
        if batch.given is not None and GIVEN in arrays:
            given = patchify(arrays[GIVEN][None], self.model.patch_size)[0]
            batch.given[row, here] = given[in_sample]
        if batch.image is not None:
            batch.image[row, slot] = arrays[IMAGE]
        batch.position[row, here] = np.indices(grid).reshape(3, -1).T[in_sample]
        begin = int(batch.metadata.condition.offset[row, slot])
        put_condition(batch.condition, row, slot, begin, condition)
        batch.sample[row, slot] = self.manifest.number(sample)
        batch.weight[row, slot] = tokens / len(patches)
        batch.seq_len[row, slot] = len(patches)
        batch.frame_tokens[row, slot] = grid[1] * grid[2]
        batch.line_tokens[row, slot] = grid[2]


def _empty_row(split_tokens: int) -> RowPlan:
    return RowPlan(split_tokens, (), (), (), (), (), (), ())
