"""The hooks of callbacks, and a registry of the callbacks that a config can add by name."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.registry import Registry
from alload_jax.training.signals import StopRequest
from alload_jax.training.state import TrainState


class Run(Protocol):
    """The interface of the loop for callbacks; see `training.loop.Loop`."""

    done: int
    total: int
    signal: int

    @property
    def state(self) -> TrainState:
        """The current training state."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all steps of the run are done."""
        ...

    def refuse(self, reason: str) -> None:
        """Stops the run before the step that is about to start."""
        ...


class Callback:
    """Hooks on the training loop; each does nothing unless overridden.

    In a cluster, all processes call the same hooks at the same steps. If the metrics of a step are
    not finite, it starts again without its bad samples, and so does the step behind it: the hooks
    around these steps are called again.
    """

    def on_start(self, run: Run) -> None:
        """Runs before the first step of this start."""

    def on_step_start(self, run: Run, step: PlacedStep) -> None:
        """Runs before a step is dispatched; `run.refuse` prevents the step."""

    def on_step_end(self, run: Run, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """Runs after a step is dispatched; its metrics may not be computed yet."""

    def due(self, run: Run) -> bool:
        """Returns whether to call `act` after `run.done` steps; not called after the last step."""
        return False

    def missed(self, run: Run) -> bool:
        """Returns whether to call `act` before the first step of this start.

        An earlier start may have ended between saving the state and acting.
        """
        return False

    def act(self, run: Run) -> None:
        """Runs slow work between two steps; its time does not count as step time."""

    def on_pause(self, run: Run) -> None:
        """Runs before callbacks act; waits for the step in flight."""

    def on_resume(self, run: Run) -> None:
        """Runs after callbacks have acted."""

    def on_stop(self, run: Run) -> None:
        """Runs after the last step of this start, also if the run was stopped early."""

    def on_finish(self, run: Run) -> None:
        """Runs after all steps are done and checkpoints are written."""

    def close(self) -> None:
        """Releases resources at the end, also after an error."""


class CallbackContext(NamedTuple):
    """Arguments for building a callback.

    Attributes:
      folder: folder of the run.
      stop: request that stops the run, as a signal does.
    """

    folder: Path
    stop: StopRequest


class CallbackConfig(Protocol):
    """A frozen dataclass whose fields are a callback's config; `name` is its name in the config."""

    def make(self, context: CallbackContext) -> Callback:
        """Builds the callback."""
        ...


CALLBACKS: Registry[type[Any]] = Registry(
    "callback",
    {
        "profile": "alload_jax.training.callbacks.profile:ProfileConfig",
        "time_limit": "alload_jax.training.callbacks.time_limit:TimeLimitConfig",
    },
)
"""Config classes, each a `CallbackConfig`, that `callbacks` in the config can name."""
