"""Segments of packed rows, and the second layout of their tokens in three-dimensional tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from pallas_kernels.block_sparse_attention import tile_order

Grid = tuple[int, int, int]

_STATIC = {"static": True}
"""Metadata of fields that programs depend on, by which `register_dataclass` knows them."""

_order = lru_cache(maxsize=64)(tile_order)


@jax.tree_util.register_dataclass
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
    block: int = field(metadata=_STATIC)
    longest: int = field(metadata=_STATIC)
    covers_all: bool = field(default=True, metadata=_STATIC)
    condition_blocks: int = field(default=0, metadata=_STATIC)
    longest_condition: int = field(default=0, metadata=_STATIC)
    condition: "TileLayout | None" = None

    def of_rows(self, rows: int) -> "TileLayout":
        """The layout of each of `rows` rows."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, x.shape[1])), self)

    @property
    def blocks(self) -> int:
        """N."""
        return self.tokens.shape[1]

    def of_slots(self, slots: int) -> jax.Array:
        """[R, M, N] bool, which blocks with tokens are of each of M segments."""
        of_slot = self.segments[:, None] == jnp.arange(slots)[:, None]
        return of_slot & (self.tokens[:, None] > 0)


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
    found = _order(grid, block=block)
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
    found, rooms = _order(grid, block=block), max(1, -(-condition_tokens // block))
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
        order = _order(segment.grid, block=block)
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


def _moved_forward(x: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple[jax.Array, PyTree]:
    return _moved(x, index, inverse), (index, inverse)


def _moved_backward(saved: PyTree, grad: jax.Array) -> tuple[jax.Array, None, None]:
    index, inverse = saved
    return _moved(grad, inverse, index), None, None


_moved.defvjp(_moved_forward, _moved_backward)


PADDING = -1
"""Segment id of padding tokens, which belong to no segment."""

Lengths = tuple[tuple[int, int], ...]
"""Static bounds on the lengths of segments, as pairs (above, most): at most `most` segments of a
row are longer than `above` tokens. In the first pair `above` is 0; in the last pair it is the
maximum length and `most` is 0."""


class Segments(NamedTuple):
    """Up to M segments in each of R rows of T tokens; unused slots come last.

    Attributes:
      offset: [R, M] int32, first token of each segment.
      length: [R, M] int32, number of tokens of each segment; 0 in unused slots.
      ids: [R, T] int32, slot of each token's segment, or PADDING.
    """

    offset: Any
    length: Any
    ids: Any

    def place(self) -> jax.Array:
        """[R, T] int32, place of each token in its segment, from 0; padding has any place."""
        first = jnp.take_along_axis(self.offset, jnp.maximum(self.ids, 0), axis=1)
        return jnp.arange(self.ids.shape[1], dtype=jnp.int32) - first


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionSegments:
    """Attention in packed rows: segment m of the queries attends to segment m of the keys.

    Attributes:
      query: positions of the segments in the queries.
      key: positions of the segments in the keys.
      lengths: static bounds on the lengths of the query segments.
      longest_key: static upper bound on the tokens of a key segment; None if keys and queries have
        the same segments.
    """

    query: Segments
    key: Segments
    lengths: Lengths = field(metadata=_STATIC)
    longest_key: int | None = field(metadata=_STATIC)

    def only(self, kept: jax.Array, longest: int) -> "AttentionSegments":
        """Self-attention within some of the segments.

        Args:
          kept: [R, M] bool, which.
          longest: most tokens that one of them has.
        """
        offset, length, ids = self.query
        is_kept = jnp.take_along_axis(kept, jnp.maximum(ids, 0), axis=1)
        ids = jnp.where(is_kept, ids, PADDING)
        segments = Segments(offset, jnp.where(kept, length, 0), ids)
        longest = min(self.lengths[-1][0], longest)
        bounds = tuple(each for each in self.lengths[:-1] if each[0] < longest)
        return _self_attention(segments, (*bounds, (longest, 0)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitRows:
    """Attention in rows with samples that are split over the ranks of a context group.

    The first A tokens of each row are its split region. The split regions of the c rows of a
    context group, one after another, hold the c·A split tokens of the group.

    Attributes:
      whole: segments of the other T − A tokens; offsets count from token A.
      split: segments of the group's c·A split tokens; equal for all rows of a group.
      split_tokens: A, tokens per row.
      lengths: static bounds on the lengths of the segments of `whole` and of `split`.
      tiles: tiles of sparse self-attention, whose segments are those of `whole` and of `split`.
      slots: [R, M] int32, the slot in `split` of each of a row's segments, PADDING for segments of
        `whole`; None for models whose condition tokens do not stand in the rows.
    """

    whole: Segments
    split: Segments
    split_tokens: int = field(metadata=_STATIC)
    lengths: tuple[Lengths, Lengths] = field(metadata=_STATIC)
    tiles: SplitTiles | None = None
    slots: Any = None

    def within_whole(self) -> AttentionSegments:
        """Tokens behind the split region attend within their segment."""
        return _self_attention(self.whole, self.lengths[0])

    def within_split(self) -> AttentionSegments:
        """The group's split tokens attend within their segment."""
        return _self_attention(self.split, self.lengths[1])

    def from_rank(self, rank: jax.Array) -> AttentionSegments:
        """The split tokens of one rank of the group attend to all tokens of their segments."""
        offset, length, ids = self.split
        count, bounds = self.split_tokens, self.lengths[1]
        begin, end = (jnp.clip(x - rank * count, 0, count) for x in (offset, offset + length))
        ids = jax.lax.dynamic_slice_in_dim(ids, rank * count, count, axis=1)
        longest_key, longest = bounds[-1][0], min(bounds[-1][0], count)
        lengths = (*(each for each in bounds[:-1] if each[0] < longest), (longest, 0))
        return AttentionSegments(
            Segments(begin, end - begin, ids), self.split, lengths, longest_key
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMetadata:
    """Positions of the segments of packed rows, in tokens and in condition tokens.

    Attributes:
      tokens: segments of the tokens.
      condition: segments of the condition tokens.
      split: positions of split samples; None if the rows hold none.
      grid: static, maximum (t, h, w) of the samples in tokens; positions are below it.
      lengths: static bounds on the lengths of the segments of tokens.
      longest_condition: static upper bound on the condition tokens of a segment.
      row_tiles: tiles of sparse self-attention in rows without split samples.
    """

    tokens: Segments
    condition: Segments
    split: SplitRows | None
    grid: Grid = field(metadata=_STATIC)
    lengths: Lengths = field(metadata=_STATIC)
    longest_condition: int = field(metadata=_STATIC)
    row_tiles: TileLayout | None = None

    def within_tokens(self) -> "AttentionSegments | SplitRows":
        """Tokens attend within their segment or split sample."""
        return self.split or _self_attention(self.tokens, self.lengths)

    def tiles(self) -> TileLayout | SplitTiles | None:
        """Tiles of the samples that may have sparse self-attention; None if none may."""
        return self.row_tiles if self.split is None else self.split.tiles

    def to_equal_parts(self, keys: int) -> AttentionSegments:
        """Tokens attend to the part of their segment in `keys` keys, N for each slot."""
        used = self.tokens.length > 0
        number = jnp.arange(used.shape[1], dtype=jnp.int32)
        each = keys // used.shape[1]
        ids = jnp.repeat(jnp.where(used, number, PADDING), each, axis=1)
        offset = jnp.broadcast_to(number * each, used.shape)
        parts = Segments(offset, jnp.where(used, each, 0), ids)
        return AttentionSegments(self.tokens, parts, self.lengths, each)

    def to_condition(self) -> AttentionSegments:
        """Tokens attend to the condition tokens of their segment."""
        return AttentionSegments(self.tokens, self.condition, self.lengths, self.longest_condition)


def _self_attention(segments: Segments, lengths: Lengths) -> AttentionSegments:
    return AttentionSegments(segments, segments, lengths, None)


def segments_of(table: np.ndarray, tokens: int) -> Segments:
    """Builds segments in host memory.

    Args:
      table: [2, R, M] int32, offsets and lengths.
      tokens: T, tokens per row.
    """
    offset, length = table
    ids = np.full((len(offset), tokens), PADDING, np.int32)
    for row, slot in zip(*np.nonzero(length), strict=True):
        begin = offset[row, slot]
        ids[row, begin : begin + length[row, slot]] = slot
    return Segments(offset.astype(np.int32), length.astype(np.int32), ids)


def to_tokens(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Expands values per segment to tokens; padding gets the value of the first segment.

    Args:
      values: [R, M, ...].
      ids: [R, T] int32, slot of each token's segment.

    Returns:
      [R, T, ...].
    """
    return jax.vmap(lambda row, slot: row[jnp.maximum(slot, 0)])(values, ids)
