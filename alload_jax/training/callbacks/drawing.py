"""Generates samples during training and at the end."""

from alload_jax.sampling.samples import SampleWriter
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.trackers.tracker import Tracker


class Drawing(Callback):
    """Generates the config's grids and prompts with the moving average of the weights."""

    def __init__(self, writer: SampleWriter, every: int | None, tracker: Tracker):
        """Generates every `every` steps and at the end; None for only at the end."""
        self._writer, self._every, self._tracker = writer, every, tracker

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return self._every is not None and run.done % self._every == 0

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        for path in self._writer.write(run.done, run.state.averaged_weights.merged()):
            self._tracker.show(run.done, f"samples/{path.stem}", path)

    def on_finish(self, run: Run) -> None:
        """See `Callback.on_finish`."""
        self.act(run)
        self._tracker.close()
