"""Classes of segment lengths in packed rows, and the row shape that cuDNN gets for each class.

For every slot, cuDNN launches blocks and allocates memory for the full length of its rows: a slot
for a segment of 256 tokens costs as much as one for 300,000. One call per class of lengths, with
rows as short as the class allows, keeps the cost proportional to the tokens.
"""

import math
from typing import NamedTuple

from alload_jax.models.common.segments import Lengths

_WINDOWS = 64
"""Maximum number of windows per row."""
_WINDOW_MULTIPLE = 8
_CLASS_COST = 4
"""Cost of each additional class, in passes over the tokens: outputs and gradients are merged."""


class Windows(NamedTuple):
    """Shape in which cuDNN gets packed rows: `number` windows, each as long as the longest segment.

    Offsets of segments count over all rows, and a segment may extend from one window into the next.

    Attributes:
      number: number of windows.
      queries: query tokens per window.
      keys: key tokens per window.
    """

    number: int
    queries: int
    keys: int


class LengthClass(NamedTuple):
    """Segments with more than `above` and at most `longest` query tokens.

    Attributes:
      above: lower bound in tokens, exclusive; 0 for the shortest class.
      longest: upper bound in tokens, inclusive.
      slots: maximum number of such segments in all rows.
      windows: shape in which cuDNN gets the rows.
    """

    above: int
    longest: int
    slots: int
    windows: Windows

    @property
    def launched(self) -> int:
        """Query tokens for which cuDNN launches blocks and allocates memory."""
        return self.slots * self.windows.queries


def length_classes(
    queries: tuple[int, int], keys: tuple[int, int], lengths: Lengths, longest_key: int | None
) -> tuple[LengthClass, ...]:
    """Chooses the classes with the lowest cost, shortest segments first.

    Args:
      queries, keys: (rows, tokens) of queries and of keys.
      lengths: bounds on the lengths of the query segments in each row.
      longest_key: upper bound on the key tokens of a segment; None if queries and keys have equal
        lengths.
    """
    passes = _CLASS_COST * math.prod(queries)
    # For each length: the lowest cost of classes up to that length, and those classes.
    best: list[tuple[int, tuple[LengthClass, ...]]] = [(0, ())]
    for longest, _ in lengths[1:]:
        windows = windows_for(queries, keys, (longest, longest_key or longest))
        found = []
        for (above, most), (cost, shorter) in zip(lengths, best, strict=False):
            each = LengthClass(above, longest, queries[0] * most, windows)
            found.append((cost + each.launched + passes, (*shorter, each)))
        best.append(min(found, key=lambda classes: classes[0]))
    return best[-1][1]


def launched_tokens(rows: int, tokens: int, lengths: Lengths) -> int:
    """Query tokens of the largest call of cuDNN for self-attention within packed rows.

    Its backward pass holds float32 gradients of queries for so many tokens.
    """
    classes = length_classes((rows, tokens), (rows, tokens), lengths, None)
    return max(each.launched for each in classes)


def windows_for(
    queries: tuple[int, int], keys: tuple[int, int], longest: tuple[int, int]
) -> Windows:
    """Returns the shortest windows that hold the longest segments.

    Args:
      queries, keys: (rows, tokens) of queries and of keys.
      longest: maximum number of query tokens and of key tokens in a segment.
    """
    totals = math.prod(queries), math.prod(keys)
    for count in range(_WINDOWS * queries[0], 0, -1):
        sizes = [total // count for total in totals]
        whole = not any(total % count for total in totals)
        if whole and all(
            size >= most and size % _WINDOW_MULTIPLE == 0
            for size, most in zip(sizes, longest, strict=True)
        ):
            return Windows(count, *sizes)
    # The lengths are not multiples, as in some tests.
    return Windows(queries[0], queries[1], keys[1])
