"""The training loop: runs steps in order and calls callbacks around them."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.training.callbacks.callback import Callback
from alload_jax.training.shape_groups import GroupTrainer
from alload_jax.training.state import TrainState
from alload_jax.training.trainer import Trainer


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
    ):
        """Starts at step `start` of `total`."""
        self.done, self.total = start, total
        self.signal, self.refusal = 0, ""
        self._trainer, self._callbacks = trainer, callbacks

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
            self._call("on_stop")
        finally:
            for callback in reversed(self._callbacks):
                callback.close()

    def finish(self) -> None:
        """Calls `on_finish` of the callbacks, after all steps are done and saved."""
        self._call("on_finish")

    def _step(self, step: PlacedStep) -> bool:
        """Dispatches a step; returns False if a callback refuses it."""
        self._call("on_step_start", step)
        if self.refusal:
            return False
        metrics: dict[str, jax.Array] = self._trainer.step(step)
        self.done = step.number + 1
        self._call("on_step_end", step, metrics)
        return True

    def _interrupt(self) -> None:
        """Calls `act` of the callbacks that are due, with no step in flight."""
        self._act([callback for callback in self._callbacks if callback.due(self)])

    def _act(self, due: Sequence[Callback]) -> None:
        if not due:
            return
        self._call("on_pause")
        for callback in due:
            callback.act(self)
        self._call("on_resume")

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, *arguments)
