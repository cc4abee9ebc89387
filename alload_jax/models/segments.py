"""Where the segments of packed rows lie."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

PADDING = -1
"""The segment of tokens that belong to none."""


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
    meta_fields=("longest", "alike"),
)
@dataclass(frozen=True)
class Packed:
    """Who attends to whom in packed rows: segment m of the queries to segment m of the keys.

    Attributes:
      query: where segments lie among queries, every one of which belongs to a segment.
      key: where segments lie among keys.
      longest: static bounds on the tokens of a segment of queries, and of keys.
      alike: whether the keys' segments lie as those of the queries.
    """

    query: Segments
    key: Segments
    longest: tuple[int, int]
    alike: bool = False


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("whole", "joint"),
    meta_fields=("region", "longest"),
)
@dataclass(frozen=True)
class SplitRows:
    """Who attends to whom where samples are split over the ranks of a context group.

    The first A tokens of each of a group's c rows, one row after another, make a joint row.

    Attributes:
      whole: segments of the other T − A tokens, counted from there.
      joint: segments of the joint row of c·A tokens; the same for all rows of a group.
      region: A.
      longest: static bounds on the tokens of a segment of `whole`, and of `joint`.
    """

    whole: Segments
    joint: Segments
    region: int
    longest: tuple[int, int]

    def within_whole(self) -> Packed:
        """Tokens behind the region attend to those of their segment."""
        return _to_itself(self.whole, self.longest[0])

    def within_joint(self) -> Packed:
        """Tokens of the joint row attend to those of their segment."""
        return _to_itself(self.joint, self.longest[1])


class PackedRows(NamedTuple):
    """Where the segments of packed rows lie, among tokens and among condition tokens.

    Attributes:
      tokens, condition: the segments of each; every token belongs to one.
      longest: static bounds on the tokens and the condition tokens of a segment.
      split: where split samples lie, if some may be.
    """

    tokens: Segments
    condition: Segments
    longest: tuple[int, int]
    split: SplitRows | None = None

    def within_tokens(self) -> Packed | SplitRows:
        """Tokens attend to those of their segment, or of their split sample."""
        return self.split or _to_itself(self.tokens, self.longest[0])

    def to_condition(self) -> Packed:
        """Tokens attend to the condition of their segment."""
        return Packed(self.tokens, self.condition, self.longest)


def _to_itself(segments: Segments, longest: int) -> Packed:
    return Packed(segments, segments, (longest, longest), alike=True)


def segments_of(table: np.ndarray, tokens: int) -> Segments:
    """Segments in host memory, from offsets and lengths [2, R, M] int32, of rows of `tokens`."""
    offset, length = table
    ids = np.full((len(offset), tokens), PADDING, np.int32)
    for row, slot in zip(*np.nonzero(length), strict=True):
        begin = offset[row, slot]
        ids[row, begin : begin + length[row, slot]] = slot
    return Segments(offset.astype(np.int32), length.astype(np.int32), ids)
