"""Groups rows of equal cost into steps, for `balanced`."""

from dataclasses import dataclass, replace

import numpy as np

EMPTY = -1
"""A place of a step that no row takes."""

TOLERANCE = 0.01
"""A step whose costliest row exceeds the mean by more is deferred, unless tolerance is eased."""

_TARGETS = (0.0, 0.5, 1.0)
"""Where between the lower bound and the mean the least samples of a step are tried, in turn."""


@dataclass(frozen=True)
class Units:
    """Single rows, or groups of rows, that steps are made of.

    Attributes:
      most, mean: [U] float64, cost of the costliest row of each unit and of its mean row.
      samples: [U] int64, how many each holds.
      tolerance: of the costliest unit of a step over their mean.
    """

    most: np.ndarray
    mean: np.ndarray
    samples: np.ndarray
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class SampleBounds:
    """Bounds on the samples of a step.

    Attributes:
      least, mean, most: samples of a step.
    """

    least: float
    mean: float
    most: float

    def eased(self, factor: float) -> "SampleBounds":
        """Wider bounds."""
        return replace(self, least=self.least / factor, most=self.most * factor)


def group_into_steps(
    units: Units, size: int, bounds: SampleBounds | None = None, place_all: bool = False
) -> np.ndarray:
    """Puts `size` units each into steps of about equal cost.

    Units are taken by falling cost. One that costs much more than the others of its step is
    deferred to a later window, where there may be others like it.
    Where costly units hold too few samples for the bounds, the cheapest of them make room for units
    of many samples. A unit without samples is only taken to fill a step up.

    Args:
      units: U units.
      size: units of a step.
      bounds: on the samples of a step; None for none.
      place_all: whether all units with samples are placed, out of bounds where there is no way.

    Returns:
      [K, size] int64, unit numbers; EMPTY fills a last step that holds too few units.
    """
    if place_all:
        units = replace(units, tolerance=np.inf)
    order = np.argsort(-units.most, kind="stable")
    order = order[units.samples[order] > 0]
    if bounds is None:
        steps, rest, _ = _by_cost(order, units, size)
    else:
        steps, rest = _within(order, units, size, bounds)
    if place_all and len(rest):
        padded = np.full(-(-len(rest) // size) * size, EMPTY)
        padded[: len(rest)] = rest
        steps = [*steps, *padded.reshape(-1, size)]
    return np.asarray(steps, np.int64).reshape(-1, size)


def _by_cost(
    order: np.ndarray, units: Units, size: int, least: float = 0.0
) -> tuple[list[np.ndarray], np.ndarray, bool]:
    """Steps of neighbours in cost, up to the first of fewer than `least` samples.

    Returns:
      The steps; the units that they do not take; whether all are made. All by falling cost.
    """
    taken = np.zeros(len(order), bool)
    steps: list[np.ndarray] = []
    at, starts = 0, _starts(order, units, size)
    upto = np.r_[0, np.cumsum(units.samples[order])]
    while (k := int(np.searchsorted(starts, at))) < len(starts):
        first, at = int(starts[k]), int(starts[k]) + size
        if upto[at] - upto[first] < least:
            return steps, order[~taken], False
        steps.append(order[first:at])
        taken[first:at] = True
    return steps, order[~taken], True


def _starts(order: np.ndarray, units: Units, size: int) -> np.ndarray:
    """Positions at which a step of neighbours may begin."""
    if len(order) < size:
        return np.zeros(0, np.int64)
    total = np.r_[0.0, np.cumsum(units.mean[order])]
    of_step = (total[size:] - total[:-size]) / size
    if np.isinf(units.tolerance):
        return np.arange(len(of_step))
    first = order[: len(of_step)]
    return np.flatnonzero(units.most[first] <= (1 + units.tolerance) * of_step)


def _within(
    order: np.ndarray, units: Units, size: int, bounds: SampleBounds
) -> tuple[list[np.ndarray], np.ndarray]:
    """As `_by_cost`, with the samples of each step within bounds.

    Units of many samples that no costly step takes gather in steps of too many samples. Then costly
    steps take more of them. If steps are out of bounds whatever these take, they are deferred.
    """
    kept: list[np.ndarray] = []
    for share in _TARGETS:
        least = bounds.least + share * (bounds.mean - bounds.least)
        steps, rest = _enriched_steps(order, units, size, least)
        within = [step for step in steps if units.samples[step].sum() <= bounds.most]
        if len(within) == len(steps) > len(kept):
            return steps, rest
        kept = max(kept, within, key=len)
    left = np.setdiff1d(order, np.concatenate(kept)) if kept else order
    return kept, left[np.argsort(-units.most[left], kind="stable")]


def _enriched_steps(
    order: np.ndarray, units: Units, size: int, least: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """As `_by_cost`, with at least so many samples in each step."""
    steps: list[np.ndarray] = []
    deferred: list[np.ndarray] = []
    left = order
    while len(left):
        by_cost, left, all_made = _by_cost(left, units, size, least)
        steps += by_cost
        if all_made:
            return steps, np.concatenate([*deferred, left])
        # Costly steps hold few samples; from the first of these on, one after the other.
        while len(starts := _starts(left, units, size)[:1]):
            deferred.append(left[: starts[0]])
            left = left[starts[0] :]
            step, others = left[:size], left[size:]
            if units.samples[step].sum() >= least:
                break
            taken = _to_replace(step, others, units, least)
            if taken is None:  # neither these nor cheaper units have enough samples
                return steps, np.concatenate([*deferred, left])
            dense = others[taken]
            steps.append(np.r_[step[: size - len(dense)], dense])
            left = np.r_[step[size - len(dense) :], np.delete(others, taken)]
        else:
            return steps, np.concatenate([*deferred, left])
    return steps, np.concatenate([*deferred, left])


def _to_replace(
    few: np.ndarray, others: np.ndarray, units: Units, least: float
) -> np.ndarray | None:
    """Positions in `others` of the fewest units that lift a step to `least` samples.

    They replace the last units of the step. None if there are not enough.
    """
    have = units.samples[few]
    samples = units.samples[others]
    count = min(len(few) - 1, len(others))
    dense = np.argpartition(-samples, count - 1)[:count] if count else np.zeros(0, np.int64)
    dense = dense[np.argsort(-samples[dense], kind="stable")]
    kept = have.sum() - np.cumsum(have[::-1])[:count]
    enough = np.flatnonzero(kept + np.cumsum(samples[dense]) >= least)
    return dense[: enough[0] + 1] if len(enough) else None
