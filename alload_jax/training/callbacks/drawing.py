"""Generates samples during training and at the end."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, reason_of
from alload_jax.sampling.pictures import Picture
from alload_jax.sampling.progress_grid import Progress
from alload_jax.sampling.samples import SampleWriter
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.progress import ProgressBar
from alload_jax.training.trackers.tracker import Tracker


class Drawing(Callback):
    """Generates the config's grids and prompts with the moving average of the weights."""

    def __init__(
        self, writer: SampleWriter, every: int | None, tracker: Tracker, progress: Progress
    ):
        """Generates every `every` steps and at the end; None for only at the end.

        Args:
          writer: generates.
          every: number of steps between samples.
          tracker: shows them.
          progress: shows them over the steps.
        """
        self._writer, self._every, self._tracker = writer, every, tracker
        self._progress = progress

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return self._every is not None and run.done % self._every == 0

    def missed(self, run: Run) -> bool:
        """See `Callback.missed`."""
        return self._writer.count > 0 and self.due(run) and run.done not in self._progress

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
        self._progress.add(run.done)
        if first_process() and self._writer.count:
            with _warning(run.done):
                for path in self._progress.write():
                    self._tracker.show(run.done, f"samples/{path.stem}", path)

    def _write(self, step: int, picture: Picture) -> None:
        with _warning(step):
            picture.write()
            self._tracker.show(step, f"samples/{picture.path.stem}", picture.path)


@contextmanager
def _warning(step: int) -> Iterator[None]:
    """Makes an error of a file a warning: training is worth more than a picture of it."""
    try:
        yield
    except (InputError, OSError) as error:
        reason = reason_of(error)
        print(f"warning: samples of step {step}: {reason}", file=sys.stderr, flush=True)
