"""Sections of a config that need no more than values: run, checkpoint, validation and others."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alload_jax.data.sources import SourceConfig
from alload_jax.errors import InputError, require_fields, require_positive

_DEFAULT_STEPS = 1000
_LOCAL = "a path of a file system; mount or copy object storage"


@dataclass(frozen=True)
class RunConfig:
    """General settings of a run.

    Attributes:
      folder: output folder. If it contains a checkpoint, the run resumes from it.
      steps: number of optimizer steps; 1000 where `epochs` is not given either.
      epochs: number of passes over the data, in place of `steps`.
      seed: seed of weights, noise and the order of samples.
      initial_weights: weights to start from: a `transformer/` folder of diffusers, a folder of
        Wan's repository, one file of either (safetensors, scaled float8 included, or GGUF), or the
        folder of another run, whose averaged weights are taken; null for random weights.
      initial_lora: file of adapters to start from, for a model with `model.lora`; null for new
        ones.
      compilation_cache: folder that keeps compiled programs between runs; null for none.
      status_when_stopped: exit status after a signal, when everything is saved; with a status that
        is not 0, a scheduler restarts the run.
    """

    folder: str
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    initial_weights: str | None = None
    initial_lora: str | None = None
    compilation_cache: str | None = None
    status_when_stopped: int = 0

    def __post_init__(self) -> None:
        require_fields(
            "run.", self, "status_when_stopped", lambda value: 0 <= value <= 125, "0 to 125"
        )
        if self.steps is not None and self.epochs is not None:
            raise InputError(
                f"run.steps is {self.steps} and run.epochs {self.epochs}; give one, and null for "
                "the other"
            )
        require_positive("run.", self, "steps", "epochs", most=2**31 - 1)  # as devices count them
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", _DEFAULT_STEPS)
        require_fields("run.", self, "seed", lambda value: value >= 0, "0 or more")
        paths = "folder initial_weights initial_lora compilation_cache"
        require_fields("run.", self, paths, lambda value: "://" not in value, _LOCAL)


EXPERTS = ("high_noise", "low_noise")
"""Names of two experts, and of their run folders in that of both, in the order of training."""
TRANSFORMERS = ("transformer", "transformer_2")  # their folders in a pipeline of diffusers


def expert_places(place: str | Path) -> tuple[Path, ...]:
    """Where two experts are: in a run folder or a pipeline, or files of `expert_file`.

    Returns:
      Both places, that for high noise first; the place itself if it is that of one model.
    """
    place = Path(place)
    pairs = [tuple(place / name for name in names) for names in (EXPERTS, TRANSFORMERS)]
    if place.name and not place.exists():
        pairs = [tuple(expert_file(place, name) for name in EXPERTS)]
    # Of a run the second may not have begun, which is told where it is read.
    begun = [pair for pair in pairs if (pair[0] if pair[0].name in EXPERTS else pair[1]).exists()]
    return begun[0] if begun else (place,)


def expert_file(file: str | Path, name: str) -> Path:
    """The file of one of two experts: `x.safetensors` → `x_high_noise.safetensors`."""
    path = Path(file)
    return path.with_stem(f"{path.stem}_{name}")


@dataclass(frozen=True)
class ExpertsConfig:
    """Two experts, such as those of Wan 2.2's A14B models, which are trained one after the other.

    Attributes:
      boundary: noise level from which the first is used; Wan 2.2: 0.875, image-to-video 0.9.
      high_noise, low_noise: weights that they start from, as `run.initial_weights`.
    """

    boundary: float
    high_noise: str | None = None
    low_noise: str | None = None

    def __post_init__(self) -> None:
        require_fields("experts.", self, "boundary", lambda v: 0 < v < 1, "between 0 and 1")
        require_fields("experts.", self, "high_noise low_noise", lambda v: "://" not in v, _LOCAL)
        if (self.high_noise is None) != (self.low_noise is None):
            lacking = "high_noise" if self.high_noise is None else "low_noise"
            raise InputError(
                f"experts.{lacking} is null, so that only one expert has weights to start from; "
                "give both, or neither"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved and which are kept.

    Attributes:
      every: number of optimizer steps between checkpoints; the last step is always saved. Null for
        no such interval.
      minutes: also save when this many minutes have passed since the last checkpoint; null for no
        such interval.
      keep: number of newest checkpoints to keep.
      keep_every: also keep checkpoints whose step is a multiple of this; null for none.
      keep_best: also save and keep this many checkpoints with the lowest validation loss; null for
        none.
    """

    every: int | None = 500
    minutes: float | None = None
    keep: int = 2
    keep_every: int | None = None
    keep_best: int | None = None

    def __post_init__(self) -> None:
        require_positive("checkpoint.", self, "every", "keep", "keep_every", "keep_best")
        in_time = "a number above 0"
        require_fields("checkpoint.", self, "minutes", lambda value: 0 < value < math.inf, in_time)


WeightsKind = Literal["ema", "raw"]
"""The moving average of the weights, or the latest weights."""


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
    weights: WeightsKind = "ema"
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


RISEN = 2.0
"""Factor of the largest loss beyond which the last ones are worth a warning."""


@dataclass(frozen=True)
class DivergenceConfig:
    """When a run counts as diverged.

    Attributes:
      stop_above: a run ends without saving if 7 of its last 10 losses are above this many times the
        largest of the 200 before, or above this many times the loss of a model that predicts
        nothing; null for only warnings.
    """

    stop_above: float | None = 10.0

    def __post_init__(self) -> None:
        bound = f"above {RISEN:g}, or null"
        require_fields("divergence.", self, "stop_above", lambda value: value > RISEN, bound)


@dataclass(frozen=True)
class WatchdogConfig:
    """How long a run may make no progress before it is ended.

    Attributes:
      step_factor: a step may take this many times the median of the steps before; null for no
        watchdog.
      step_seconds: a step may always take this many seconds, the first one included.
      pause_seconds: work between steps may take this many seconds: saving, validating, drawing.
    """

    step_factor: float | None = 20.0
    step_seconds: float = 600.0
    pause_seconds: float = 3600.0

    def __post_init__(self) -> None:
        names = "step_factor step_seconds pause_seconds"
        require_fields("watchdog.", self, names, lambda value: value > 0, "above 0")
