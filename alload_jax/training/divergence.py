"""Whether a run diverges: its losses and gradient norms against those of the steps before.

Losses of a plan with mixed lengths and noise levels have heavy tails, so nothing is assumed of
their distribution: a level counts as risen where most of the last losses exceed a multiple of the
largest of many before them. In steps of any one distribution, 7 of the last 10 of 210 are the
largest of all with a chance of 4 in 10¹¹. Where the objective says what a model loses that predicts
nothing, losses are also compared with that, so that a run that is wrong from its first step is seen
too.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, print_stderr
from alload_jax.training import RISEN
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.run_files import write_json
from alload_jax.training.run_plan import RunPlan

_LOSS = 0
"""Place of the loss beside the gradient norm."""
_RECENT, _MOST = 10, 7
"""Number of the last steps, and how many of them must exceed a bound."""
_WINDOW = 200
"""Number of the steps before them, whose largest loss and norm they are compared with."""
_FIRST_LOSSES, _FIRST_NORMS = 20, 50
"""Steps before them that there must be. Gradients of new weights grow over their first steps."""
_RISEN_NORM = 10.0
"""Factor of the largest norm beyond which the last ones are worth a warning."""
_SPIKE, _EARLY_SPIKE = 2.0, 4.0
"""Factors of what is usual beyond which a single loss is; the second without steps before."""


class Finding(NamedTuple):
    """What is wrong.

    Attributes:
      words: what it is.
      ago: number of steps since the last that is not affected.
      stops: whether it is beyond the bound.
      spike: whether it is a single step.
    """

    words: str
    ago: int
    stops: bool = False
    spike: bool = False


class Divergence:
    """Compares each step with those before it.

    Attributes:
      risen: whether the last losses or norms are worth a warning now.
      suspected: number of steps since the first of the last ones that is above its bound; 0 for
        none.
    """

    def __init__(self, stop_above: float | None, nothing: float | None = None):
        """Begins without steps.

        Args:
          stop_above: as in `DivergenceConfig`.
          nothing: loss of a model that predicts nothing; None if it is not known.
        """
        self._stop_above, self._nothing = stop_above, nothing
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._steps = self._rejected = 0
        self._spiked_at = -_RECENT
        self.risen = self._stopped = False
        self.suspected = 0

    def add(self, loss: float, grad_norm: float) -> Finding | None:
        """Adds the loss and gradient norm of a step; returns what is wrong and not said yet.

        A step of padding alone, whose loss and norm are 0, does not count.
        """
        self._steps += 1
        if loss == grad_norm == 0:
            return None
        if len(self._recent) == _RECENT:
            self._keep(*self._recent[0])
        self._recent.append((loss, grad_norm))
        if self._stop_above is not None and not self._stopped:
            bound = self._loss_bound(self._stop_above)
            if ago := self._above(_LOSS, bound):
                self._stopped = self.risen = True
                return Finding(self._words(_LOSS), ago, stops=True)
        bounds = (self._loss_bound(RISEN), self._norm_bound())
        found = [(part, ago) for part in (0, 1) if (ago := self._above(part, bounds[part]))]
        above = [
            any(value > bound for value, bound in zip(values, bounds, strict=True))
            for values in self._recent
        ]
        self.suspected = len(above) - above.index(True) if any(above) else 0
        before, self.risen = self.risen, bool(found) or (self.risen and any(above))
        if found and not before:  # a level that stays up is told once
            part, ago = found[0]
            return Finding(self._words(part), ago)
        return self._single(loss)

    def _single(self, loss: float) -> Finding | None:
        """A single loss of a size that no model can have that has learned anything."""
        if self._nothing is None or self.risen or self._steps - self._spiked_at < _RECENT:
            return None
        if len(self._losses) < _FIRST_LOSSES:
            bound = _EARLY_SPIKE * self._nothing
        else:
            bound = _SPIKE * max(self._nothing, *self._losses)
        if loss <= bound:
            return None
        self._spiked_at = self._steps
        return Finding(f"loss {loss:.4g}, {self._compared(loss)}", 1, spike=True)

    def _keep(self, loss: float, norm: float) -> None:
        """Takes a step into the window, unless it is one of those that are compared with it."""
        risen = loss > self._loss_bound(RISEN) or norm > self._norm_bound()
        if risen and self._rejected < _WINDOW:
            self._rejected += 1
            return
        if self._rejected == _WINDOW:  # it has become the usual
            self._losses.clear()
            self._norms.clear()
        self._rejected = 0
        self._losses.append(loss)
        self._norms.append(norm)

    def _loss_bound(self, factor: float) -> float:
        """This many times the largest loss, or the loss of a model that predicts nothing."""
        found = [] if self._nothing is None else [factor * self._nothing]
        if len(self._losses) >= _FIRST_LOSSES and max(self._losses) > 0:
            # Far below the loss of a model that predicts nothing, a model works.
            found.append(max(factor * max(self._losses), (self._nothing or 0) / 2))
        return min(found, default=math.inf)

    def _norm_bound(self) -> float:
        enough = len(self._norms) >= _FIRST_NORMS
        return _RISEN_NORM * max(self._norms) if enough else math.inf

    def _above(self, part: int, bound: float) -> int:
        """Number of steps from the first of the last ones above a bound; 0 if most are not."""
        above = [values[part] > bound for values in self._recent]
        return len(above) - above.index(True) if sum(above) >= _MOST else 0

    def _words(self, part: int) -> str:
        values = [values[part] for values in self._recent]
        middle = statistics.median(values)
        what = "loss" if part == _LOSS else "gradient norm"
        where = self._compared(middle) if part == _LOSS else self._largest(self._norms)
        return f"{what} {middle:.4g} over the last {len(values)} steps, {where}"

    def _compared(self, loss: float) -> str:
        """What a loss is compared with, in words."""
        if len(self._losses) >= _FIRST_LOSSES:
            return self._largest(self._losses)
        return f"where a model that predicts nothing has {self._nothing:.4g}"

    def _largest(self, values: deque[float]) -> str:
        return f"where the largest of {len(values)} steps before is {max(values):.4g}"


class DivergenceGuard:
    """Warns of a run that may diverge, keeps a checkpoint from before, and ends one that does.

    In a cluster all processes add the same metrics and find the same.
    """

    def __init__(
        self, divergence: Divergence, checkpoints: Checkpoints, plan: RunPlan, folder: Path
    ):
        """Begins without steps; `folder` is that of the run."""
        self._divergence, self._checkpoints = divergence, checkpoints
        self._plan, self._folder = plan, folder
        self._since: int | None = None
        self._kept: int | None = None
        self._warned = False

    def follow(self, steps: Iterable[Sequence[float]]) -> None:
        """Goes on from the losses and gradient norms of earlier starts; they were told there."""
        for loss, grad_norm in steps:
            self._divergence.add(loss, grad_norm)

    def add(self, number: int, loss: float, grad_norm: float) -> None:
        """Adds the metrics of step `number`, counted from 0.

        Raises:
          InputError: training diverges; checkpoints since then are set aside.
        """
        found = self._divergence.add(loss, grad_norm)
        if not self._divergence.suspected and self._since is not None:
            self._checkpoints.hold(None)
            if self._warned:
                _say(f"step {number + 1}: losses and gradients are back at their usual size")
            self._since, self._warned = None, False
        elif self._divergence.suspected and self._since is None:
            # Before newer checkpoints take the place of that one.
            self._since = number + 1 - self._divergence.suspected
            self._kept = self._checkpoints.hold(self._since)
        if found is None:
            return
        if found.spike:
            path = self._folder / "bad_step.json"
            write_json(path, {"step": number + 1, "micro_batches": self._plan.content(number)})
            _say(
                f"warning: step {number + 1}: {found.words}; its samples are in {path}; if it "
                "comes back, list bad ones in data.exclude or set optimizer.skip_above"
            )
            return
        assert self._since is not None
        self._warned, kept = True, self._kept
        words = f"step {number + 1}: {found.words}"
        if not found.stops:
            held = "there is no checkpoint from before" if kept is None else f"step {kept} is kept"
            _say(f"warning: {words}: training may diverge; {held}")
            return
        moved = self._checkpoints.set_aside(self._since)
        aside = f"; {', '.join(moved)}: checkpoints since then" if moved else ""
        goes_on = "begins anew" if kept is None else f"goes on from step {kept}"
        raise InputError(
            f"{words}: training diverges{aside}. Lower optimizer.learning_rate, check the scale of "
            f"the latents and the initial weights; the same command {goes_on}"
        )


def _say(line: str) -> None:
    if first_process():
        print_stderr(line)
