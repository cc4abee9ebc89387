"""Tiles of sparse self-attention in packed rows, laid out in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.tile_layout import (
    Grid,
    TiledSegment,
    TileLayout,
    empty_layout,
    lay_out,
)


class PlacedSample(NamedTuple):
    """A whole sample in a row.

    Attributes:
      sample: row number in the manifest.
      slot: its segment's number in the row.
      offset: its first token.
    """

    sample: int
    slot: int
    offset: int


@dataclass(frozen=True)
class Tiling:
    """Which samples are ordered in tiles, and the room that they need.

    A row has no room of its own for tiles: tokens stay one after another, and only attention sees
    them in blocks. Only a sample's last block has empty places, which bounds the blocks of a row.

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

    def layout(self, rows: Sequence[Sequence[PlacedSample]], tokens: int, slots: int) -> TileLayout:
        """The layout of rows of whole samples.

        Args:
          rows: the samples of each row.
          tokens: of a row.
          slots: most samples of a row.
        """
        # A little more than the bound, which is a fraction computed in floating point.
        by_sample = int(tokens * self.blocks_per_token + 1e-6)
        blocks = max(1, min(by_sample, tokens // self.block + slots))
        layout = empty_layout(len(rows), tokens, blocks, self.block)
        for row, samples in enumerate(rows):
            lay_out(layout, row, list(map(self._segment, filter(self._is_tiled, samples))))
        return replace(
            layout,
            longest=min(self.longest, blocks),
            covers_all=self.covers_all,
            condition_blocks=self.condition_blocks * max(1, min(slots, tokens // self.shortest)),
            longest_condition=self.condition_blocks,
        )

    def _is_tiled(self, placed: PlacedSample) -> bool:
        return int(self.grids[placed.sample].prod()) >= self.min_tokens

    def _segment(self, placed: PlacedSample) -> TiledSegment:
        return TiledSegment(placed.slot, placed.offset, _grid(self.grids[placed.sample]))


def _grid(grid: np.ndarray) -> Grid:
    frames, height, width = grid.tolist()
    return frames, height, width
