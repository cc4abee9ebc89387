"""Watches a run: writes each step's metrics, and stops a run that has gone wrong."""

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import optax

from alload_jax.data.placement import PlacedStep
from alload_jax.errors import InputError
from alload_jax.planning.cost import CostModel
from alload_jax.planning.metrics import step_metrics
from alload_jax.planning.plan import Plan
from alload_jax.training.progress import ProgressBar
from alload_jax.training.telemetry import BadRecords, MetricsLog, write_json

_SMOOTHING = 0.95


class _Dispatched(NamedTuple):
    """A step under way on the devices, apart from its arrays."""

    number: int
    epoch: int
    problems: tuple[str, ...]
    metrics: dict[str, jax.Array]


class Monitor:
    """Reads each step's metrics once the next step has been dispatched, so as never to hold up.

    Attributes:
      refusal: why a step was refused, or empty.
    """

    def __init__(
        self,
        plan: Plan,
        predictor: CostModel,
        seconds_per_split_token: float,
        learning_rate: optax.Schedule,
        log: MetricsLog,
        bad_records: BadRecords,
        max_bad_records: int,
    ):
        """Watches steps of `plan`, whose cost `predictor` predicts; writes to `log`.

        `seconds_per_split_token` of communication are added for each split token of a rank.
        """
        self._plan = plan
        self._predictor, self._seconds_per_split_token = predictor, seconds_per_split_token
        self._learning_rate = learning_rate
        self._log = log
        self._max_bad_records = max_bad_records
        self._bad_records = bad_records
        self.refusal = ""
        self._under_way: _Dispatched | None = None
        self._settled_at = self._waited = 0.0
        self._loss = self._tokens_per_second = math.nan

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of every step so far, steps of the run before it was resumed included."""
        return self._log.rows

    @contextmanager
    def watching(self, bar: ProgressBar) -> Iterator[None]:
        """Shows progress on the bar while open; settles the last step on leaving without error."""
        self._bar = bar
        self.restart_clock()
        try:
            yield
            self.settle()
        finally:
            self._log.close()

    def restart_clock(self) -> None:
        """Counts the next step's time from now, after something that was no step."""
        self._settled_at, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what is no step: the step under way is settled before, its time not counted."""
        self.settle()
        yield
        self.restart_clock()

    def accepts(self, step: PlacedStep) -> bool:
        """Whether a step may run; False if more of its records are damaged than is allowed."""
        self._waited += step.wait_seconds
        for problem in self._bad_records.add(step.problems):
            self._bar.say(f"skipped: {problem}")
        if len(self._bad_records) > self._max_bad_records:
            before = f"{len(self._bad_records)} damaged records were met before this start"
            self.refusal = (
                f"{(before, *step.problems)[-1]}; restore the record, or allow more than "
                f"data.loader.max_bad_records = {self._max_bad_records} to be skipped"
            )
        return not self.refusal

    def note(self, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """Takes notice of a step just dispatched, and settles the one before.

        Raises:
          InputError: the loss of the step before is not finite.
        """
        self.settle()
        self._under_way = _Dispatched(step.number, step.epoch, step.problems, metrics)

    def settle(self) -> None:
        """Waits for the step under way, checks it and writes its metrics.

        Raises:
          InputError: its loss is not finite; its samples are on disk then.
        """
        if self._under_way is None:
            return
        step, self._under_way = self._under_way, None
        values = {name: float(value) for name, value in step.metrics.items()}
        now = time.perf_counter()
        seconds, waited = now - self._settled_at, self._waited
        self.restart_clock()
        if not all(math.isfinite(value) for value in values.values()):
            self._stop_at(step.number, values)
        planned = step_metrics(
            self._plan.step(step.number), self._plan, self._predictor, self._seconds_per_split_token
        )
        trained = planned.samples - len(step.problems)
        self._log.write(
            {"step": step.number + 1, "epoch": step.epoch}
            | values
            | planned._asdict()
            | {
                "samples": trained,
                "step_seconds": seconds,
                "input_wait_seconds": waited,
                "learning_rate": float(self._learning_rate(step.number)),
                "skipped": len(step.problems),
            }
        )
        self._show(values["loss"], planned.tokens / seconds)

    def _show(self, loss: float, tokens_per_second: float) -> None:
        self._loss = _smoothed(self._loss, loss)
        self._tokens_per_second = _smoothed(self._tokens_per_second, tokens_per_second)
        self._bar.advance(f"loss {self._loss:.4f} · {self._tokens_per_second:,.0f} tokens/s")

    def _stop_at(self, number: int, values: dict[str, float]) -> None:
        """Leaves the step's samples on disk and raises."""
        path = self._log.folder / "bad_step.json"
        step = self._plan.step(number)
        content = {
            "step": number + 1,
            "metrics": {name: str(value) for name, value in values.items()},
            "micro_batches": [dataclasses.asdict(part) for part in step.micro_batches],
        }
        write_json(path, content)
        raise InputError(
            f"step {number + 1}: loss {values['loss']}, gradient norm {values['grad_norm']}; its "
            f"samples are in {path}. Lower optimizer.learning_rate or remove bad samples; the "
            "last checkpoint is untouched"
        )


def _smoothed(before: float, now: float) -> float:
    return now if math.isnan(before) else _SMOOTHING * before + (1 - _SMOOTHING) * now
