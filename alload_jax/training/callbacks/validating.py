"""Validates the model on held-out samples during training and at the end."""

import sys
import time
from collections.abc import Callable, Sequence

from alload_jax.training.best import BestCheckpoints, Measured
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.run_files import MetricsLog
from alload_jax.training.trackers.tracker import Tracker
from alload_jax.training.validation.figures import (
    LOSS,
    MEASURED_SET,
    finite,
    validation_figures,
)
from alload_jax.training.validation.validator import Validator


class Validating(Callback):
    """Measures the loss, logs it, and saves a checkpoint where it is one of the best.

    It stands behind the callback that saves at intervals, so that the state is safe before slow
    work begins. A validation that an earlier start has missed is done by the next.
    """

    def __init__(
        self,
        validator: Validator,
        every: int | None,
        log: MetricsLog,
        tracker: Tracker,
        say: Callable[[str], None],
        best: BestCheckpoints,
        save: Callable[[Run], None],
    ):
        """Validates every `every` steps and at the end; None for only at the end.

        Args:
          validator: measures.
          every: number of steps between validations.
          log: log of the metrics, with the validations of earlier starts.
          tracker: shows the figures.
          say: prints a line.
          best: which checkpoints are the best.
          save: saves a checkpoint.
        """
        self._validator, self._every = validator, every
        self._log, self._tracker, self._say = log, tracker, say
        self._best, self._save = best, save
        best.begin(self.measured)

    @property
    def measured(self) -> list[Measured]:
        """The validations so far of the set that is measured, in the order of their steps."""
        return [
            Measured(row[LOSS], row["step"])
            for row in self._log.validations
            if row.get(MEASURED_SET) == self._validator.measured_set and LOSS in row
        ]

    def figures(self) -> dict[str, float]:
        """Figures for the summary of the run; none without a finite loss."""
        if not (found := self.measured):
            return {}
        best = min(found)
        return {
            "validation_loss": found[-1].loss,
            "validation_loss_best": best.loss,
            "validation_step_best": best.step,
        }

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return self._every is not None and run.done % self._every == 0

    def missed(self, run: Run) -> bool:
        """See `Callback.missed`."""
        return self.due(run) and not self._is_validated(run.done)

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        self._validate(run)

    def on_stop(self, run: Run) -> None:
        """See `Callback.on_stop`; validates the last step of the run, unless an earlier start has.

        Raises:
          InputError: a checkpoint could not be written.
        """
        if run.complete and not self._is_validated(run.done):
            self._validate(run)
            self._best.finish()

    def _is_validated(self, step: int) -> bool:
        name = self._validator.measured_set
        return any(
            row["step"] == step and row.get(MEASURED_SET) == name for row in self._log.validations
        )

    def _validate(self, run: Run) -> None:
        began = time.monotonic()
        validator = self._validator
        figures = validation_figures(validator.measure(run.state), validator.levels)
        known = finite(figures)
        self._log.write({"step": run.done, MEASURED_SET: validator.measured_set} | known)
        self._tracker.log(run.done, known)
        if LOSS not in known:
            reason = "is not finite" if LOSS in figures else "is unknown: no sample can be read"
            text = f"warning: validation at step {run.done}: the loss {reason}"
            print(text, file=sys.stderr, flush=True)
            return
        seconds = time.monotonic() - began
        self._say(f"{_told(Measured(known[LOSS], run.done), self.measured)} · {seconds:,.1f} s")
        if self._best.add(Measured(known[LOSS], run.done)):
            self._save(run)


def _told(now: Measured, measured: Sequence[Measured]) -> str:
    lowest = min(measured)
    before = f"lowest {lowest.loss:.4f} at step {lowest.step}"
    compared = "the lowest so far" if lowest == now else before
    return f"validation at step {now.step}: loss {now.loss:.4f}, {compared}"
