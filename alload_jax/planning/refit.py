"""Fits a cost model to the step times of a run, near the model that planned it."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from alload_jax.errors import InputError
from alload_jax.planning.cost import QuadraticCost
from alload_jax.planning.fit import fit_terms

LEAST, MOST = 0.5, 2.0
"""Bounds of a coefficient over that of the model that planned the run, once all of that model's
are multiplied by how much longer steps usually take."""
_FORGETTING = 0.998
"""Weight of a step over that of the next one: about 500 steps count."""
_TRUST = 10.0
"""Steps that the planning model counts as, in each coefficient."""
_OUTLIER = 1.5
"""A step that took this many times as long as the others, relative to its prediction, is not used:
it compiled, saved or waited."""
_RECENT = 64
"""Steps that say how long steps usually take, relative to their predictions."""


@dataclass
class CostFilter:
    """Recursive least squares of the relative error, with forgetting and bounds.

    What is fitted is how much longer each term takes than the model says. The terms of a step say
    which layers were sparse, so that a layer that switches changes no coefficient.

    Attributes:
      model: the model that planned the run.
      steps: number of steps used.
    """

    model: QuadraticCost
    steps: int = 0
    _normal: np.ndarray = field(init=False)
    _right: np.ndarray = field(init=False)
    _recent: deque[tuple[tuple[float, ...], float]] = field(
        default_factory=lambda: deque(maxlen=_RECENT)
    )

    def __post_init__(self) -> None:
        count = len(self.model.coefficients)
        self._normal, self._right = np.zeros((count, count)), np.zeros(count)

    def add(self, terms: tuple[float, ...], seconds: float) -> None:
        """Adds a step.

        Args:
          terms: of its slowest rank, in the order of the model's `coefficients`.
          seconds: that it took, without waiting for data.
        """
        scaled = np.asarray(terms) * self.model.coefficients
        predicted = float(scaled.sum())
        if not (seconds > 0 and predicted > 0):
            return
        usual = 1 + self.drift(self.model) if self._recent else seconds / predicted
        self._recent.append((tuple(terms), seconds))
        if seconds > _OUTLIER * usual * predicted:
            return
        # Relative to the prediction: relative to noisy seconds, the fit would be too low.
        row, share = scaled / predicted, seconds / predicted
        self._normal = _FORGETTING * self._normal + np.outer(row, row)
        self._right = _FORGETTING * self._right + share * row
        self.steps += 1

    def fitted(self) -> QuadraticCost:
        """The model with the least squared relative error, each coefficient within bounds."""
        if not self.steps:
            return self.model
        usual = 1 + self.drift(self.model)
        prior = _TRUST * np.diag(np.diag(self._normal) / self.steps + 1e-12)
        normal, right = self._normal + prior, self._right + prior @ np.full(len(prior), usual)
        upper = np.linalg.cholesky(normal).T
        found = lsq_linear(upper, np.linalg.solve(upper.T, right), (LEAST * usual, MOST * usual))
        return self.model.with_coefficients((found.x * self.model.coefficients).tolist())

    def drift(self, model: QuadraticCost) -> float:
        """Median over recent steps of their seconds relative to those `model` predicts, minus 1."""
        if not self._recent:
            return 0.0
        terms, seconds = (np.asarray(each) for each in zip(*self._recent, strict=True))
        return float(np.median(seconds / _predicted(terms, model))) - 1

    def state(self) -> dict[str, Any]:
        """The steps so far, as JSON values."""
        return {
            "steps": self.steps,
            "normal": self._normal.tolist(),
            "right": self._right.tolist(),
            "recent": list(self._recent),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state` of another filter with this model."""
        self.steps = state["steps"]
        self._normal, self._right = np.asarray(state["normal"]), np.asarray(state["right"])
        self._recent.clear()
        self._recent.extend((tuple(terms), seconds) for terms, seconds in state["recent"])


class RunFit(NamedTuple):
    """A cost model fitted to a run.

    Attributes:
      model: the model.
      steps: number of steps used.
      mape: mean of |predicted / measured − 1| over these steps.
      drift: median of measured over predicted seconds minus 1, by the model that planned the run;
        None without one.
    """

    model: QuadraticCost
    steps: int
    mape: float
    drift: float | None


_LEAST_STEPS = 20
_MOST_WAIT = 0.1
"""Share of a step spent waiting for data, above which the step is not used."""


def fit_run(rows: Sequence[dict[str, Any]], planned_by: QuadraticCost | None) -> RunFit:
    """Fits a cost model to the steps of a run.

    Args:
      rows: lines of metrics.jsonl.
      planned_by: the model that planned the run, near which the fit stays; None for a free fit.
        Lines of another number of terms are not used.

    Raises:
      InputError: too few steps have the fields that a fit needs.
    """
    count = len(planned_by.coefficients) if planned_by else _last_terms(rows)
    used = [row for row in rows if _usable(row, count) and _waited_little(row)]
    if len(used) < _LEAST_STEPS:
        raise InputError(
            f"{len(used)} steps can be fitted; a run of at least {_LEAST_STEPS} steps, which this "
            "version trained and which rarely waited for data, is needed"
        )
    terms = np.asarray([row["cost_terms"] for row in used], np.float64)
    seconds = np.asarray([row["step_seconds"] - row["input_wait_seconds"] for row in used])
    drift = None
    if planned_by is None:
        model = fit_terms(terms, seconds)
        kept = _usual(terms, seconds, model)
        model = fit_terms(terms[kept], seconds[kept])
    else:
        costs = CostFilter(planned_by)
        for each, measured in zip(terms, seconds, strict=True):
            costs.add(tuple(each.tolist()), float(measured))
        model, drift = costs.fitted(), costs.drift(planned_by)
    kept = _usual(terms, seconds, model)
    errors = np.abs(_predicted(terms[kept], model) / seconds[kept] - 1)
    return RunFit(model, int(kept.sum()), float(errors.mean()), drift)


def _last_terms(rows: Sequence[dict[str, Any]]) -> int:
    """Number of terms of the last line that has some, or 0."""
    counts = (
        len(t) for row in reversed(rows) if isinstance(t := row.get("cost_terms"), list | tuple)
    )
    return next(counts, 0)


def _usable(row: dict[str, Any], count: int) -> bool:
    """Whether a line has finite numbers for all that a fit needs; runs may have been cut short."""
    terms = row.get("cost_terms")
    if not isinstance(terms, list | tuple) or len(terms) != count:
        return False
    values = (*terms, row.get("step_seconds"), row.get("input_wait_seconds"))
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return False
    return bool(row["step_seconds"] > row["input_wait_seconds"] and sum(terms) > 0)


def _waited_little(row: dict[str, Any]) -> bool:
    return bool(row["input_wait_seconds"] < _MOST_WAIT * row["step_seconds"])


def _predicted(terms: np.ndarray, model: QuadraticCost) -> np.ndarray:
    return np.asarray(terms @ np.asarray(model.coefficients))


def _usual(terms: np.ndarray, seconds: np.ndarray, model: QuadraticCost) -> np.ndarray:
    """[N] bool: steps that took no unusual time."""
    ratio = seconds / np.maximum(_predicted(terms, model), 1e-12)
    return ratio <= _OUTLIER * np.median(ratio)
