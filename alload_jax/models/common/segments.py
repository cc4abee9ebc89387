"""Segments of packed rows, and the second layout of their tokens in three-dimensional tiles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alload_jax.sharding.mesh import CONTEXT
from pallas_kernels.block_sparse_attention import BlockLists, tile_order

Grid = tuple[int, int, int]

_STATIC = {"static": True}
"""Metadata of fields that programs depend on, by which `register_dataclass` knows them."""

cached_tile_order = lru_cache(maxsize=64)(tile_order)


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

    def from_part(self, part: jax.Array, tokens: int, slots: int) -> tuple["TileLayout", jax.Array]:
        """The blocks that hold the tokens of one of equal parts of a row, for queries.

        Args:
          part: number of the part.
          tokens: of a part, in the order of their tiles.
          slots: most segments of a part.

        Returns:
          Their layout, in which places of tokens of other parts are empty; the number of its first
          block in the row.
        """
        # Not full are the last block of each segment and one that the part begins with.
        blocks, block = min(self.blocks, tokens // self.block + slots + 1), self.block
        place = jax.lax.dynamic_slice_in_dim(self.place, part * tokens, tokens, axis=1)
        first = jnp.where(place < 0, self.blocks, place // block).min()
        first = jnp.minimum(first, self.blocks - blocks)

        def cut(x: jax.Array, size: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, first * size, blocks * size, axis=1)

        def own(source: jax.Array) -> jax.Array:
            source = source - part * tokens
            return jnp.where((source >= 0) & (source < tokens), source, -1)

        condition = self.condition
        if condition is not None:
            beside = jax.lax.dynamic_slice_in_dim(condition.place, part * tokens, tokens, axis=1)
            condition = replace(condition, source=own(condition.source), place=beside)
        layout = replace(
            self,
            source=own(cut(self.source, block)),
            place=jnp.where(place < 0, -1, place - first * block),
            tokens=cut(self.tokens, 1),
            segments=cut(self.segments, 1),
            condition=condition,
        )
        return layout, first

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


def clip_tiles(grid: Grid, block: int) -> tuple[TileLayout, np.ndarray, np.ndarray]:
    """The tiles of rows that hold one sample of (t, h, w) tokens each.

    Returns:
      Their layout, for tokens in the order of their tiles; [S] int32, the token, counted as by
      `patchify`, that is at each place; [S] int32, where each token is.
    """
    found = cached_tile_order(grid, block=block)
    tokens = jnp.asarray(found.tokens)[None]
    layout = TileLayout(None, None, tokens, jnp.zeros_like(tokens), block, tokens.shape[1])
    return layout, found.source[: len(found.place)], found.place


def clip_layout(grid: Grid, block: int, condition_tokens: int | None = None) -> TileLayout:
    """The layout of rows that hold a sample of (t, h, w) tokens as `patchify` orders them.

    Args:
      grid: (t, h, w).
      block: tokens of a block.
      condition_tokens: room for those of its condition behind them; None where it stands elsewhere.
    """
    found, beside = cached_tile_order(grid, block=block), condition_tokens or 0
    layout = empty_layout(1, len(found.place) + beside, len(found.tokens), block)
    lay_out(layout, 0, [TiledSegment(0, 0, grid)])
    rooms = 0 if condition_tokens is None else max(1, -(-condition_tokens // block))
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
        order = cached_tile_order(segment.grid, block=block)
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


def with_inverse(take: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """(x, index, inverse) → x at the index. The gradient takes by the inverse: no scatter."""
    run = jax.custom_vjp(take)
    run.defvjp(
        lambda x, index, inverse: (run(x, index, inverse), (index, inverse)),
        lambda saved, grad: (run(grad, *reversed(saved)), None, None),
    )
    return run


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


@with_inverse
def _moved(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """x at the indices, zeros where they are negative."""
    taken = jax.vmap(partial(jnp.take, axis=0, mode="clip"))(x, jnp.maximum(index, 0))
    return jnp.where((index >= 0).reshape(*index.shape, *(1,) * (x.ndim - 2)), taken, 0)


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
        return jnp.arange(self.ids.shape[1], dtype=jnp.int32) - to_tokens(self.offset, self.ids)

    def only(self, kept: jax.Array) -> "Segments":
        """Some of the segments, by [R, M] bool; tokens of the others become padding."""
        ids = jnp.where(to_tokens(kept, self.ids), self.ids, PADDING)
        return Segments(self.offset, jnp.where(kept, self.length, 0), ids)


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
    longest_key: int | None = field(default=None, metadata=_STATIC)

    def only(self, kept: jax.Array, longest: int) -> "AttentionSegments":
        """Attention within some of the segments.

        Args:
          kept: [R, M] bool, which.
          longest: most tokens that one of them has.
        """
        query, most = self.query.only(kept), min(self.lengths[-1][0], longest)
        bounds = (*(each for each in self.lengths[:-1] if each[0] < most), (most, 0))
        if self.longest_key is None:
            return AttentionSegments(query, query, bounds)
        return AttentionSegments(query, self.key.only(kept), bounds, min(self.longest_key, longest))


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
        return AttentionSegments(self.whole, self.whole, self.lengths[0])

    def within_split(self) -> AttentionSegments:
        """The group's split tokens attend within their segment."""
        return AttentionSegments(self.split, self.split, self.lengths[1])

    def from_part(self, part: jax.Array, ranks: int) -> AttentionSegments:
        """The split tokens of some ranks of the group attend to all tokens of their segments.

        Args:
          part: its number among parts of as many neighbouring ranks.
          ranks: in a part.
        """
        offset, length, ids = self.split
        count, bounds = ranks * self.split_tokens, self.lengths[1]
        begin, end = (jnp.clip(x - part * count, 0, count) for x in (offset, offset + length))
        ids = jax.lax.dynamic_slice_in_dim(ids, part * count, count, axis=1)
        longest_key, longest = bounds[-1][0], min(bounds[-1][0], count)
        lengths = (*(each for each in bounds[:-1] if each[0] < longest), (longest, 0))
        own = Segments(begin, end - begin, ids)
        return AttentionSegments(own, self.split, lengths, longest_key)


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
        return self.split or AttentionSegments(self.tokens, self.tokens, self.lengths)

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


