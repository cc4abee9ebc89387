"""The training loop: runs steps in order and calls callbacks around them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.training.bad_samples import Repair, stop_at
from alload_jax.training.callbacks.callback import Callback
from alload_jax.training.shape_groups import GroupTrainer
from alload_jax.training.state import TrainState
from alload_jax.training.trainer import Trainer


class _InFlight(NamedTuple):
    """A dispatched step without its arrays."""

    number: int
    metrics: dict[str, jax.Array]


class Loop:
    """Runs steps and calls callbacks in list order.

    Attributes:
      done: number of optimizer steps done since the start of training.
      total: number of optimizer steps of the whole run.
      signal: number of the signal or other reason that stopped the run early; 0 for none.
      refusal: reason for refusing a step; empty if none was refused.
    """

    def __init__(
        self,
        trainer: Trainer | GroupTrainer,
        start: int,
        total: int,
        callbacks: Sequence[Callback],
        repair: Repair = stop_at,
    ):
        """Starts at step `start` of `total`.

        Args:
          trainer: runs the steps.
          start: number of steps done.
          total: number of steps of the run.
          callbacks: in the order in which they are called.
          repair: gives the step to run in place of one whose metrics are not finite.
        """
        self.done, self.total = start, total
        self.signal, self.refusal = 0, ""
        self._trainer, self._callbacks, self._repair = trainer, callbacks, repair
        self._in_flight: _InFlight | None = None

    @property
    def state(self) -> TrainState:
        """The current training state; the next step donates its arrays."""
        return self._trainer.state

    @property
    def complete(self) -> bool:
        """Whether all steps of the run are done."""
        return self.done >= self.total

    def refuse(self, reason: str) -> None:
        """Stops the run before the step that is about to start."""
        self.refusal = self.refusal or reason

    def run(self, steps: Iterable[PlacedStep]) -> None:
        """Runs steps until all are done, a signal arrives or a step is refused.

        Errors of callbacks propagate after all callbacks are closed.

        Raises:
          InputError: a step's metrics are not finite and it cannot be repaired.
        """
        try:
            self._call("on_start")
            if self.done and not self.complete:
                self._act([callback for callback in self._callbacks if callback.missed(self)])
            for step in steps:
                self.signal = step.signal
                if self.signal or not self._step(step):
                    break
                if self.complete:
                    break
                self._interrupt()
                if self.refusal:
                    break
            self._settle()
            self._call("on_stop")
        finally:
            for callback in reversed(self._callbacks):
                callback.close()

    def finish(self) -> None:
        """Calls `on_finish` of the callbacks, after all steps are done and saved."""
        self._call("on_finish")

    def _step(self, step: PlacedStep) -> bool:
        """Dispatches a step; returns False if a callback refuses it or the one before it."""
        self._call("on_step_start", step)
        if self.refusal:
            return False
        metrics: dict[str, jax.Array] = self._trainer.step(step)
        # The devices have work while the metrics of the step before are read.
        if self._failed():  # and then this step has changed nothing either
            return self._repeat() and self._step(step._replace(wait_seconds=0.0))
        self._in_flight = _InFlight(step.number, metrics)
        self.done = step.number + 1
        self._call("on_step_end", step, metrics)
        return True

    def _settle(self) -> bool:
        """Waits for the step in flight and repairs it; returns False if it is then refused."""
        while self._failed():
            if not self._repeat():
                return False
        return True

    def _failed(self) -> bool:
        """Waits for the step in flight; returns whether one of its metrics is not finite."""
        if self._in_flight is None:
            return False
        return not all(math.isfinite(value) for value in self._in_flight.metrics.values())

    def _repeat(self) -> bool:
        """Dispatches the step in flight, which has changed nothing, as it is after its repair."""
        assert self._in_flight is not None
        number, metrics = self._in_flight
        self._in_flight, self.done = None, number
        step = self._repair(number, {name: float(value) for name, value in metrics.items()})
        return self._step(step)

    def _interrupt(self) -> None:
        """Calls `act` of the callbacks that are due, with no step in flight."""
        self._act([callback for callback in self._callbacks if callback.due(self)])

    def _act(self, due: Sequence[Callback]) -> None:
        if not due or not self._settle():
            return
        self._call("on_pause")
        for callback in due:
            callback.act(self)
        self._call("on_resume")

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, *arguments)
