"""What a validation says, by the names of the metrics log."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LOSS = "validation/loss"
"""Mean over the measured samples and noise levels; the names of its parts begin with it."""
SAMPLES = "validation/samples"
"""Number of samples that were measured."""
MEASURED_SET = "validation/set"
"""A digest of what is measured: losses of different sets cannot be compared."""


class ClassErrors(NamedTuple):
    """Errors of the samples of one size.

    Attributes:
      name: of the size.
      errors: [levels, K] float32, of each sample at each noise level.
      measured: [K] bool; false for samples that cannot be read.
    """

    name: str
    errors: np.ndarray
    measured: np.ndarray


def validation_figures(
    classes: Sequence[ClassErrors], levels: Sequence[float]
) -> dict[str, int | float]:
    """The mean errors by name: of all samples, of each size and at each noise level.

    Every sample counts the same, whatever its length. Means are taken in float64.

    Args:
      classes: the errors of each size.
      levels: the noise levels.

    Returns:
      `validation/samples` and the losses, which may be infinite or NaN as the model's are. Without
      a sample that can be read there are no losses.
    """
    errors = {each.name: each.errors[:, each.measured].astype(np.float64) for each in classes}
    errors = {name: values for name, values in errors.items() if values.size}
    if not errors:
        return {SAMPLES: 0}
    together = np.concatenate(list(errors.values()), axis=1)
    by_level = zip(levels, together.mean(axis=1).tolist(), strict=True)
    return {
        SAMPLES: together.shape[1],
        LOSS: float(together.mean()),
        **{f"{LOSS}/{name}": float(values.mean()) for name, values in errors.items()},
        **{f"{LOSS}/sigma_{level:g}": value for level, value in by_level},
    }


def finite(figures: Mapping[str, int | float]) -> dict[str, int | float]:
    """The figures that are finite, which JSON can hold."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}
