"""Stops a run at a time limit as a signal would: the run saves and can be resumed."""

import time
from dataclasses import dataclass
from typing import Literal

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.errors import InputError
from alload_jax.training.callbacks.callback import Callback, CallbackContext, Run
from alload_jax.training.signals import TIME_LIMIT, StopRequest


@dataclass(frozen=True)
class TimeLimitConfig:
    """Time limit of one start of the run.

    Attributes:
      name: `time_limit`.
      minutes: training time from the first step of a start, in minutes; compilation and saving are
        additional.
    """

    name: Literal["time_limit"] = "time_limit"
    minutes: float = 60.0

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise InputError(
                f"callbacks: time_limit: minutes is {self.minutes}; it must be above 0"
            )

    def make(self, context: CallbackContext) -> "TimeLimit":
        """See `CallbackConfig.make`."""
        return TimeLimit(context.stop, 60 * self.minutes)


class TimeLimit(Callback):
    """Requests a stop after the time limit; all processes stop at the same step."""

    def __init__(self, stop: StopRequest, seconds: float):
        """Limits the time from the first step to `seconds`."""
        self._stop, self._seconds = stop, seconds

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`."""
        self._ends = time.monotonic() + self._seconds

    def on_step_end(self, run: Run, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """See `Callback.on_step_end`."""
        if time.monotonic() > self._ends:
            self._stop.request(TIME_LIMIT)
