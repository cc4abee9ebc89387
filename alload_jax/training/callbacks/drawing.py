"""Generates samples during training and at the end."""

import sys
from collections.abc import Callable

from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, reason_of
from alload_jax.sampling.pictures import Picture
from alload_jax.sampling.samples import SampleWriter
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.progress import ProgressBar
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
        self._draw(run, lambda name: None)

    def on_finish(self, run: Run) -> None:
        """See `Callback.on_finish`."""
        with ProgressBar("drawing", self._writer.count) as bar:
            self._draw(run, bar.advance)
        self._tracker.close()

    def _draw(self, run: Run, on_picture: Callable[[str], None]) -> None:
        """Draws in all processes, to the end, and writes in the first one."""
        for picture in self._writer.pictures(run.done, run.state.averaged_weights.merged()):
            if first_process():
                self._write(run.done, picture)
            on_picture(picture.path.name)

    def _write(self, step: int, picture: Picture) -> None:
        try:
            picture.write()
            self._tracker.show(step, f"samples/{picture.path.stem}", picture.path)
        except (InputError, OSError) as error:  # training is worth more than a picture of it
            reason = reason_of(error)
            print(f"warning: samples of step {step}: {reason}", file=sys.stderr, flush=True)
