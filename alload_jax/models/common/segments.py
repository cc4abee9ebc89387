"""Positions of the segments of packed rows."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.models.common.tile_layout import SplitTiles, TileLayout

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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("query", "key"),
    meta_fields=("lengths", "longest_key"),
)
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
    lengths: Lengths
    longest_key: int | None

    def shorter(self, than: int) -> "AttentionSegments":
        """Self-attention within the segments of fewer than `than` tokens alone."""
        return self.only(self.query.length < than, than - 1)

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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("whole", "split", "tiles", "slots"),
    meta_fields=("split_tokens", "lengths"),
)
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
    split_tokens: int
    lengths: tuple[Lengths, Lengths]
    tiles: SplitTiles | None = None
    slots: Any = None

    def within_whole(self) -> AttentionSegments:
        """Tokens behind the split region attend within their segment."""
        return _self_attention(self.whole, self.lengths[0])

    def within_split(self) -> AttentionSegments:
        """The group's split tokens attend within their segment."""
        return _self_attention(self.split, self.lengths[1])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "condition", "split", "row_tiles"),
    meta_fields=("grid", "lengths", "longest_condition"),
)
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
    grid: tuple[int, int, int]
    lengths: Lengths
    longest_condition: int
    row_tiles: TileLayout | None = None

    def within_tokens(self) -> "AttentionSegments | SplitRows":
        """Tokens attend within their segment or split sample."""
        return self.split or _self_attention(self.tokens, self.lengths)

    def tiles(self) -> TileLayout | SplitTiles | None:
        """Tiles of the samples that may have sparse self-attention; None if none may."""
        return self.row_tiles if self.split is None else self.split.tiles

    def to_equal_parts(self, keys: int) -> AttentionSegments:
        """Tokens attend to the part of their segment in `keys` keys, N for each slot."""
        parts = _equal_parts(self.tokens.length > 0, keys)
        each = keys // self.tokens.length.shape[1]
        return AttentionSegments(self.tokens, parts, self.lengths, each)

    def to_condition(self) -> AttentionSegments:
        """Tokens attend to the condition tokens of their segment."""
        return AttentionSegments(self.tokens, self.condition, self.lengths, self.longest_condition)


def _equal_parts(used: jax.Array, keys: int) -> Segments:
    """Segments of keys in which every slot has an equal part; `used`: [R, M] bool."""
    slots = used.shape[1]
    each = keys // slots
    offset = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32) * each, used.shape)
    ids = jnp.where(used, jnp.arange(slots, dtype=jnp.int32), PADDING)
    return Segments(offset, jnp.where(used, each, 0), jnp.repeat(ids, each, axis=1))


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
