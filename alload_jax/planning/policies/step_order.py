"""The order of an epoch's steps: random, and with no trend in the length of their samples."""

import numpy as np

MOST_CORRELATION = 0.1
"""Correlation of a step's place with the mean length of its samples above which another order is
drawn."""
_DRAWS = 16


def even_order(
    step: np.ndarray, tokens: np.ndarray, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """The place of each step: the first of some random orders that has little correlation.

    Args:
      step: [P] int64, the step of each sample or part.
      tokens: [P] int64, of each.
      steps: K, their number.
      rng: draws the orders.

    Returns:
      [K] int64, a permutation; of the orders that were drawn the one with least correlation, if
      all have more than `MOST_CORRELATION`.
    """
    count = np.maximum(np.bincount(step, minlength=steps), 1)
    mean = np.bincount(step, weights=tokens, minlength=steps) / count
    draws = []
    for _ in range(_DRAWS):
        place = rng.permutation(steps)
        found = abs(correlation(place, mean))
        if found <= MOST_CORRELATION:
            return place
        draws.append((found, place))
    return min(draws, key=lambda draw: draw[0])[1]


def correlation(place: np.ndarray, mean: np.ndarray) -> float:
    """Pearson's correlation of two [K]; 0 where one does not vary."""
    if len(mean) < 2 or np.ptp(mean) == 0:
        return 0.0
    return float(np.corrcoef(place, mean)[0, 1])
