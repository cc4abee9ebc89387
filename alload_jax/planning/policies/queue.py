"""A shuffled epoch, read window by window; what a window defers goes into the next one.

The last window places all that remains, so that every epoch holds each of its samples once. Steps
of all windows stand in random order, so that it does not matter for how long one was deferred.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

_LAST = 1.5
"""Windows of samples that remain, up to which they are the last window."""
_EASING = 4.0
"""Factor by which the tolerance grows where a window yields no step."""


@dataclass(frozen=True)
class Window:
    """Samples to place now.

    Attributes:
      sample: [N] int64, the manifest's row numbers, longest footprint first.
      footprint: [N] int64, tokens that each takes.
      is_last: whether all must be placed; else some may be deferred.
      easing: factor of the tolerance of rows of unlike cost in a step.
    """

    sample: np.ndarray
    footprint: np.ndarray
    is_last: bool
    easing: float = 1.0

    def taken(self, order: np.ndarray) -> "Window":
        """The samples in another order: [N] int64."""
        return replace(self, sample=self.sample[order], footprint=self.footprint[order])


PlaceWindow = Callable[[Window], np.ndarray]
"""Places what it can of a window, all of the last one; returns a mask [N] of what it placed."""


def place_epoch(
    order: np.ndarray, footprint: np.ndarray, window_tokens: float, place: PlaceWindow
) -> None:
    """Hands `place` window after window, until all samples are placed.

    Args:
      order: [N] int64, sample numbers of the epoch, shuffled.
      footprint: tokens that each sample of the manifest takes.
      window_tokens: of a window, deferred samples included.
      place: places a window.
    """
    upto = np.r_[0, np.cumsum(footprint[order])]
    waiting, taken, easing = order[:0], 0, 1.0
    while taken < len(order) or len(waiting):
        ready = int(footprint[waiting].sum())
        stop = len(order)
        if ready + int(upto[-1] - upto[taken]) > _LAST * window_tokens:
            most = int(upto[taken]) + max(0, int(window_tokens) - ready)
            stop = int(np.searchsorted(upto, most, side="right")) - 1
            if not len(waiting):  # one sample may be more than a window
                stop = max(stop, taken + 1)
        waiting, taken = np.r_[waiting, order[taken:stop]], stop
        waiting = waiting[np.argsort(-footprint[waiting], kind="stable")]
        placed = place(Window(waiting, footprint[waiting], taken == len(order), easing))
        easing = 1.0 if placed.any() else easing * _EASING
        waiting = waiting[~placed]
