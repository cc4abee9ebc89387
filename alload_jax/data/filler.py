"""What samples leave free of a row."""

from typing import NamedTuple

Span = tuple[int, int]
"""The first token, and how many."""


class Laid(NamedTuple):
    """Where samples lie.

    Attributes:
      parts: of a rank's row.
      joint: of the joint row of the rank's group.
    """

    parts: list[Span]
    joint: list[Span]


def free_places(laid: list[Span], start: int, stop: int, longest: int) -> list[Span]:
    """Spans that fill what `laid` leaves free of tokens [start, stop), none over `longest`."""
    inside = sorted(span for span in laid if start <= span[0] < stop)
    ends = [start, *(offset + length for offset, length in inside)]
    begins = [*(offset for offset, _ in inside), stop]
    return [
        (begin, min(longest, before - begin))
        for after, before in zip(ends, begins, strict=True)
        for begin in range(after, before, longest)
    ]
