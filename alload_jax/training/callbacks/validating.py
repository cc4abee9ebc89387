"""Saves checkpoints, and validates on held-out samples."""

import time
from collections.abc import Callable

import jax
from typing_extensions import override

from alload_jax.data.loader import PlacedStep
from alload_jax.errors import print_stderr
from alload_jax.processes import waits
from alload_jax.training import LOSS, MEASURED_SET, CheckpointConfig
from alload_jax.training.checkpoint import BestCheckpoints, Checkpoints, Measured
from alload_jax.training.loop import Callback, Loop
from alload_jax.training.run_files import MetricsLog
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.trackers import Tracker
from alload_jax.training.validator import Validator, finite, validation_figures


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

    @override
    def on_start(self, run: Loop) -> None:
        self._saved_at, self._saved_step = time.monotonic(), run.done

    @override
    def on_step_start(self, run: Loop, step: PlacedStep) -> None:
        # The step behind a checkpoint was requested to be saved before there was that checkpoint.
        self._requested = step.save and step.number > self._saved_step

    def on_step_end(self, run: Loop, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """See `Callback.on_step_end`.

        Raises:
          InputError: a checkpoint could not be written in the background.
        """
        self._checkpoints.check_writing()

    @override
    def due(self, run: Loop) -> bool:
        every = self._config.every
        return self._requested or (every is not None and run.done % every == 0)

    @override
    def act(self, run: Loop) -> None:
        self.save(run)

    def on_stop(self, run: Loop) -> None:
        """See `Callback.on_stop`; waits until the checkpoint is on disk.

        Raises:
          InputError: it could not be written.
        """
        self.save(run)
        self._checkpoints.wait()

    def save(self, run: Loop) -> None:
        """Saves the state after `run.done` steps, unless it is saved.

        Raises:
          InputError: it cannot be written.
        """
        self._checkpoints.save(run.done, run.state, self._plan.state(run.done))
        self._saved_at, self._saved_step = time.monotonic(), run.done
        self._requested = False


@waits("for the validation")
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
        save: Callable[[Loop], None],
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

    @override
    def due(self, run: Loop) -> bool:
        return self._every is not None and run.done % self._every == 0

    @override
    def missed(self, run: Loop) -> bool:
        return self.due(run) and not self._is_validated(run.done)

    def on_stop(self, run: Loop) -> None:
        """See `Callback.on_stop`; validates the last step of the run, unless an earlier start has.

        Raises:
          InputError: a checkpoint could not be written.
        """
        if run.complete and not self._is_validated(run.done):
            self.act(run)
            self._best.finish()

    def _is_validated(self, step: int) -> bool:
        name = self._validator.measured_set
        return any(
            row["step"] == step and row.get(MEASURED_SET) == name for row in self._log.validations
        )

    @override
    def act(self, run: Loop) -> None:
        began = time.monotonic()
        validator = self._validator
        figures = validation_figures(validator.measure(run.state), validator.levels)
        known = finite(figures)
        self._log.write({"step": run.done, MEASURED_SET: validator.measured_set} | known)
        self._tracker.log(run.done, known)
        if LOSS not in known:
            reason = "is not finite" if LOSS in figures else "is unknown: no sample can be read"
            text = f"warning: validation at step {run.done}: the loss {reason}"
            print_stderr(text)
            return
        seconds = time.monotonic() - began
        now, lowest = Measured(known[LOSS], run.done), min(self.measured)
        before = f"lowest {lowest.loss:.4f} at step {lowest.step}"
        compared = "the lowest so far" if lowest == now else before
        self._say(
            f"validation at step {now.step}: loss {now.loss:.4f}, {compared} · {seconds:,.1f} s"
        )
        if self._best.add(now):
            self._save(run)
