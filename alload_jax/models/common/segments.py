"""Where the segments of packed rows lie."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

PADDING = -1
"""The segment of tokens that belong to none."""

Lengths = tuple[tuple[int, int], ...]
"""What is static of segments' lengths, as (above, most): of the segments of a row at most so many
are longer than `above` tokens. The first is of 0, the last of the longest that there may be, of
which 0 are longer."""


class Segments(NamedTuple):
    """Up to M segments in each of R rows of T tokens; unused slots come last.

    Attributes:
      offset: [R, M] int32, the first token of each segment.
      length: [R, M] int32, its tokens; 0 in unused slots.
      ids: [R, T] int32, the slot of each token's segment, or PADDING.
    """

    offset: Any
    length: Any
    ids: Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("query", "key"),
    meta_fields=("lengths", "longest_key"),
)
@dataclass(frozen=True)
class AttentionSegments:
    """Who attends to whom in packed rows: segment m of the queries to segment m of the keys.

    Attributes:
      query: where segments lie among queries.
      key: where segments lie among keys.
      lengths: of the segments of queries.
      longest_key: a static bound on the tokens of a segment of keys; None where the keys' segments
        are those of the queries.
    """

    query: Segments
    key: Segments
    lengths: Lengths
    longest_key: int | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("whole", "joint"),
    meta_fields=("region", "lengths"),
)
@dataclass(frozen=True)
class SplitRows:
    """Who attends to whom where samples are split over the ranks of a context group.

    The first A tokens of each of a group's c rows, one row after another, make a joint row.

    Attributes:
      whole: segments of the other T − A tokens, counted from there.
      joint: segments of the joint row of c·A tokens; the same for all rows of a group.
      region: A.
      lengths: of the segments of `whole`, and of `joint`.
    """

    whole: Segments
    joint: Segments
    region: int
    lengths: tuple[Lengths, Lengths]

    def within_whole(self) -> AttentionSegments:
        """Tokens behind the region attend to those of their segment."""
        return _to_itself(self.whole, self.lengths[0])

    def within_joint(self) -> AttentionSegments:
        """Tokens of the joint row attend to those of their segment."""
        return _to_itself(self.joint, self.lengths[1])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "condition", "split"),
    meta_fields=("grid", "lengths", "longest_condition"),
)
@dataclass(frozen=True)
class PackedMetadata:
    """Where the segments of packed rows lie, among tokens and among condition tokens.

    Attributes:
      tokens, condition: the segments of each.
      split: where split samples lie, if some may be.
      grid: static, (t, h, w) in tokens of the largest sample along each; no position reaches it.
      lengths: static, of the segments of tokens.
      longest_condition: a static bound on the condition tokens of a segment.
    """

    tokens: Segments
    condition: Segments
    split: SplitRows | None
    grid: tuple[int, int, int]
    lengths: Lengths
    longest_condition: int

    def within_tokens(self) -> "AttentionSegments | SplitRows":
        """Tokens attend to those of their segment, or of their split sample."""
        return self.split or _to_itself(self.tokens, self.lengths)

    def to_condition(self) -> AttentionSegments:
        """Tokens attend to the condition of their segment."""
        return AttentionSegments(self.tokens, self.condition, self.lengths, self.longest_condition)


def _to_itself(segments: Segments, lengths: Lengths) -> AttentionSegments:
    return AttentionSegments(segments, segments, lengths, None)


def segments_of(table: np.ndarray, tokens: int) -> Segments:
    """Segments in host memory, from offsets and lengths [2, R, M] int32, of rows of `tokens`."""
    offset, length = table
    ids = np.full((len(offset), tokens), PADDING, np.int32)
    for row, slot in zip(*np.nonzero(length), strict=True):
        begin = offset[row, slot]
        ids[row, begin : begin + length[row, slot]] = slot
    return Segments(offset.astype(np.int32), length.astype(np.int32), ids)
