"""Saves checkpoints at a fixed interval and when a run stops."""

from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.checkpoint import Checkpoints


class Checkpointing(Callback):
    """Saves the state; writing continues in the background."""

    def __init__(self, checkpoints: Checkpoints, every: int):
        """Saves every `every` steps."""
        self._checkpoints, self._every = checkpoints, every

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return run.done % self._every == 0

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        self._checkpoints.save(run.done, run.state)

    def on_stop(self, run: Run) -> None:
        """See `Callback.on_stop`."""
        self._checkpoints.save(run.done, run.state)
