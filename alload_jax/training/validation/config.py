"""The validation section of a config."""

from dataclasses import dataclass
from typing import Any, Literal

from alload_jax.data.sources.source import SourceConfig
from alload_jax.errors import InputError

ValidationWeights = Literal["ema", "raw"]

_SEEDS = 2**32


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
        if self.share is not None and not 0 < self.share < 1:
            raise InputError(f"validation.share is {self.share}; it must be above 0 and below 1")
        if self.source is not None and self.folder is None:
            raise InputError("validation.source is given without validation.folder; add the folder")
        for name in ("every", "max_samples", "max_shapes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"validation.{name} is {value}; it must be at least 1")
        if not 0 <= self.seed < _SEEDS:
            raise InputError(f"validation.seed is {self.seed}; it must be from 0 to below 2^32")
        self._check_levels()

    def _check_levels(self) -> None:
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

    def identity(self) -> dict[str, Any]:
        """What a run keeps when it is continued: which samples are not trained on; often empty."""
        return {} if self.share is None else {"share": self.share}
