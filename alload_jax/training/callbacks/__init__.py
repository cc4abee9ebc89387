"""The registry of callbacks, and those that a config can add: profile, time limit, noise."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
from typing_extensions import override

from alload_jax.data.loader import PlacedStep
from alload_jax.distributed.cluster import first_process
from alload_jax.errors import require_fields
from alload_jax.registry import Registry
from alload_jax.training.loop import Callback, Loop
from alload_jax.training.signals import TIME_LIMIT, StopRequest


class CallbackContext(NamedTuple):
    """Arguments for building a callback.

    Attributes:
      folder: folder of the run.
      stop: request that stops the run, as a signal does.
      weighting: what the objective's weights count, `sample` or `token`.
    """

    folder: Path
    stop: StopRequest
    weighting: str = "sample"


class CallbackConfig(Protocol):
    """A frozen dataclass whose fields are a callback's config; `name` is its name in the config.

    Attributes:
      kept_bytes: of each trained parameter, what it takes at most, split over the ranks.
    """

    kept_bytes: ClassVar[int] = 0

    def make(self, context: CallbackContext) -> Callback:
        """Builds the callback."""
        ...


CALLBACKS: Registry[type[Any]] = Registry(
    "callback",
    {
        "profile": "alload_jax.training.callbacks:ProfileConfig",
        "time_limit": "alload_jax.training.callbacks:TimeLimitConfig",
        "gradient_noise": "alload_jax.training.callbacks:GradientNoiseConfig",
    },
)
"""Config classes, each a `CallbackConfig`, that `callbacks` in the config can name."""


@dataclass(frozen=True)
class ProfileConfig(CallbackConfig):
    """Which steps are profiled; the trace is written to `profile/` in the run folder.

    Attributes:
      name: `profile`.
      first: first profiled step of this start, counted from 0.
      steps: number of profiled steps.
    """

    name: Literal["profile"] = "profile"
    first: int = 5
    steps: int = 3

    def __post_init__(self) -> None:
        place = "callbacks: profile: "
        require_fields(place, self, "first", lambda value: value >= 0, "at least 0")
        require_fields(place, self, "steps", lambda value: value >= 1, "at least 1")

    @override
    def make(self, context: CallbackContext) -> "Profile":
        return Profile(context.folder / "profile", self.first, self.steps)


class Profile(Callback):
    """Traces the host and the devices while some steps run."""

    def __init__(self, folder: Path, first: int, steps: int):
        """Traces `steps` steps from the `first` of this start, counted from 0."""
        self._folder, self._first, self._last = folder, first, first + steps - 1
        self._seen, self._running = 0, False

    @override
    def on_step_start(self, run: Loop, step: PlacedStep) -> None:
        if self._seen == self._first:
            jax.block_until_ready(run.state.step)
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    @override
    def on_step_end(self, run: Loop, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        if self._running and self._seen == self._last:
            jax.block_until_ready(metrics)
            self.close()
        self._seen += 1

    @override
    def close(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


@dataclass(frozen=True)
class TimeLimitConfig(CallbackConfig):
    """Time limit of one start of the run.

    Attributes:
      name: `time_limit`.
      minutes: training time from the first step of a start, in minutes; compilation and saving are
        additional.
    """

    name: Literal["time_limit"] = "time_limit"
    minutes: float = 60.0

    def __post_init__(self) -> None:
        place = "callbacks: time_limit: "
        require_fields(place, self, "minutes", lambda value: value > 0, "above 0")

    @override
    def make(self, context: CallbackContext) -> "TimeLimit":
        return TimeLimit(context.stop, 60 * self.minutes)


class TimeLimit(Callback):
    """Requests a stop after the time limit; all processes stop at the same step."""

    def __init__(self, stop: StopRequest, seconds: float):
        """Limits the time from the first step to `seconds`."""
        self._stop, self._seconds = stop, seconds

    @override
    def on_start(self, run: Loop) -> None:
        self._ends = time.monotonic() + self._seconds

    @override
    def on_step_end(self, run: Loop, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        if time.monotonic() > self._ends:
            self._stop.request(TIME_LIMIT)


@dataclass(frozen=True)
class GradientNoiseConfig(CallbackConfig):
    """When the gradient noise scale (arXiv 1812.06162) is measured, for `planning.noise_scale`.

    Takes 4 bytes a trained parameter more, split over the ranks.

    Attributes:
      name: `gradient_noise`.
      every: number of steps between measurements.
      steps: number of steps whose samples are taken, the last ones; a measurement takes as long.
    """

    kept_bytes: ClassVar[int] = 4
    name: Literal["gradient_noise"] = "gradient_noise"
    every: int = 500
    steps: int = 16

    def __post_init__(self) -> None:
        place = "callbacks: gradient_noise: "
        require_fields(place, self, "steps", lambda value: value >= 2, "at least 2")
        most = f"at least steps = {self.steps}"
        require_fields(place, self, "every", lambda value: value >= self.steps, most)

    @override
    def make(self, context: CallbackContext) -> "GradientNoise":
        return GradientNoise(self.every, self.steps, f"{context.weighting}s")


class GradientNoise(Callback):
    """Measures the gradient noise scale with the samples of the last steps, and prints it."""

    def __init__(self, every: int, steps: int, unit: str = "samples"):
        """Measures after every `every` steps, with the last `steps`; `unit` is of their weights."""
        self._every, self._steps, self._unit = every, steps, unit
        self._last: dict[int, PlacedStep] = {}

    @override
    def on_step_end(self, run: Loop, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        if -run.done % self._every < self._steps:  # others would take memory for nothing
            self._last[step.number % self._steps] = step  # a repaired one replaces the bad one

    @override
    def due(self, run: Loop) -> bool:
        return run.done % self._every == 0 and len(self._last) == self._steps

    @override
    def act(self, run: Loop) -> None:
        scale = run.noise_scale([*self._last.values()])
        self._last.clear()
        known = 0 < scale < math.inf
        found = f"{scale:.4g} {self._unit}" if known else "unknown; raise steps"
        if first_process():
            print(f"gradient noise scale at step {run.done}: {found}", flush=True)
