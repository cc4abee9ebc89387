"""Saves checkpoints at a fixed interval and when a run stops."""

from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.run_plan import RunPlan


class Checkpointing(Callback):
    """Saves the state; writing continues in the background."""

    def __init__(self, checkpoints: Checkpoints, every: int, plan: RunPlan):
        """Saves every `every` steps, with what the plan has been recalibrated with."""
        self._checkpoints, self._every, self._plan = checkpoints, every, plan

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return run.done % self._every == 0

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        self._save(run)

    def on_stop(self, run: Run) -> None:
        """See `Callback.on_stop`."""
        self._save(run)

    def _save(self, run: Run) -> None:
        self._checkpoints.save(run.done, run.state, self._plan.state())
