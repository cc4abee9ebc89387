"""The training loop: runs steps in order, leaves damaged samples out, calls callbacks.

An update whose loss or gradient is not finite changes nothing (`step.apply_gradients`), so that the
step can be computed again for fewer and fewer of its samples. Nothing is kept between the starts of
a run: a resumed run finds the same samples in the same step.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import NoReturn

import jax

from alload_jax.data.collate import Collator, HostStep
from alload_jax.data.loader import PlacedStep
from alload_jax.errors import InputError, print_stderr
from alload_jax.processes import waits
from alload_jax.training.run_files import write_json
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import TrainState
from alload_jax.training.trainer import Trainer

_MOST_NAMED = 8
"""Bad samples of one step beyond which the search ends: then the run diverges."""
_MOST_REPEATS = 3
"""How often a step is repeated."""

Repair = Callable[[int, Mapping[str, float]], PlacedStep]
"""(number of a step, its metrics, of which some are not finite) → the step to run in its place."""


def stop_at(number: int, values: Mapping[str, float], what: str = "") -> NoReturn:
    """Refuses a step whose metrics are not finite.

    Args:
      number: number of the step, from 0.
      values: its metrics.
      what: what is known of its samples.

    Raises:
      InputError: always.
    """
    raise InputError(
        f"step {number + 1}: loss {values.get('loss')}, gradient norm {values.get('grad_norm')}"
        f"{what}. Lower optimizer.learning_rate, or list bad samples in a file and name it as "
        "data.exclude; the last checkpoint is unchanged"
    )


@waits("for the bad samples of a step to be found")
class BadSamples:
    """A `Repair` that leaves out the samples that are not finite by themselves.

    In a cluster, all processes call it for the same steps and find the same samples.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: RunPlan,
        collator: Collator,
        place: Callable[[HostStep], PlacedStep],
        folder: Path,
        most: int,
        progress: Callable[[], None],
    ):
        """Repairs steps of a run.

        Args:
          trainer: what has run the step.
          plan: the plan of the run.
          collator: reads and collates the samples of this process's ranks.
          place: copies a step to the devices; a collective operation.
          folder: folder of the run.
          most: number of bad records that the run may skip.
          progress: called before each computation.
        """
        self._trainer, self._plan, self._collator = trainer, plan, collator
        self._place, self._folder, self._progress = place, folder, progress
        self._most = max(most, _MOST_NAMED)
        self._number, self._repeats = -1, 0
        self._bad: frozenset[int] = frozenset()

    def __call__(self, number: int, values: Mapping[str, float]) -> PlacedStep:
        """Returns a step without the samples that are not finite; they are among its problems.

        Raises:
          InputError: no samples or all of them are to blame; the step is then written to disk.
        """
        if number != self._number:
            self._number, self._repeats, self._bad = number, 0, frozenset()
        self._repeats += 1
        if self._repeats > _MOST_REPEATS:
            self._stop(values, ", and finite in parts")
        samples = self._samples(number)
        found = self._search(samples, [], values)
        self._bad |= frozenset(found)
        if len(samples) > 1 and len(found) == len(samples):
            self._stop(values, f" for each of its {len(samples)} samples: training diverges")
        if len(found) == len(samples) == 1 and not self._others_are_finite():
            self._stop(values, ", and those of other steps are not finite: training diverges")
        if not found:
            print_stderr(
                f"warning: step {number + 1}: loss {values.get('loss')} at first, but finite when "
                "computed again; the device may be faulty"
            )
        collate = replace(self._collator, not_finite=self._bad)
        return self._place(collate(self._plan.plan.step(number)))

    def _samples(self, number: int) -> list[int]:
        """Those of a step that are not known to be bad."""
        parts = self._plan.plan.step(number).micro_batches
        distinct = dict.fromkeys(sample for part in parts for sample in part.samples)
        return [each for each in distinct if each not in self._bad | self._collator.excluded]

    def _others_are_finite(self) -> bool:
        """Whether one of some samples of other steps is finite by now, if there are any.

        They are of the steps before this one in its epoch, which are planned, and of later ones.
        """
        plan, number, tried = self._plan.plan, self._number, False
        epoch = plan.locate(number)[0]
        before = takewhile(
            lambda each: each >= 0 and plan.locate(each)[0] == epoch, count(number - 1, -1)
        )
        steps = chain(before, range(number + 1, number + 1 + _MOST_NAMED))
        others = ((each, sample) for each in steps for sample in self._samples(each))
        for each, sample in islice(others, _MOST_NAMED):
            tried = True
            if self._is_finite([sample], each):
                return True
        return not tried

    def _search(
        self, samples: Sequence[int], found: list[int], values: Mapping[str, float]
    ) -> list[int]:
        """Adds those of `samples` that are not finite to `found`, by halves."""
        if not samples or self._is_finite(samples, self._number):
            return found
        if len(found) >= self._most:
            self._stop(values, f" for more than {self._most} samples: training diverges")
        if len(samples) == 1:
            return [*found, *samples]
        before, half = len(found), len(samples) // 2
        found = self._search(samples[:half], found, values)
        found = self._search(samples[half:], found, values)
        if len(found) == before:
            self._stop(values, ", but finite for each of its samples")
        return found

    def _is_finite(self, samples: Sequence[int], number: int) -> bool:
        """Whether loss and gradient are finite for some samples of a step alone."""
        self._progress()
        step, only = self._plan.plan.step(number), frozenset(samples)
        parts = step.micro_batches
        indices = {part.index for part in parts if not only.isdisjoint(part.samples)}
        parts = tuple(part for part in parts if part.index in indices)
        others = {sample for part in parts for sample in part.samples} - only
        collate = replace(self._collator, excluded=self._collator.excluded | others)
        return self._trainer.is_finite(self._place(collate(replace(step, micro_batches=parts))))

    def _stop(self, values: Mapping[str, float], what: str) -> NoReturn:
        """Writes the step's samples to disk and raises InputError."""
        path = self._folder / "bad_step.json"
        content = {
            "step": self._number + 1,
            "metrics": {name: str(value) for name, value in values.items()},
            "micro_batches": self._plan.content(self._number),
        }
        write_json(path, content)
        stop_at(self._number, values, f"{what}; its samples are in {path}")


