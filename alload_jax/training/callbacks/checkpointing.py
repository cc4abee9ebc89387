"""Saves checkpoints at a fixed interval and when a run stops."""

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.run_plan import RunPlan


class Checkpointing(Callback):
    """Saves the state; writing continues in the background."""

    def __init__(self, checkpoints: Checkpoints, every: int, plan: RunPlan):
        """Saves every `every` steps, with what the plan has been recalibrated with."""
        self._checkpoints, self._every, self._plan = checkpoints, every, plan

    def on_step_end(self, run: Run, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """See `Callback.on_step_end`.

        Raises:
          InputError: a checkpoint could not be written in the background.
        """
        self._checkpoints.check_writing()

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return run.done % self._every == 0

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        self._save(run)

    def on_stop(self, run: Run) -> None:
        """See `Callback.on_stop`; waits until the checkpoint is on disk.

        Raises:
          InputError: it could not be written.
        """
        self._save(run)
        self._checkpoints.wait()

    def _save(self, run: Run) -> None:
        self._checkpoints.save(run.done, run.state, self._plan.state())
