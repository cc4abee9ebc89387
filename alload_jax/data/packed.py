"""The packed layout: rows of equally many tokens that hold many samples each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from alload_jax.data.batch import Bounds, PackedBatch
from alload_jax.data.condition import Conditions
from alload_jax.data.manifest import Manifest
from alload_jax.models.config import DiTConfig
from alload_jax.models.packed_attention import WINDOWS
from alload_jax.models.patches import patchify
from alload_jax.models.segments import segments_of
from alload_jax.planning.plan import MicroBatch, Plan

_LONG_CONDITION, _SHORT_CONDITION = 512, 8
"""A row's condition tokens are a multiple of one of these, so that attention can show them to cuDNN
in equal windows: of the first where samples have as many."""


class Place(NamedTuple):
    """Where a sample lies in a packed batch: its row, its slot, its first token."""

    row: int
    slot: int
    offset: int


class RowSizes(NamedTuple):
    """Of a packed row: T tokens, M slots, C condition tokens."""

    tokens: int
    slots: int
    condition: int


@dataclass(frozen=True)
class PackedLayout:
    """Lays samples into packed rows (see `Layout`).

    What samples leave free of a row is cut into segments of filler, none much longer than the
    longest sample, each with one empty condition token. They are computed like samples, and weigh
    nothing.

    Attributes:
      manifest: of the samples.
      model: whose patches are tokens.
      conditions: of every sample.
      bounds: of all samples.
      sizes: of all rows.
    """

    manifest: Manifest
    model: DiTConfig
    conditions: Conditions
    bounds: Bounds
    sizes: RowSizes

    @classmethod
    def of(
        cls, plan: Plan, manifest: Manifest, model: DiTConfig, conditions: Conditions
    ) -> "PackedLayout":
        """The layout of a packed plan that splits no sample."""
        epoch = plan.epoch(0)
        assert epoch.packing is not None
        grid = manifest.geometry(model.patch_size).token_grid(*manifest.shape.T).max(axis=0)
        tokens, samples = int(epoch.padded_len[0]), epoch.packing.segments
        # Filler behind an aligned sample is shorter than the alignment: one segment. An empty row
        # has no more segments of filler than attention has windows.
        longest = max(int(plan.samples.seq_len.max()), epoch.packing.align, tokens // WINDOWS)
        # A row's end in pieces, and a gap behind each sample where they are aligned.
        filler = -(-tokens // longest) + (samples if epoch.packing.align > 1 else 0)
        long = conditions.length >= _LONG_CONDITION
        multiple = _LONG_CONDITION if long else _SHORT_CONDITION
        condition = samples * conditions.length + filler
        return cls(
            manifest,
            model,
            conditions,
            Bounds(tuple(grid.tolist()), longest, max(1, conditions.length)),
            RowSizes(tokens, samples + filler, -(-condition // multiple) * multiple),
        )

    def shapes(self, plan: Plan) -> list[PackedBatch]:
        """See `Layout.shapes`: there is one."""
        rows = plan.layout.ranks
        empty = self._batch(np.zeros((2, 1, self.sizes.slots), np.int32), [[]])
        return [
            jax.tree.map(
                lambda part: jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype), empty
            )
        ]

    def empty(self, parts: Sequence[MicroBatch]) -> PackedBatch:
        """See `Layout.empty`: samples' places are laid out, filler fills the rest."""
        table = np.zeros((2, len(parts), self.sizes.slots), np.int32)
        lengths = []
        for row, part in enumerate(parts):
            assert part.packed is not None
            laid = list(zip(part.packed.offsets, part.packed.tokens, strict=True))
            filler = _filler(laid, self.sizes.tokens, self.bounds.tokens)
            for slot, place in enumerate(laid + filler):
                table[:, row, slot] = place
            lengths.append([self.conditions.length] * len(laid) + [1] * len(filler))
        return self._batch(table, lengths)

    def _batch(self, table: np.ndarray, conditions: Sequence[Sequence[int]]) -> PackedBatch:
        """A batch without samples.

        Args:
          table: [2, R, M] int32, offsets and lengths of segments.
          conditions: condition tokens of each row's segments.
        """
        tokens, slots, condition_tokens = self.sizes
        rows = len(conditions)
        channels = self.model.in_channels * int(np.prod(self.model.patch_size))
        of_condition = np.zeros((2, rows, slots), np.int32)
        for row, lengths in enumerate(conditions):
            of_condition[1, row, : len(lengths)] = lengths
            of_condition[0, row, 1 : len(lengths)] = np.cumsum(lengths)[:-1]
        return PackedBatch(
            tokens=np.zeros((rows, tokens, channels), np.float32),
            position=np.zeros((rows, tokens, 3), np.int32),
            segments=segments_of(table[0], table[1], tokens),
            condition=self.conditions.empty(rows, condition_tokens),
            condition_segments=segments_of(of_condition[0], of_condition[1], condition_tokens),
            sample=np.full((rows, slots), -1, np.int32),
            weight=np.zeros((rows, slots), np.float32),
            bounds=self.bounds,
        )

    def places(self, parts: Sequence[MicroBatch]) -> Iterator[tuple[int, Place]]:
        """See `Layout.places`."""
        for row, part in enumerate(parts):
            assert part.packed is not None
            for slot, (sample, offset) in enumerate(
                zip(part.samples, part.packed.offsets, strict=True)
            ):
                yield sample, Place(row, slot, offset)

    def put(
        self,
        batch: PackedBatch,
        place: Place,
        sample: int,
        latents: np.ndarray,
        condition: np.ndarray,
    ) -> None:
        """See `Layout.put`."""
        row, slot, offset = place
        patches = patchify(latents[None], self.model.patch_size)[0]
        here = slice(offset, offset + len(patches))
        batch.tokens[row, here] = patches
        grid = [n // p for n, p in zip(latents.shape[:3], self.model.patch_size, strict=True)]
        batch.position[row, here] = np.indices(grid).reshape(3, -1).T
        first = batch.condition_segments.offset[row, slot]
        batch.condition[row, first : first + len(condition)] = condition
        batch.sample[row, slot] = sample
        batch.weight[row, slot] = 1.0


def _filler(laid: Sequence[tuple[int, int]], tokens: int, longest: int) -> list[tuple[int, int]]:
    """(offset, tokens) of segments that fill what (offset, tokens) of samples leave free."""
    ends = [0, *(offset + length for offset, length in sorted(laid))]
    begins = [*(offset for offset, _ in sorted(laid)), tokens]
    return [
        (begin, min(longest, stop - begin))
        for start, stop in zip(ends, begins, strict=True)
        for begin in range(start, stop, longest)
    ]
