"""Fits of cost and memory models to measured points and to a run's steps, and how good they are."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import (
    CostModel,
    MemoryModel,
    PowerCost,
    QuadraticCost,
    SparseCost,
    SparseLayers,
    bucketed_cost,
)


@dataclass(frozen=True)
class Point:
    """A measured step: `rows` sequences of `seq_len` tokens took `seconds`.

    `layers` are those of a model whose layers were all sparse, or some; None for a dense one.
    """

    rows: int
    seq_len: int
    seconds: float
    layers: SparseLayers | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.rows * self.seq_len


@dataclass(frozen=True)
class Goodness:
    """The accuracy of a model on points.

    Attributes:
      r2: 1 − Σ(t − t̂)² / Σ(t − t̄)², t in seconds; None if all points took the same time.
      mape: mean of |t̂ / t − 1|.
      residuals: t̂ / t − 1 of each point.
    """

    r2: float | None
    mape: float
    residuals: tuple[float, ...]


def predicted(model: CostModel, points: Sequence[Point]) -> np.ndarray:
    """Predicted seconds of each point, by a `SparseCost` with the point's layers: [N] float64."""
    rows, seq_len, _ = _columns(points)
    if not isinstance(model, SparseCost):
        return bucketed_cost(model, rows, seq_len)
    models = [model.at(each.layers) if each.layers else model for each in points]
    columns = zip(models, rows[:, None], seq_len[:, None], strict=True)
    return np.concatenate([bucketed_cost(*each) for each in columns])


def evaluate(model: CostModel, points: Sequence[Point]) -> Goodness:
    """The accuracy of a model on points, which may be those that it was fitted to.

    Raises:
      InputError: there are no points.
    """
    if not points:
        raise InputError("fit: no points to compare a cost model with; measure at least one")
    found, (_, _, seconds) = predicted(model, points), _columns(points)
    residuals = found / seconds - 1
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - float(((seconds - found) ** 2).sum()) / spread if spread else None
    return Goodness(r2, float(np.abs(residuals).mean()), tuple(residuals.tolist()))


def fit_quadratic(points: Sequence[Point], *, per_sequence: bool = True) -> QuadraticCost:
    """c0 + c_sequence·B + c1·ΣS + c2·ΣS² with no coefficient below 0.

    Least squares of the relative error: a step of 50 ms counts as much as one of 5 s.

    Args:
      points: as many as there are coefficients, or more.
      per_sequence: whether to fit c_sequence; otherwise it is 0.

    Raises:
      InputError: there are too few points, or the seconds of one are not above 0.
    """
    _require(points, 4 if per_sequence else 3)
    rows, seq_len, seconds = _columns(points)
    sequences = rows if per_sequence else np.zeros_like(rows)
    terms = np.stack([np.ones_like(rows), sequences, rows * seq_len, rows * seq_len**2], axis=1)
    return fit_terms(terms, seconds)


def fit_terms(terms: np.ndarray, seconds: np.ndarray) -> QuadraticCost:
    """Least squares of the relative error with no coefficient below 0.

    Args:
      terms: [N, 4] micro-batches, sequences, tokens and squares, as `step_costs.micro_batch_terms`
        gives them, or [N, 7] with the terms of sparse layers. The coefficient of a column of zeros
        is 0.
      seconds: [N], above 0.
    """
    found = _least_squares(terms, seconds, seconds)
    kind = QuadraticCost if len(found) == len(QuadraticCost(0, 0, 0).coefficients) else SparseCost
    return kind(0.0, 0.0, 0.0).with_coefficients(found)


def fit_sparse(points: Sequence[Point], quadratic: QuadraticCost) -> SparseCost:
    """c3, c4 and c5, from what steps take beyond the cost of everything else.

    Least squares of the relative error with no coefficient below 0, as for `fit_quadratic`.

    Args:
      points: of two densities and two lengths, or more.
      quadratic: the cost of the model with dense attention, which stays as it is.

    Raises:
      InputError: there are too few points, the seconds of one are not above 0, or one has no
        sparse layer.
    """
    _require(points, 3)
    if any(
        each.layers is None or each.layers.share == 0 or each.seq_len < each.layers.min_tokens
        for each in points
    ):
        raise InputError("fit: a point of sparse attention has dense attention in all layers")
    seconds = _columns(points)[2]
    units = [SparseCost(0.0, 0.0, 0.0, c3=c3, c4=c4, c5=c5) for c3, c4, c5 in np.eye(3).tolist()]
    terms = np.stack([predicted(unit, points) for unit in units], axis=1)
    known = predicted(SparseCost(**vars(quadratic)), points)
    c3, c4, c5 = _least_squares(terms, seconds - known, seconds)
    return SparseCost(**vars(quadratic), c3=c3, c4=c4, c5=c5)