def in_blocks(segments: Segments, block: int, count: int) -> tuple[TileLayout, jax.Array]:
    """Where tokens stand if each segment begins a block.

    Args:
      segments: the segments; `ids` may hold further tokens of theirs, which stand nowhere.
      block: places of a block.
      count: number of blocks, enough for all segments.

    Returns:
      The layout; [R, M] int32, the first block of each segment.
    """
    begin, length, ids = segments
    blocks = -(-length // block)
    first = jnp.cumsum(blocks, axis=1) - blocks
    slots = _slots(first, blocks, count)
    before = (jnp.arange(count) - to_tokens(first, slots)) * block
    tokens = jnp.where(slots == PADDING, 0, jnp.clip(to_tokens(length, slots) - before, 0, block))
    within = jnp.arange(block)
    source = (to_tokens(begin, slots) + before)[..., None] + within
    source = jnp.where(within < tokens[..., None], source, -1).reshape(len(tokens), -1)
    index = segments.place()
    counted = (ids != PADDING) & (index >= 0) & (index < to_tokens(length, ids))
    place = jnp.where(counted, to_tokens(first, ids) * block + index, -1)
    return TileLayout(source, place, tokens, slots, block, longest=count), first


def _slots(begin: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """[R, count] int32, the slot of each position by their spans, [R, M]; PADDING for none."""
    position = jnp.arange(count)[:, None]
    inside = (position >= begin[:, None]) & (position < (begin + length)[:, None])
    return jnp.where(inside, jnp.arange(length.shape[1]), PADDING).max(axis=-1)


# ---------------------------------------------------------------- rows that hold conditions too
# The tokens of latents and those of conditions attend to each other. The latents of a sample are
# ordered in tiles; the tokens of its condition follow one another in blocks of their own. Which
# tokens a sample's condition has is known in the step alone.


def with_conditions(
    layout: TileLayout | None, latents: Segments, joint: Segments
) -> TileLayout | None:
    """The layout with blocks of the conditions of those samples whose latents are in tiles.

    Args:
      layout: tiles of the latents, with room for `condition_blocks`; None if none is tiled.
      latents: the latents of the samples in the row.
      joint: the samples, each with its condition behind its latents.
    """
    if layout is None:
        return None
    tiled = layout.of_slots(latents.length.shape[1]).any(axis=-1)
    length = jnp.where(tiled, joint.length - latents.length, 0)
    conditions = Segments(latents.offset + latents.length, length, joint.ids)
    condition, _ = in_blocks(conditions, layout.block, layout.condition_blocks)
    return replace(layout, condition=replace(condition, longest=layout.longest_condition))


def with_condition_blocks(lists: BlockLists, layout: TileLayout, queries: TileLayout) -> BlockLists:
    """The lists, followed by all blocks of the condition of each block's sample.

    Args:
      lists: chosen blocks of the tiles.
      layout: the tiles, of which the conditions' blocks are numbered behind the others.
      queries: the tiles that have lists.
    """
    tiles = layout.condition
    assert tiles is not None
    same = queries.segments[:, :, None] == tiles.segments[:, None]
    same &= queries.tokens[:, :, None] > 0  # others are of no sample, as empty blocks are
    count = same.sum(axis=-1, dtype=jnp.int32)[:, None]
    first = layout.blocks + jnp.argmax(same, axis=-1).astype(jnp.int32)[:, None]
    indices = jnp.pad(lists.indices, ((0, 0),) * 3 + ((0, tiles.longest),))
    behind = jnp.arange(indices.shape[-1], dtype=jnp.int32) - lists.counts[..., None]
    added = (behind >= 0) & (behind < count[..., None])
    return replace(
        lists,
        indices=jnp.where(added, first[..., None] + behind, indices),
        counts=lists.counts + count,
        key_tokens=jnp.concatenate([lists.key_tokens, tiles.tokens], axis=1),
    )


def to_samples(layout: TileLayout, joint: AttentionSegments) -> AttentionSegments:
    """Condition tokens in blocks attend to all tokens of their sample in the row.

    Args:
      layout: the blocks of the conditions.
      joint: the samples in the row.
    """
    slots = joint.key.length.shape[1]
    same = layout.of_slots(slots)
    length = jnp.where(same, layout.tokens[:, None], 0).sum(axis=-1)
    valid = jnp.arange(layout.block) < layout.tokens[..., None]
    ids = jnp.where(valid, layout.segments[..., None], PADDING).reshape(len(layout.tokens), -1)
    offset = jnp.argmax(same, axis=-1).astype(jnp.int32) * layout.block
    queries = Segments(offset, length, ids)
    most = min(slots, max(1, layout.blocks))
    lengths = ((0, most), (max(1, layout.longest) * layout.block, 0))
    longest_key = joint.longest_key or joint.lengths[-1][0]
    return AttentionSegments(queries, joint.key, lengths, longest_key)


class JointRows(NamedTuple):
    """Positions of condition tokens in rows that hold both kinds of tokens.

    In bucketed rows all condition tokens follow those of the latents, padding last. In packed rows
    the tokens of a sample's condition follow those of its latents, in positions that are padding
    among the tokens of latents: joining writes the few condition tokens there, and moves no others.

    The tokens of a split sample's condition follow those of its latents among the split tokens of
    its group. Each rank with a part of the sample computes the whole condition, and joins those of
    its tokens whose positions are in its own row. No layer communicates more than for latents.

    Attributes:
      segments: positions of the samples with their conditions; None for bucketed rows without
        padding.
      packed: metadata of packed rows in which each sample has its condition, in segments and in
        tiles; of bucketed rows likewise if they have sparse attention, else None.
      place: [R, C] int32, the position of each condition token in packed rows; the row's length
        for padding and for tokens in the row of another rank. None for bucketed rows.
    """

    segments: AttentionSegments | SplitRows | None = None
    packed: PackedMetadata | None = None
    place: jax.Array | None = None

    def join(self, tokens: jax.Array, condition: jax.Array) -> jax.Array:
        """Joins tokens [R, T, ...] with those of the condition, [R, C, ...].

        Returns:
          [R, T, ...] packed, [R, T + C, ...] bucketed.
        """
        if self.place is None:
            return jnp.concatenate([tokens, condition], axis=1)
        put = jax.vmap(lambda row, place, part: row.at[place].set(part, mode="drop"))
        return put(tokens, self.place, condition)

    def separate(self, joined: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
        """Inverts `join` for rows of `tokens` tokens, up to tokens of no sample.

        Returns:
          [R, T, ...], in packed rows with tokens of conditions in its padding; and [R, C, ...],
          zeros in padding and for tokens in the row of another rank.
        """
        if self.place is None:
            return joined[:, :tokens], joined[:, tokens:]
        take = jax.vmap(lambda row, place: row.at[place].get(mode="fill", fill_value=0))
        return joined, take(joined, self.place)


def bucketed_joint_rows(
    tokens: int, condition: Segments | None, layout: TileLayout | None = None
) -> JointRows:
    """Joint rows of one sample each.

    Args:
      tokens: number of tokens of the latents.
      condition: the condition's tokens, padding last; None if there is no padding.
      layout: tiles of each row; None if attention is always dense.
    """
    if condition is not None:
        row_tokens, lengths = tokens + condition.ids.shape[1], tokens + condition.length[:, 0]
    elif layout is not None:
        rows, row_tokens = layout.place.shape
        lengths = jnp.full(rows, row_tokens, jnp.int32)
    else:
        return JointRows()
    zeros, bounds = jnp.zeros_like(lengths)[:, None], ((0, 1), (row_tokens, 0))
    joint = Segments(zeros, lengths[:, None], None)
    if layout is None:
        return JointRows(AttentionSegments(joint, joint, bounds))
    valid = jnp.arange(row_tokens) < lengths[:, None]
    joint = joint._replace(ids=jnp.where(valid, 0, PADDING))
    latents = Segments(zeros, jnp.full_like(zeros, tokens), None)
    tiles = with_conditions(layout, latents, joint)
    packed = PackedMetadata(joint, joint, None, (1, 1, 1), bounds, row_tokens, tiles)
    return JointRows(packed.within_tokens(), packed)


def packed_joint_rows(
    metadata: PackedMetadata, condition: Segments, sharding: NamedSharding | None = None
) -> JointRows:
    """Joint rows of several samples each.

    Args:
      metadata: positions of the samples in tokens. Each has room for its condition behind it, and
        `lengths` bounds the lengths of samples with their conditions.
      condition: the samples' tokens in the condition; parts of a split sample have all of them.
      sharding: sharding of rows over a mesh of Auto axes; rows with split samples need it.

    Raises:
      ValueError: rows with split samples have no sharding.
    """
    offset, length, ids = metadata.tokens
    if metadata.split is None:
        rows = JointRows(place=_places(condition, offset + length, ids.shape[1]))
        both = Segments(offset, length + condition.length, rows.join(ids, condition.ids))
        tiles = with_conditions(metadata.row_tiles, metadata.tokens, both)
        packed = replace(metadata, tokens=both, row_tiles=tiles)
        return JointRows(packed.within_tokens(), packed, rows.place)
    if sharding is None:
        raise ValueError("sharding is None, but the rows hold split samples; give their sharding")
    spec = jax.P(sharding.spec[0])
    place, split = jax.shard_map(
        _split_joint, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )(metadata.tokens, metadata.split, condition)
    return JointRows(split, replace(metadata, split=split), place)


def _places(condition: Segments, begin: jax.Array, tokens: int) -> jax.Array:
    """[R, C], the position of each condition token; `tokens` for padding.

    Args:
      condition: the samples' tokens in the condition.
      begin: [R, M], where the condition of each sample begins.
      tokens: of a row.
    """
    place = to_tokens(begin, condition.ids) + condition.place()
    return jnp.where(condition.ids == PADDING, tokens, place)


def _split_joint(
    tokens: Segments, split: SplitRows, condition: Segments
) -> tuple[jax.Array, SplitRows]:
    """Places of condition tokens in the row of one rank, and the joint segments of its group.

    It must run inside `shard_map`.
    """
    count, row_tokens = split.split_tokens, tokens.ids.shape[1]
    is_split = split.slots != PADDING
    in_group = to_tokens(split.split.offset + split.split.length, split.slots)
    behind = in_group - jax.lax.axis_index(CONTEXT) * count
    begin = jnp.where(is_split, behind, tokens.offset + tokens.length)
    place = _places(condition, begin, row_tokens)
    elsewhere = to_tokens(is_split, condition.ids) & ((place < 0) | (place >= count))
    place = jnp.where(elsewhere, row_tokens, place)
    number = jnp.where(is_split, row_tokens, jnp.cumsum(~is_split, axis=1) - 1)
    whole = _extended(split.whole, _by_slot(condition.length, number, split.whole))
    number = jnp.where(is_split, split.slots, row_tokens)
    own = _by_slot(condition.length, number, split.split)
    together = _extended(split.split, jax.lax.pmax(own, CONTEXT))
    tiles = split.tiles and SplitTiles(
        with_conditions(split.tiles.whole, split.whole, whole),
        with_conditions(split.tiles.split, split.split, together),
    )
    return place, replace(split, whole=whole, split=together, tiles=tiles, slots=None)


def _by_slot(lengths: jax.Array, slot: jax.Array, segments: Segments) -> jax.Array:
    """Lengths [1, M] of the samples of a row by their slots [1, M] among other segments."""
    none = jnp.zeros_like(segments.length)
    return none.at[:, slot[0]].max(lengths, mode="drop")


def _extended(segments: Segments, beside: jax.Array) -> Segments:
    """Segments of [1, T] with as many tokens more, [1, M], behind each of them."""
    offset, length, ids = segments
    length = length + beside
    return Segments(offset, length, _slots(offset, length, ids.shape[1]))
