"""The output function of SplitMix64, which mixes numbers into uniform bits.

G. Steele, D. Lea and C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

import numpy as np


def unit_interval(state: np.ndarray) -> np.ndarray:
    """Mixes numbers uniformly into the unit interval.

    Args:
      state: uint64 of any shape.

    Returns:
      float64 from 0 to below 1, shaped like `state`; equal for equal numbers.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)) / 2.0**53
