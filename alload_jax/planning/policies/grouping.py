"""Groups rows of equal cost into steps, so that no rank waits for another."""

import numpy as np

EMPTY = -1
"""A place of a step that no row takes."""

TOLERANCE = 0.01
"""A step whose costliest row exceeds the mean by more is deferred to a later window."""


def group_into_steps(most: np.ndarray, mean: np.ndarray, must: np.ndarray, size: int) -> np.ndarray:
    """Puts `size` units each, single rows or groups of rows, into steps of about equal cost.

    Units are taken by falling cost. One that costs much more than the others of its step is
    deferred to a later window, where there may be others like it, unless it must be placed now.

    Args:
      most, mean: [U] float64, cost of the costliest row of each unit and of its mean row.
      must: [U] bool, units that can't be deferred.
      size: units of a step.

    Returns:
      [K, size] int64, unit numbers; EMPTY fills a last step that holds too few units.
    """
    order = np.argsort(-most, kind="stable")
    steps, at = [], 0
    if len(order) >= size:
        total = np.r_[0.0, np.cumsum(mean[order])]
        of_step = (total[size:] - total[:-size]) / size
        first = order[: len(of_step)]
        starts = np.flatnonzero((most[first] <= (1 + TOLERANCE) * of_step) | must[first])
        while (k := int(np.searchsorted(starts, at))) < len(starts):
            at = int(starts[k]) + size
            steps.append(order[at - size : at])
    remaining = np.flatnonzero(must[order[at:]])
    if len(remaining):
        end = at + int(remaining[-1]) + 1
        if end - at >= size:
            steps.append(order[end - size : end])
        elif steps and not must[order[at - size : end - size]].any():
            # As many of the costliest units of the cheapest step are deferred in their place.
            steps[-1] = order[end - size : end]
        else:
            rest = np.setdiff1d(order, np.concatenate([*steps, order[at:end]]))
            others = rest[np.argsort(mean[rest], kind="stable")][: size - (end - at)]
            empty = np.full(size - (end - at) - len(others), EMPTY)
            steps.append(np.r_[order[at:end], others, empty])
    return np.asarray(steps, np.int64).reshape(-1, size)
