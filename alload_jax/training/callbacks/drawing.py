"""Draws samples, and evaluates the model by some at the end."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, print_stderr, reason_of
from alload_jax.processes import waits
from alload_jax.sampling.evaluators import Drawing as EvaluatedDrawing
from alload_jax.sampling.evaluators import Evaluator
from alload_jax.sampling.pictures import Picture
from alload_jax.sampling.progress_grid import Progress
from alload_jax.sampling.samples import SampleWriter
from alload_jax.training.loop import Callback, Loop
from alload_jax.training.progress import ProgressBar
from alload_jax.training.trackers import Tracker

_LARGEST_SHARE = 0.05
"""Share of a run's time above which drawing samples is said to take long."""


@waits("for samples to be measured")
class Evaluation(Callback):
    """Runs the evaluators at the end.

    Attributes:
      figures: metrics of the evaluators by name; empty before the end.
    """

    def __init__(self, evaluators: Sequence[Evaluator], writer: SampleWriter, seed: int):
        """Evaluators generate samples with `writer.draw` from the initial noise of `seed`."""
        self.figures: dict[str, float] = {}
        self._evaluators, self._writer, self._seed = evaluators, writer, seed

    @override
    def on_finish(self, run: Loop) -> None:
        values = run.state.averaged_weights.merged()
        writer = self._writer
        tokens, origin = writer.condition_tokens, writer.origin
        drawing = EvaluatedDrawing(writer.draw, values, tokens, self._seed, origin)
        for evaluator in self._evaluators:
            self.figures |= evaluator.evaluate(drawing)


@waits("for samples to be drawn")
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
        self._drawn_at: float | None = None
        self._share = _LARGEST_SHARE

    @override
    def due(self, run: Loop) -> bool:
        return self._every is not None and run.done % self._every == 0

    @override
    def missed(self, run: Loop) -> bool:
        return self._writer.count > 0 and self.due(run) and run.done not in self._progress

    @override
    def act(self, run: Loop) -> None:
        began = time.monotonic()
        self._draw(run, lambda name: None)
        now, before = time.monotonic(), self._drawn_at
        self._drawn_at = now
        # The first time compiles.
        share = 0.0 if before is None else (now - began) / (now - before)
        if share > self._share and self._every and first_process():
            self._share = 1.0  # said once
            enough = math.ceil(self._every * (1 / _LARGEST_SHARE - 1) * share / (1 - share))
            print_stderr(
                f"note: drawing samples takes {share:.0%} of the time, {now - began:.1f} s every "
                f"{self._every} steps; with sampling.every {enough} it takes {_LARGEST_SHARE:.0%}"
            )

    @override
    def on_finish(self, run: Loop) -> None:
        with ProgressBar("drawing", self._writer.count) as bar:
            self._draw(run, bar.advance)
        self._tracker.close()

    def _draw(self, run: Loop, on_picture: Callable[[str], None]) -> None:
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
        print_stderr(f"warning: samples of step {step}: {reason}")
