"""Tokens in tiles: where each token of a row is in the blocks of sparse attention, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_sparse_attention import BlockSegments, TileOrder, tile_order

Grid = tuple[int, int, int]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("source", "place", "tokens", "segments", "condition"),
    meta_fields=("block", "longest", "covers_all", "condition_blocks", "longest_condition"),
)
@dataclass(frozen=True)
class TileLayout:
    """Places of the tokens of R rows in N blocks; R is 1 if all rows have the same.

    Attributes:
      source: [R, N·block] int32, the token at each place; −1 where there is none. None if tokens
        are in the order of their tiles already, each at its place.
      place: [R, S] int32, the place of each token; −1 for tokens that are in no tile; or None.
      tokens: [R, N] int32, valid tokens of each block, which are its first. Blocks without a token
        come last.
      segments: [R, N] int32, the segment of each block; −1 for none.
      block: static, places of a block.
      longest: static, most blocks that a segment has.
      covers_all: static, whether every segment of the rows is in tiles.
      condition_blocks: static, room for blocks of conditions that stand in the rows.
      longest_condition: static, most blocks that the condition of a segment has.
      condition: blocks of these conditions, numbered behind those of the tiles; None before a model
        has added them, and for conditions that do not stand in the rows.
    """

    source: Any
    place: Any
    tokens: Any
    segments: Any
    block: int
    longest: int
    covers_all: bool = True
    condition_blocks: int = 0
    longest_condition: int = 0
    condition: "TileLayout | None" = None

    def of_rows(self, rows: int) -> "TileLayout":
        """The layout of each of `rows` rows."""

        def wide(x: Any) -> Any:
            return None if x is None else jnp.broadcast_to(x, (rows, x.shape[1]))

        return replace(
            self,
            source=wide(self.source),
            place=wide(self.place),
            tokens=wide(self.tokens),
            segments=wide(self.segments),
        )

    @property
    def blocks(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @property
    def block_segments(self) -> BlockSegments:
        """As the selection of blocks takes them: queries and keys are the same blocks."""
        return BlockSegments(self.segments, self.segments)

    def blocks_of_segment(self) -> jax.Array:
        """[R, N] int32, blocks that the segment of each block has."""
        same = (self.segments[:, :, None] == self.segments[:, None]) & (self.tokens[:, None] > 0)
        return same.sum(axis=-1, dtype=jnp.int32)


class SplitTiles(NamedTuple):
    """Layouts of rows with samples that are split over a context group; None where none is tiled.

    Attributes:
      whole: of the tokens behind the split region.
      split: of the group's split tokens, equal for all rows of a group.
    """

    whole: TileLayout | None
    split: TileLayout | None


class TiledSegment(NamedTuple):
    """A segment of a row that is ordered in tiles.

    Attributes:
      slot: its number in the row.
      offset: its first token.
      grid: its (t, h, w) in tokens.
    """

    slot: int
    offset: int
    grid: Grid


class ClipTiles(NamedTuple):
    """Tiles of rows that hold one sample each, all of one size.

    Attributes:
      layout: for tokens in the order of their tiles.
      order: [S] int32, the token, counted as by `patchify`, that is at each place.
      place: [S] int32, where each token is.
    """

    layout: TileLayout
    order: np.ndarray
    place: np.ndarray


def clip_tiles(grid: Grid, block: int) -> ClipTiles:
    """The tiles of samples of (t, h, w) tokens."""
    found = _order(grid, block)
    tokens = jnp.asarray(found.tokens)[None]
    layout = TileLayout(None, None, tokens, jnp.zeros_like(tokens), block, tokens.shape[1])
    return ClipTiles(layout, found.source[: len(found.place)], found.place)


def joint_clip_layout(grid: Grid, block: int, condition_tokens: int) -> TileLayout:
    """The layout of rows that each hold a sample of (t, h, w) tokens, and then its condition.

    Args:
      grid: (t, h, w).
      block: tokens of a block.
      condition_tokens: room for those of the condition.
    """
    found, rooms = _order(grid, block), max(1, -(-condition_tokens // block))
    blocks = len(found.tokens)
    layout = empty_layout(1, len(found.place) + condition_tokens, blocks, block)
    lay_out(layout, 0, [TiledSegment(0, 0, grid)])
    return replace(layout, covers_all=True, condition_blocks=rooms, longest_condition=rooms)


def empty_layout(rows: int, tokens: int, blocks: int, block: int) -> TileLayout:
    """A layout in host memory with nothing in tiles, which `lay_out` fills.

    Args:
      rows: R.
      tokens: S.
      blocks: N, room for tiles.
      block: tokens of a block.
    """
    none = partial(np.full, fill_value=-1, dtype=np.int32)
    no_tokens = np.zeros((rows, blocks), np.int32)
    arrays = (none((rows, blocks * block)), none((rows, tokens)), no_tokens, none((rows, blocks)))
    return TileLayout(*arrays, block=block, longest=blocks, covers_all=False)


def lay_out(layout: TileLayout, row: int, segments: Sequence[TiledSegment]) -> None:
    """Puts segments of a row in tiles, one after another, in a layout in host memory.

    Raises:
      ValueError: they have more tiles than the layout has blocks.
    """
    at, block = 0, layout.block
    for segment in segments:
        order = _order(segment.grid, block)
        here = slice(at, at + len(order.tokens))
        if here.stop > layout.blocks:
            raise ValueError(f"row {row}: its samples have more than {layout.blocks} tiles")
        places = slice(at * block, here.stop * block)
        moved = order.source + segment.offset
        layout.source[row, places] = np.where(order.source < 0, -1, moved)
        tokens = slice(segment.offset, segment.offset + len(order.place))
        layout.place[row, tokens] = order.place + at * block
        layout.tokens[row, here] = order.tokens
        layout.segments[row, here] = segment.slot
        at = here.stop


@lru_cache(maxsize=64)
def _order(grid: Grid, block: int) -> TileOrder:
    return tile_order(grid, block=block)


def to_tiles(x: jax.Array, layout: TileLayout) -> jax.Array:
    """Orders tokens in tiles: [R, S, ...] → [R, N·block, ...], zeros at empty places.

    The last block may be cut short by the end of the array.
    """
    if layout.source is None:
        return x
    return _moved(x, layout.source, layout.place)


def from_tiles(x: jax.Array, layout: TileLayout) -> jax.Array:
    """Inverts `to_tiles`: [R, N·block, ...] → [R, S, ...], zeros for tokens in no tile."""
    if layout.place is None:
        return x
    return _moved(x, layout.place, layout.source)


def whole_blocks(x: jax.Array, layout: TileLayout) -> jax.Array:
    """Tokens in tiles as blocks: [R, S, ...] → [R, N, block, ...], zeros at empty places."""
    tiles = to_tiles(x, layout)
    missing = layout.blocks * layout.block - tiles.shape[1]
    padded = jnp.pad(tiles, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
    return padded.reshape(*layout.tokens.shape, layout.block, *x.shape[2:])


@jax.custom_vjp
def _moved(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """x at the indices, zeros where they are negative. The gradient is as simple: no scatter."""
    taken = jax.vmap(partial(jnp.take, axis=0, mode="clip"))(x, jnp.maximum(index, 0))
    return jnp.where((index >= 0).reshape(*index.shape, *(1,) * (x.ndim - 2)), taken, 0)


def _moved_forward(x: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple[jax.Array, Any]:
    return _moved(x, index, inverse), (index, inverse)


def _moved_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, None, None]:
    index, inverse = saved
    return _moved(grad, inverse, index), None, None


_moved.defvjp(_moved_forward, _moved_backward)
