"""The training loop: steps in their order, and callbacks around them."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from alload_jax.data.placement import PlacedStep
from alload_jax.training.callbacks.callback import Callback
from alload_jax.training.shape_groups import GroupTrainer
from alload_jax.training.state import TrainState
from alload_jax.training.trainer import Trainer


class Loop:
    """Runs steps and calls callbacks, in the order in which they are listed.

    Attributes:
      done: optimizer steps done, from the start of training.
      total: optimizer steps of the whole run.
      signal: number of the signal, or other reason, for which the run stopped early; 0 for none.
      refusal: why a step was refused; empty if none was.
    """

    def __init__(
        self,
        trainer: Trainer | GroupTrainer,
        start: int,
        total: int,
        callbacks: Sequence[Callback],
    ):
        """Begins at step `start` of `total`."""
        self.done, self.total = start, total
        self.signal, self.refusal = 0, ""
        self._trainer, self._callbacks = trainer, callbacks

    @property
    def state(self) -> TrainState:
        """What training has reached; its arrays are given up by the next step."""
        return self._trainer.state

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        return self.done >= self.total

    def refuse(self, reason: str) -> None:
        """Ends the run before the step that is about to begin."""
        self.refusal = self.refusal or reason

    def run(self, steps: Iterable[PlacedStep]) -> None:
        """Runs steps until all are done, a signal comes or a step is refused.

        Raises:
          whatever a callback raises; all callbacks are closed then as well.
        """
        try:
            self._call("on_start")
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
        """Tells the callbacks that all steps are done and everything is saved."""
        self._call("on_finish")

    def _step(self, step: PlacedStep) -> bool:
        """Dispatches a step; False if a callback refuses it."""
        self._call("on_step_start", step)
        if self.refusal:
            return False
        metrics: dict[str, jax.Array] = self._trainer.step(step)
        self.done = step.number + 1
        self._call("on_step_end", step, metrics)
        return True

    def _interrupt(self) -> None:
        """Lets the callbacks act that are due, with no step under way."""
        due = [callback for callback in self._callbacks if callback.due(self)]
        if not due:
            return
        self._call("on_pause")
        for callback in due:
            callback.act(self)
        self._call("on_resume")

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, *arguments)
