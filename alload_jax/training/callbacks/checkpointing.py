"""Saves checkpoints at fixed intervals and when a run stops."""

import time

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.checkpoint import CheckpointConfig, Checkpoints
from alload_jax.training.run_plan import RunPlan


class Checkpointing(Callback):
    """Saves the state; writing continues in the background."""

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig, plan: RunPlan):
        """Saves after every so many steps or minutes, with what the plan was recalibrated with."""
        self._checkpoints, self._config, self._plan = checkpoints, config, plan
        self._saved_at, self._saved_step = time.monotonic(), 0
        self._requested = False

    def wants_save(self) -> bool:
        """Whether the interval of minutes has passed in this process.

        It is read before each step and shared, so that all processes save after the same step.
        """
        minutes = self._config.minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`."""
        self._saved_at, self._saved_step = time.monotonic(), run.done

    def on_step_start(self, run: Run, step: PlacedStep) -> None:
        """See `Callback.on_step_start`."""
        # The step behind a checkpoint was requested to be saved before there was that checkpoint.
        self._requested = step.save and step.number > self._saved_step

    def on_step_end(self, run: Run, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """See `Callback.on_step_end`.

        Raises:
          InputError: a checkpoint could not be written in the background.
        """
        self._checkpoints.check_writing()

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        every = self._config.every
        return self._requested or (every is not None and run.done % every == 0)

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        self.save(run)

    def on_stop(self, run: Run) -> None:
        """See `Callback.on_stop`; waits until the checkpoint is on disk.

        Raises:
          InputError: it could not be written.
        """
        self.save(run)
        self._checkpoints.wait()

    def save(self, run: Run) -> None:
        """Saves the state after `run.done` steps, unless it is saved.

        Raises:
          InputError: it cannot be written.
        """
        self._checkpoints.save(run.done, run.state, self._plan.state())
        self._saved_at, self._saved_step = time.monotonic(), run.done
        self._requested = False
