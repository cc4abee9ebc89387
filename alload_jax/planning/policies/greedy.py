"""Greedy assignment of samples to bins, so that tokens and cost, or cost alone, come out equal."""

from dataclasses import dataclass

import numpy as np

_CHUNKS = 4
"""Bins are ranked again after each 1/4 of them got a sample: finer gains nothing measurable."""
_JITTER = 0.3
"""Relative random error of a bin's need: equal windows get new rows, which are as well balanced."""

UNPLACED = -1
"""The bin of an item that is in none."""


@dataclass(frozen=True)
class Bins:
    """Bins that are being filled; the arrays change as items are assigned.

    Attributes:
      free: [B] int64, tokens that still fit.
      load: [B] float64, cost so far.
      free_slots: [B] int64, items that still fit.
      max_load: no item is added to a bin that holds some, if that takes it over this.
    """

    free: np.ndarray
    load: np.ndarray
    free_slots: np.ndarray
    max_load: float

    def admit(self, footprint: int, weight: float) -> np.ndarray:
        """[B] bool: where an item of that many tokens and that cost may go."""
        fits = (self.free >= footprint) & (self.free_slots > 0)
        if np.isfinite(self.max_load):
            fits &= (self.load + weight <= self.max_load) | (self.load == 0)
        return fits


def target_load(weights: np.ndarray, bins: int, load: float = 0.0) -> float:
    """The cost that every bin should reach.

    It is the mean cost of the bins, without the oversized items, which cost more than it, and
    without the bins that these take for themselves.

    Args:
      weights: [N], largest first.
      bins: their number.
      load: total cost of the items that the bins already contain.
    """
    rest = float(weights.sum()) + load
    for oversized, weight in enumerate(weights[: bins - 1].tolist()):
        if weight <= rest / (bins - oversized):
            return rest / (bins - oversized)
        rest -= weight
    return rest / max(1, bins - len(weights[: bins - 1]))


def assign_greedily(
    footprint: np.ndarray,
    weight: np.ndarray,
    bins: Bins,
    target: float,
    rng: np.random.Generator | None = None,
    per_token: bool = True,
) -> np.ndarray:
    """Gives each item a bin, the longest first, where cost per free token is needed most.

    A bin that has `free` tokens left and lacks `target - load` cost needs items of that density.
    Density grows with length, so the longest item goes where the need is greatest. What remains
    at the end are short items and bins that need little. This makes both sums about equal.

    Args:
      footprint: [N] int64, tokens that an item takes, largest first.
      weight: [N] float64, its cost, also in descending order.
      bins: what is filled.
      target: cost that every bin should reach.
      rng: varies the choice among bins of about equal need; None for no variation.
      per_token: where the need is a bin's missing cost per free token; otherwise the missing cost
        alone decides, which is longest processing time first.

    Returns:
      [N] int64, each item's bin, or UNPLACED.
    """
    found = np.full(len(footprint), UNPLACED, np.int64)
    chunk = max(1, len(bins.free) // _CHUNKS)
    first = 0
    while first < len(footprint):
        longest = int(footprint[first])
        admitted = np.flatnonzero(bins.admit(longest, float(weight[first])))
        if not len(admitted):
            first = _next_that_may_fit(footprint, bins, first)
            continue
        need = target - bins.load[admitted]
        if per_token:
            need /= np.maximum(bins.free[admitted], 1)
        if rng is not None:
            need *= 1 + _JITTER * rng.standard_normal(len(need), np.float32)
        count = min(chunk, len(footprint) - first, len(admitted))
        chosen = np.argpartition(-need, count - 1)[:count]
        chosen = admitted[chosen[np.argsort(-need[chosen], kind="stable")]]
        items = slice(first, first + count)
        found[items] = chosen
        bins.free[chosen] -= footprint[items]
        bins.load[chosen] += weight[items]
        bins.free_slots[chosen] -= 1
        first += count
    return found


def _next_that_may_fit(footprint: np.ndarray, bins: Bins, first: int) -> int:
    """The next item shorter than the one that fits nowhere, and no longer than the freest bin."""
    most = int(bins.free[bins.free_slots > 0].max(initial=0))
    shorter = int(np.searchsorted(-footprint, -min(most, int(footprint[first]) - 1)))
    return max(first + 1, shorter)
