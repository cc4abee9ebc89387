"""Records a profile of some steps for TensorBoard's profiler or Perfetto."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.errors import InputError
from alload_jax.training.callbacks.callback import Callback, CallbackContext, Run


@dataclass(frozen=True)
class ProfileConfig:
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
        for name, least in (("first", 0), ("steps", 1)):
            value = getattr(self, name)
            if value < least:
                raise InputError(
                    f"callbacks: profile: {name} is {value}; it must be at least {least}"
                )

    def make(self, context: CallbackContext) -> "Profile":
        """See `CallbackConfig.make`."""
        return Profile(context.folder / "profile", self.first, self.steps)


class Profile(Callback):
    """Traces the host and the devices while some steps run."""

    def __init__(self, folder: Path, first: int, steps: int):
        """Traces `steps` steps from the `first` of this start, counted from 0."""
        self._folder, self._first, self._last = folder, first, first + steps - 1
        self._seen, self._running = 0, False

    def on_step_start(self, run: Run, step: PlacedStep) -> None:
        """See `Callback.on_step_start`."""
        if self._seen == self._first:
            jax.block_until_ready(run.state.step)
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def on_step_end(self, run: Run, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """See `Callback.on_step_end`."""
        if self._running and self._seen == self._last:
            jax.block_until_ready(metrics)
            self.close()
        self._seen += 1

    def close(self) -> None:
        """See `Callback.close`."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
