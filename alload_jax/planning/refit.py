"""Fits a cost model to the step times of a run, near the model that planned it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from alload_jax.errors import InputError
from alload_jax.planning.cost import QuadraticCost
from alload_jax.planning.fit import fit_terms

LEAST, MOST = 0.5, 2.0
"""Bounds of a coefficient over that of the model that planned the run."""
_FORGETTING = 0.998
"""Weight of a step over that of the next one: about 500 steps count."""
_TRUST = 10.0
"""Steps that the planning model counts as, in each coefficient."""
_OUTLIER = 1.5
"""A step that took this many times as long as the others, relative to its prediction, is not used:
it compiled, saved or waited."""
_RECENT = 64
"""Steps whose ratios of measured to predicted time say what is usual."""


@dataclass
class CostFilter:
    """Recursive least squares of the relative error, with forgetting and bounds.

    Attributes:
      model: the model that planned the run.
      steps: number of steps used.
    """

    model: QuadraticCost
    steps: int = 0
    _normal: np.ndarray = field(default_factory=lambda: np.zeros((4, 4)))
    _right: np.ndarray = field(default_factory=lambda: np.zeros(4))
    _ratios: list[float] = field(default_factory=list)

    def add(self, terms: tuple[float, ...], seconds: float) -> None:
        """Adds a step.

        Args:
          terms: of its slowest rank: micro-batches, sequences, tokens, squares.
          seconds: that it took, without waiting for data.
        """
        scaled = np.asarray(terms) * _coefficients(self.model)
        predicted = float(scaled.sum())
        if not (seconds > 0 and predicted > 0):
            return
        ratio = seconds / predicted
        usual = float(np.median(self._ratios)) if self._ratios else ratio
        self._ratios = [*self._ratios[1 - _RECENT :], ratio]
        if ratio > _OUTLIER * usual:
            return
        row = scaled / seconds  # of factors of the coefficients; their sum should be 1
        self._normal = _FORGETTING * self._normal + np.outer(row, row)
        self._right = _FORGETTING * self._right + row
        self.steps += 1

    def fitted(self) -> QuadraticCost:
        """The model with the least squared relative error, each coefficient within bounds."""
        if not self.steps:
            return self.model
        prior = _TRUST * np.diag(np.diag(self._normal) / self.steps + 1e-12)
        normal, right = self._normal + prior, self._right + prior @ np.ones(4)
        upper = np.linalg.cholesky(normal).T
        found = lsq_linear(upper, np.linalg.solve(upper.T, right), (LEAST, MOST))
        c0, c_sequence, c1, c2 = (found.x * _coefficients(self.model)).tolist()
        return QuadraticCost(c0=c0, c1=c1, c2=c2, c_sequence=c_sequence)

    def drift(self) -> float:
        """Median of measured over predicted seconds of recent steps, minus 1."""
        return float(np.median(self._ratios)) - 1 if self._ratios else 0.0


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

    Raises:
      InputError: too few steps have the fields that a fit needs.
    """
    used = [row for row in rows if "cost_terms" in row and _waited_little(row)]
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
        model, drift = costs.fitted(), costs.drift()
    kept = _usual(terms, seconds, model)
    errors = np.abs(_predicted(terms[kept], model) / seconds[kept] - 1)
    return RunFit(model, int(kept.sum()), float(errors.mean()), drift)


def _waited_little(row: dict[str, Any]) -> bool:
    return bool(row["input_wait_seconds"] < _MOST_WAIT * row["step_seconds"])


def _predicted(terms: np.ndarray, model: QuadraticCost) -> np.ndarray:
    return np.asarray(terms @ _coefficients(model))


def _coefficients(model: QuadraticCost) -> np.ndarray:
    """Of the terms, in their order: [4]."""
    return np.asarray([model.c0, model.c_sequence, model.c1, model.c2])


def _usual(terms: np.ndarray, seconds: np.ndarray, model: QuadraticCost) -> np.ndarray:
    """[N] bool: steps that took no unusual time."""
    ratio = seconds / np.maximum(_predicted(terms, model), 1e-12)
    return ratio <= _OUTLIER * np.median(ratio)
