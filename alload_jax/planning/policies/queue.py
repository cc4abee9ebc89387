"""A shuffled epoch, read window by window; what a window defers goes into the next."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """Samples to place now.

    Attributes:
      sample: [N] int64, the manifest's row numbers, longest footprint first.
      footprint: [N] int64, tokens that each takes.
      age: [N] int64, how many windows deferred each.
      last: whether no window follows, so that all must be placed.
    """

    sample: np.ndarray
    footprint: np.ndarray
    age: np.ndarray
    last: bool


PlaceWindow = Callable[[Window], np.ndarray]
"""Places what it can of a window; returns a mask [N] of what it placed."""


def place_all(
    order: np.ndarray, footprint: np.ndarray, window_tokens: int, place: PlaceWindow
) -> None:
    """Hands `place` window after window until every sample is placed.

    Args:
      order: [N] int64, sample numbers, shuffled.
      footprint: [N] int64, tokens that each sample of the manifest takes.
      window_tokens: of a window, deferred samples included.
      place: places a window.
    """
    upto = np.cumsum(footprint[order])
    deferred, age = np.zeros(0, np.int64), np.zeros(0, np.int64)
    taken = 0
    last = False
    while not last:
        left = int(upto[-1] - (upto[taken - 1] if taken else 0) + footprint[deferred].sum())
        # A short last window would have little to choose from, so the one before takes it in.
        last = left <= window_tokens * 3 // 2
        free_tokens = max(0, window_tokens - int(footprint[deferred].sum()))
        start = int(upto[taken - 1]) if taken else 0
        stop = len(order) if last else int(np.searchsorted(upto, start + free_tokens, side="right"))
        new = order[taken:stop]
        window = _window(np.r_[deferred, new], np.r_[age + 1, np.zeros_like(new)], footprint, last)
        placed = place(window)
        deferred, age = window.sample[~placed], window.age[~placed]
        taken = stop


def _window(sample: np.ndarray, age: np.ndarray, footprint: np.ndarray, last: bool) -> Window:
    """Longest first; of equal length, those deferred most often."""
    ordered = np.lexsort((-age, -footprint[sample]))
    sample = sample[ordered]
    return Window(sample, footprint[sample], age[ordered], last)
