"""Segments of packed rows by length, and how cuDNN is shown those of each class.

For every slot cuDNN launches blocks, and sets memory aside, for as many tokens as the row has that
it is shown: a slot for a segment of 256 tokens costs as much as one for 300,000. Classes of
lengths, each shown to cuDNN by itself in rows that are no longer than it needs, keep that in
proportion to the tokens.
"""

import itertools
import math
from typing import NamedTuple

WINDOWS = 64
"""Most windows that a row is shown as."""
_WINDOW_MULTIPLE = 8
_SHORTER = (4, 16, 64)
"""Classes end at the longest segment's length divided by these."""
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
      above: −1 in the lowest class, which has the unused slots too.
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
    queries: tuple[int, int],
    keys: tuple[int, int],
    slots: int,
    longest: tuple[int, int],
    alike: bool,
) -> tuple[LengthClass, ...]:
    """The classes of least cost, shortest segments first.

    Args:
      queries, keys: (rows, tokens) of both.
      slots: segments of all rows, used or not.
      longest: bounds on the queries and on the keys of a segment.
      alike: whether segments have as many keys as queries.
    """
    total = math.prod(queries)

    def classes_of(divisors: tuple[int, ...]) -> tuple[LengthClass, ...]:
        bounds = sorted({-(-longest[0] // divisor) for divisor in (*divisors, 1)})
        found = []
        for above, bound in zip([-1, *bounds], bounds, strict=False):
            most = min(slots, total // (above + 1)) if above > 0 else slots
            widest = windows_for(queries, keys, (bound, bound if alike else longest[1]))
            found.append(LengthClass(above, bound, most, widest))
        return tuple(found)

    def cost(classes: tuple[LengthClass, ...]) -> int:
        return sum(each.launched for each in classes) + _CLASS_COST * total * len(classes)

    subsets = (itertools.combinations(_SHORTER, n) for n in range(len(_SHORTER) + 1))
    return min(map(classes_of, itertools.chain.from_iterable(subsets)), key=cost)


def windows_for(
    queries: tuple[int, int], keys: tuple[int, int], longest: tuple[int, int]
) -> Windows:
    """The most windows that the longest segments fit into, from (rows, tokens) of both."""
    totals = math.prod(queries), math.prod(keys)
    for count in range(WINDOWS * queries[0], 0, -1):
        sizes = [total // count for total in totals]
        whole = not any(total % count for total in totals)
        if whole and all(
            size >= most and size % _WINDOW_MULTIPLE == 0
            for size, most in zip(sizes, longest, strict=True)
        ):
            return Windows(count, *sizes)
    # Lengths that are no multiples, such as in tests.
    return Windows(queries[0], queries[1], keys[1])
