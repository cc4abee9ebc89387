"""Sections of a config that need no more than values: run, checkpoint, divergence, watchdog."""

import math
from dataclasses import dataclass
from pathlib import Path

from alload_jax.errors import InputError, require_fields, require_positive

_DEFAULT_STEPS = 1000


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
            "run.", self, "status_when_stopped", lambda value: 0 <= value < 126, "0 to 125"
        )
        if self.steps is not None and self.epochs is not None:
            raise InputError(
                f"run.steps is {self.steps} and run.epochs {self.epochs}; give one, and null for "
                "the other"
            )
        require_positive("run.", self, "steps", "epochs")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", _DEFAULT_STEPS)
        require_fields("run.", self, "seed", lambda value: value >= 0, "0 or more")


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
