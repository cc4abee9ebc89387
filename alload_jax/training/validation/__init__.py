"""The validation section of a config, and the figures of a validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from alload_jax.data.sources import SourceConfig
from alload_jax.errors import InputError, require_fields, require_positive

ValidationWeights = Literal["ema", "raw"]


@dataclass(frozen=True)
class ValidationConfig:
    """Which held-out samples a run is validated on, when and how; none without `folder` or `share`.

    Attributes:
      folder: data folder of held-out samples, of alload or of another trainer.
      source: how they are read; null for `data.source`, or else for what the files say.
      share: share of the samples of data.folder that is held out of training, by their content.
      every: number of optimizer steps between validations; null for only at the end.
      noise_levels: σ at which the loss is measured, after any shift, above 0 (data) to 1 (noise).
      max_samples: number of samples to measure; null for all that are held out.
      max_shapes: number of the most frequent sizes to measure, each of which needs a program; null
        for all.
      weights: `ema` for the moving average of the weights, where there is one, or `raw`.
      seed: seed of the noise.
    """

    folder: str | None = None
    source: SourceConfig | None = None
    share: float | None = None
    every: int | None = 500
    noise_levels: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    max_samples: int | None = 64
    max_shapes: int | None = 8
    weights: ValidationWeights = "ema"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.folder is not None and self.share is not None:
            raise InputError(
                f"validation.folder is {self.folder} and validation.share {self.share}; give one"
            )
        bound = "above 0 and below 1"
        require_fields("validation.", self, "share", lambda value: 0 < value < 1, bound)
        if self.source is not None and self.folder is None:
            raise InputError("validation.source is given without validation.folder; add the folder")
        require_positive("validation.", self, "every", "max_samples", "max_shapes")
        bound = "from 0 to below 2^32"
        require_fields("validation.", self, "seed", lambda value: 0 <= value < 2**32, bound)
        levels = self.noise_levels
        if not levels:
            raise InputError("validation.noise_levels is empty; give at least one, such as [0.5]")
        for level in levels:
            if not 0 < level <= 1:
                raise InputError(
                    f"validation.noise_levels has {level}; levels are above 0 and at most 1"
                )
        if len(set(levels)) < len(levels):
            raise InputError(
                f"validation.noise_levels is {list(levels)}; leave out levels that are given twice"
            )

    @property
    def enabled(self) -> bool:
        """Whether there are held-out samples."""
        return self.folder is not None or self.share is not None

    def identity(self) -> dict[str, object]:
        """What a run keeps when it is continued: which samples are not trained on; often empty."""
        return {} if self.share is None else {"share": self.share}


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