class Callback:
    """Hooks on the training loop; each does nothing unless overridden.

    In a cluster, all processes call the same hooks at the same steps. If the metrics of a step are
    not finite, it starts again without its bad samples, and so does the step behind it: the hooks
    around these steps are called again.
    """

    def on_start(self, run: "Loop") -> None:
        """Runs before the first step of this start."""

    def on_step_start(self, run: "Loop", step: PlacedStep) -> None:
        """Runs before a step is dispatched; `run.refuse` prevents the step."""

    def on_step_end(self, run: "Loop", step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """Runs after a step is dispatched; its metrics may not be computed yet."""

    def due(self, run: "Loop") -> bool:
        """Returns whether to call `act` after `run.done` steps; not called after the last step."""
        return False

    def missed(self, run: "Loop") -> bool:
        """Returns whether to call `act` before the first step of this start.

        An earlier start may have ended between saving the state and acting.
        """
        return False

    def act(self, run: "Loop") -> None:
        """Runs slow work between two steps; its time does not count as step time."""

    def on_pause(self, run: "Loop") -> None:
        """Runs before callbacks act; waits for the step in flight."""

    def on_resume(self, run: "Loop") -> None:
        """Runs after callbacks have acted."""

    def on_stop(self, run: "Loop") -> None:
        """Runs after the last step of this start, also if the run was stopped early."""

    def on_finish(self, run: "Loop") -> None:
        """Runs after all steps are done and checkpoints are written."""

    def close(self) -> None:
        """Releases resources at the end, also after an error."""


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
        trainer: Trainer,
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
        self._in_flight: tuple[int, dict[str, jax.Array]] | None = None

    @property
    def state(self) -> TrainState:
        """The current training state; the next step donates its arrays."""
        return self._trainer.state

    @property
    def complete(self) -> bool:
        """Whether all steps of the run are done."""
        return self.done >= self.total

    def noise_scale(self, steps: Sequence[PlacedStep]) -> float:
        """See `Trainer.noise_scale`."""
        return self._trainer.noise_scale(steps)

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
                self._act([callback for callback in self._callbacks if callback.due(self)])
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
        self._in_flight = step.number, metrics
        self.done = step.number + 1
        self._call("on_step_end", step, metrics)
        return True

    def _settle(self) -> bool:
        """Waits for the step in flight and repairs it; returns False if it is then refused."""
        while self._failed():
            if not self._repeat():
                return False
        return True

    @waits("for the devices to finish the step before")
    def _failed(self) -> bool:
        """Waits for the step in flight; returns whether one of its metrics is not finite."""
        if self._in_flight is None:
            return False
        return not all(math.isfinite(value) for value in self._in_flight[1].values())

    def _repeat(self) -> bool:
        """Dispatches the step in flight, which has changed nothing, as it is after its repair."""
        assert self._in_flight is not None
        number, metrics = self._in_flight
        self._in_flight, self.done = None, number
        step = self._repair(number, {name: float(value) for name, value in metrics.items()})
        return self._step(step)

    def _act(self, due: Sequence[Callback]) -> None:
        """Calls `act` of some callbacks, with no step in flight."""
        if not due or not self._settle():
            return
        self._call("on_pause")
        for callback in due:
            callback.act(self)
        self._call("on_resume")

    def _call(self, hook: str, *arguments: object) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, *arguments)
