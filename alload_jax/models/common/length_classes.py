"""Segments of packed rows by length, and how cuDNN is shown those of each class.

For every slot cuDNN launches blocks, and sets memory aside, for as many tokens as the row has that
it is shown: a slot for a segment of 256 tokens costs as much as one for 300,000. Classes of
lengths, each shown to cuDNN by itself in rows that are no longer than it needs, keep that in
proportion to the tokens.
"""

import math
from typing import NamedTuple

from alload_jax.models.common.segments import Lengths

_WINDOWS = 64
"""Most windows that a row is shown as."""
_WINDOW_MULTIPLE = 8
_CLASS_COST = 4
"""Of a further class, in passes over the rows' tokens: outputs and gradients are put together."""


class Windows(NamedTuple):
    """How cuDNN is shown packed rows: as `number` rows, each as long as a segment may be.

    Segments lie at offsets counted over all rows, and may cross from one of these windows to the
    next.
    """

    number: int
    queries: int
    keys: int


class LengthClass(NamedTuple):
    """Segments of more than `above` queries, up to a bound.

    Attributes:
      above: 0 in the lowest class.
      longest: most queries of a segment.
      slots: most of the segments of all rows that there can be.
      windows: how cuDNN is shown them.
    """

    above: int
    longest: int
    slots: int
    windows: Windows

    @property
    def launched(self) -> int:
        """Tokens of queries that cuDNN launches blocks for, and sets memory aside."""
        return self.slots * self.windows.queries


def length_classes(
    queries: tuple[int, int], keys: tuple[int, int], lengths: Lengths, longest_key: int | None
) -> tuple[LengthClass, ...]:
    """The classes of least cost, shortest segments first.

    Args:
      queries, keys: (rows, tokens) of both.
      lengths: of the segments of queries in each row.
      longest_key: a bound on the keys of a segment; None where it has as many as queries.
    """
    passes = _CLASS_COST * math.prod(queries)
    # For each of the lengths: the least cost of classes up to it, and those classes.
    best: list[tuple[int, tuple[LengthClass, ...]]] = [(0, ())]
    for longest, _ in lengths[1:]:
        windows = windows_for(queries, keys, (longest, longest_key or longest))
        found = []
        for (above, most), (cost, shorter) in zip(lengths, best, strict=False):
            each = LengthClass(above, longest, queries[0] * most, windows)
            found.append((cost + each.launched + passes, (*shorter, each)))
        best.append(min(found, key=lambda classes: classes[0]))
    return best[-1][1]


def windows_for(
    queries: tuple[int, int], keys: tuple[int, int], longest: tuple[int, int]
) -> Windows:
    """The most windows that the longest segments fit into, from (rows, tokens) of both."""
    totals = math.prod(queries), math.prod(keys)
    for count in range(_WINDOWS * queries[0], 0, -1):
        sizes = [total // count for total in totals]
        whole = not any(total % count for total in totals)
        if whole and all(
            size >= most and size % _WINDOW_MULTIPLE == 0
            for size, most in zip(sizes, longest, strict=True)
        ):
            return Windows(count, *sizes)
    # Lengths that are no multiples, such as in tests.
    return Windows(queries[0], queries[1], keys[1])
