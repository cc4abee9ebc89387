"""The hooks of a callback, and the callbacks that a config can add by name."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.registry import Registry
from alload_jax.training.signals import StopRequest
from alload_jax.training.state import TrainState


class Run(Protocol):
    """What a callback sees of the loop; see `training.loop.Loop`."""

    done: int
    total: int
    signal: int

    @property
    def state(self) -> TrainState:
        """What training has reached."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        ...

    def refuse(self, reason: str) -> None:
        """Ends the run before the step that is about to begin."""
        ...


class Callback:
    """Hooks on the training loop. Each does nothing unless a callback overrides it.

    In a cluster all processes call the same hooks at the same steps.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step of this start."""

    def on_step_start(self, run: Run, step: PlacedStep) -> None:
        """Before a step is dispatched; `run.refuse` keeps it from running."""

    def on_step_end(self, run: Run, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """After a step is dispatched; its metrics may not have been computed yet."""

    def due(self, run: Run) -> bool:
        """Whether `act` is to be called after `run.done` steps, which are not the last."""
        return False

    def act(self, run: Run) -> None:
        """Does what takes time between two steps. It does not count as a step's time."""

    def on_pause(self, run: Run) -> None:
        """Before callbacks act: wait for the step under way."""

    def on_resume(self, run: Run) -> None:
        """After callbacks have acted."""

    def on_stop(self, run: Run) -> None:
        """After the last step of this start, whether all are done or the run was stopped."""

    def on_finish(self, run: Run) -> None:
        """After all steps are done and checkpoints are written."""

    def close(self) -> None:
        """At the end, also after an error."""


class CallbackContext(NamedTuple):
    """What a callback is built from.

    Attributes:
      folder: of the run.
      stop: stops the run, as a signal does.
    """

    folder: Path
    stop: StopRequest


class CallbackConfig(Protocol):
    """A frozen dataclass whose fields are a callback's config; `name` is its name there."""

    def make(self, context: CallbackContext) -> Callback:
        """The callback."""
        ...


CALLBACKS: Registry[type[Any]] = Registry(
    "callback",
    {
        "profile": "alload_jax.training.callbacks.profile:ProfileConfig",
        "time_limit": "alload_jax.training.callbacks.time_limit:TimeLimitConfig",
    },
)
"""Classes of configs, each a `CallbackConfig`, that the config's `callbacks` can name."""
