"""A shuffled epoch, read window by window; what a window defers goes into the next one.

Samples that remain when an epoch ends are carried into the next one. Every sample is placed once
for each epoch, at most `MOST_LATE` epochs late, and no step is short because an epoch ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from alload_jax.planning.epoch import LeftOver

MOST_LATE = 2
"""Epochs by which a sample may be late."""
_LITTLE, _FEW_STEPS = 0.25, 4
"""Share of a window, or number of steps, that may be left to the next epoch: few samples are hard
to balance."""
_EASING, _MOST_EASING = 4.0, 100.0
"""Factor by which the tolerance grows where a window yields no step, until all must be placed."""


@dataclass(frozen=True)
class Window:
    """Samples to place now.

    Attributes:
      sample: [N] int64, the manifest's row numbers, longest footprint first.
      footprint: [N] int64, tokens that each takes.
      late: [N] int64, epochs by which each sample is late.
      must: [N] bool, whether a sample cannot be deferred.
      easing: factor of the tolerance of rows of unlike cost in a step.
    """

    sample: np.ndarray
    footprint: np.ndarray
    late: np.ndarray
    must: np.ndarray
    easing: float

    def taken(self, order: np.ndarray) -> "Window":
        """The samples in another order: [N] int64."""
        return replace(
            self,
            sample=self.sample[order],
            footprint=self.footprint[order],
            late=self.late[order],
            must=self.must[order],
        )


PlaceWindow = Callable[[Window], np.ndarray]
"""Places what it can of a window, and all that must be; returns a mask [N] of what it placed."""


@dataclass(frozen=True)
class _Waiting:
    """Samples that are not placed yet: numbers, windows that deferred them, epochs of delay."""

    sample: np.ndarray
    age: np.ndarray
    late: np.ndarray

    def joined(self, new: np.ndarray) -> "_Waiting":
        """With further samples of this epoch; the others are a window older."""
        return _Waiting(
            np.r_[self.sample, new],
            np.r_[self.age + 1, np.zeros_like(new)],
            np.r_[self.late, np.zeros_like(new)],
        )

    def window(
        self, footprint: np.ndarray, must: np.ndarray, easing: float = 1.0
    ) -> tuple[Window, np.ndarray]:
        """Longest first; of equal length, those deferred most often. Also their positions here."""
        order = np.lexsort((-self.age, -footprint[self.sample]))
        sample = self.sample[order]
        window = Window(sample, footprint[sample], self.late[order], must[order], easing)
        return window, order

    def without(self, positions: np.ndarray) -> "_Waiting":
        """Without the samples that were placed."""
        kept = np.delete(np.arange(len(self.sample)), positions)
        return _Waiting(self.sample[kept], self.age[kept], self.late[kept])


def place_epoch(
    order: np.ndarray,
    carried: LeftOver,
    footprint: np.ndarray,
    window_tokens: float,
    step_tokens: float,
    max_delay: int,
    place: PlaceWindow,
) -> LeftOver:
    """Hands `place` window after window, until little of a window remains.

    An epoch of less than two steps is placed whole, and nothing is carried on.

    Args:
      order: [N] int64, sample numbers of this epoch, shuffled.
      carried: samples of earlier epochs.
      footprint: [N] int64, tokens that each sample of the manifest takes.
      window_tokens: of a window, waiting samples included; at most whole steps of the data set.
      step_tokens: that a step holds on average.
      max_delay: windows that may defer a sample.
      place: places a window.

    Returns:
      What later epochs place.
    """
    total = int(footprint[order].sum())
    if total < 2 * step_tokens:
        _place_all(order, carried, footprint, place)
        return LeftOver()
    window_tokens = int(min(window_tokens, total // step_tokens * step_tokens))
    little = max(_LITTLE * window_tokens, min(_FEW_STEPS * step_tokens, total / 2))
    # A sample that was carried comes late in this epoch, away from its other copy.
    twice = np.isin(order, carried.sample)
    order = np.r_[order[~twice], order[twice]]
    upto = np.r_[0, np.cumsum(footprint[order])]
    waiting = _Waiting(carried.sample, np.zeros_like(carried.sample), carried.late)
    taken, placed_any, easing = 0, False, 1.0
    while True:
        ready = int(footprint[waiting.sample].sum())
        remaining = int(upto[-1] - upto[taken])
        due = waiting.late >= MOST_LATE
        if placed_any and not due.any() and ready + remaining < little:
            rest = order[taken:]
            return LeftOver(
                np.r_[waiting.sample, rest], np.r_[waiting.late, np.zeros_like(rest)] + 1
            )
        most = int(upto[taken]) + max(0, window_tokens - ready)
        stop = int(np.searchsorted(upto, most, side="right")) - 1
        if not len(waiting.sample):  # one sample may be more than a window
            stop = max(stop, taken + 1)
        waiting = waiting.joined(order[taken:stop])
        taken = stop
        ends = int(upto[-1] - upto[taken]) < little
        must = (waiting.age >= max_delay) | (ends & (waiting.late >= MOST_LATE))
        if easing > _MOST_EASING:
            must = np.ones_like(must)
        window, position = waiting.window(footprint, must, easing)
        placed = place(window)
        placed_any = placed_any or bool(placed.any())
        easing = 1.0 if placed.any() else easing * _EASING
        waiting = waiting.without(position[placed])


def _place_all(
    order: np.ndarray, carried: LeftOver, footprint: np.ndarray, place: PlaceWindow
) -> None:
    waiting = _Waiting(carried.sample, np.zeros_like(carried.sample), carried.late).joined(order)
    window, _ = waiting.window(footprint, np.ones(len(waiting.sample), bool))
    place(window)