def _least_squares(terms: np.ndarray, seconds: np.ndarray, unit: np.ndarray) -> list[float]:
    """Coefficients of 0 or more with the least squares of (terms·coefficients − seconds) / unit."""
    matrix = terms / unit[:, None]
    # Columns differ by twelve orders of magnitude; at equal norms the solver loses no digits.
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms == 0, 1.0, norms)
    from scipy.optimize import nnls  # it takes half a second to import

    solution, _ = nnls(matrix / scale, seconds / unit)
    return [float(value) for value in solution / scale]


def fit_power(points: Sequence[Point]) -> PowerCost:
    """a·B·S^p: a line through log(t / B) over log S.

    Raises:
      InputError: there are too few points, all have one length, or costs do not grow with length.
    """
    _require(points, 2)
    rows, seq_len, seconds = _columns(points)
    if len(set(seq_len.tolist())) < 2:
        raise InputError(f"fit: all points have S = {seq_len[0]:.0f}; p needs two lengths or more")
    p, log_a = np.polyfit(np.log(seq_len), np.log(seconds / rows), 1)
    if p <= 0:
        raise InputError(f"fit: p comes out as {p:.3f}; measure longer sequences, it must exceed 0")
    return PowerCost(float(p), float(np.exp(log_a)))


def fit_memory(rows: Sequence[int], tokens: Sequence[int], bytes_: Sequence[float]) -> MemoryModel:
    """bytes = base + per_token·ΣS + per_sequence·B by least squares, no coefficient below 0.

    Args:
      rows: sequences of micro-batches.
      tokens: tokens of each micro-batch, with at least two sizes.
      bytes_: peak bytes in use during a step on each.

    Raises:
      InputError: fewer than two sizes, or memory does not grow with tokens.
    """
    if len(set(tokens)) < 2:
        raise InputError(f"fit: memory at {len(set(tokens))} size; measure two sizes or more")
    matrix = np.stack([np.ones(len(tokens)), tokens, rows], axis=1).astype(np.float64)
    measured = np.asarray(bytes_, np.float64)
    base, per_token, per_sequence = _least_squares(matrix, measured, np.ones(len(measured)))
    if not per_token > 0:
        raise InputError("fit: memory does not grow with tokens; measure larger sizes")
    return MemoryModel(base, per_token, per_sequence)


def _columns(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, lengths, seconds: [N] float64 each."""
    table = np.asarray([(p.rows, p.seq_len, p.seconds) for p in points], np.float64)
    rows, seq_len, seconds = table.reshape(-1, 3).T
    return rows, seq_len, seconds


def _require(points: Sequence[Point], least: int) -> None:
    if len(points) < least:
        raise InputError(f"fit: {len(points)} points for {least} coefficients; measure more")
    for point in points:
        if not (np.isfinite(point.seconds) and point.seconds > 0):
            raise InputError(f"fit: {point} is not a measurement; its seconds must be above 0")


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
        from scipy.optimize import lsq_linear

        found = lsq_linear(upper, np.linalg.solve(upper.T, right), (LEAST * usual, MOST * usual))
        return self.model.with_coefficients((found.x * self.model.coefficients).tolist())

    def drift(self, model: QuadraticCost) -> float:
        """Median over recent steps of their seconds relative to those `model` predicts, minus 1."""
        if not self._recent:
            return 0.0
        terms, seconds = (np.asarray(each) for each in zip(*self._recent, strict=True))
        return float(np.median(seconds / _predicted(terms, model))) - 1

    def state(self) -> dict[str, object]:
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


_Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


def fit_run(rows: Sequence[_Row], planned_by: QuadraticCost | None) -> RunFit:
    """Fits a cost model to the steps of a run.

    Args:
      rows: lines of metrics.jsonl.
      planned_by: the model that planned the run, near which the fit stays; None for a free fit.
        Lines of another number of terms are not used.

    Raises:
      InputError: too few steps have the fields that a fit needs.
    """
    lists = (
        row["cost_terms"]
        for row in reversed(rows)
        if isinstance(row.get("cost_terms"), list | tuple)
    )
    count = len(planned_by.coefficients if planned_by else next(lists, ()))
    used = [row for row in rows if _usable(row, count)]
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


def _usable(row: _Row, count: int) -> bool:
    """Whether a line has finite numbers for all that a fit needs, of a step that waited little.

    Runs may have been cut short.
    """
    terms = row.get("cost_terms")
    if not isinstance(terms, list | tuple) or len(terms) != count:
        return False
    values = (*terms, row.get("step_seconds"), row.get("input_wait_seconds"))
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return False
    seconds, wait = row["step_seconds"], row["input_wait_seconds"]
    return bool(seconds > wait and wait < _MOST_WAIT * seconds and sum(terms) > 0)


def _predicted(terms: np.ndarray, model: QuadraticCost) -> np.ndarray:
    return np.asarray(terms @ np.asarray(model.coefficients))


def _usual(terms: np.ndarray, seconds: np.ndarray, model: QuadraticCost) -> np.ndarray:
    """[N] bool: steps that took no unusual time."""
    ratio = seconds / np.maximum(_predicted(terms, model), 1e-12)
    return ratio <= _OUTLIER * np.median(ratio)
