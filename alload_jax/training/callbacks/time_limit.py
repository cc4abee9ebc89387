"""Stops a run before its time is over, as a signal would: it saves, and can be continued."""

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
    """How long a start of the run may train.

    Attributes:
      name: `time_limit`.
      minutes: from the first step of a start; leave room for compilation and saving.
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
    """Asks for a stop once its time is over; all processes stop at the same step."""

    def __init__(self, stop: StopRequest, seconds: float):
        """Counts from the first step."""
        self._stop, self._seconds = stop, seconds

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`."""
        self._ends = time.monotonic() + self._seconds

    def on_step_end(self, run: Run, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """See `Callback.on_step_end`."""
        if time.monotonic() > self._ends:
            self._stop.request(TIME_LIMIT)
