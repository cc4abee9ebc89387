"""Fits of cost and memory models to measured points, and how good they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import nnls

from alload_jax.errors import InputError
from alload_jax.planning.cost import (
    CostModel,
    MemoryModel,
    PowerCost,
    QuadraticCost,
    bucketed_cost,
)
from alload_jax.planning.sparse_cost import SparseCost, SparseLayers

ModelT = TypeVar("ModelT", bound=CostModel)


@dataclass(frozen=True)
class Point:
    """A measured step: `rows` sequences of `seq_len` tokens took `seconds`."""

    rows: int
    seq_len: int
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.rows * self.seq_len


@dataclass(frozen=True)
class SparsePoint:
    """A measured step of a model whose layers were all sparse, or some."""

    point: Point
    layers: SparseLayers


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


@dataclass(frozen=True)
class Fit(Generic[ModelT]):
    """A model and its accuracy on the points that it was fitted to."""

    model: ModelT
    goodness: Goodness


def predicted(model: CostModel, points: Sequence[Point]) -> np.ndarray:
    """Predicted seconds of each point: [N] float64."""
    rows, seq_len, _ = _columns(points)
    return bucketed_cost(model, rows, seq_len)


def evaluate(model: CostModel, points: Sequence[Point]) -> Goodness:
    """The accuracy of a model on points, which may be those that it was fitted to.

    Raises:
      InputError: there are no points.
    """
    if not points:
        raise InputError("fit: no points to compare a cost model with; measure at least one")
    return _goodness(predicted(model, points), _columns(points)[2])


def _goodness(found: np.ndarray, seconds: np.ndarray) -> Goodness:
    """The accuracy of predictions: [N] seconds, and those measured."""
    residuals = found / seconds - 1
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - float(((seconds - found) ** 2).sum()) / spread if spread else None
    return Goodness(r2, float(np.abs(residuals).mean()), tuple(residuals.tolist()))


def fit_quadratic(points: Sequence[Point], *, per_sequence: bool = True) -> Fit[QuadraticCost]:
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
    model = fit_terms(terms, seconds)
    return Fit(model, evaluate(model, points))


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


def fit_sparse(points: Sequence[SparsePoint], quadratic: QuadraticCost) -> Fit[SparseCost]:
    """c3, c4 and c5, from what steps take beyond the cost of everything else.

    Least squares of the relative error with no coefficient below 0, as for `fit_quadratic`.

    Args:
      points: of two densities and two lengths, or more.
      quadratic: the cost of the model with dense attention, which stays as it is.

    Raises:
      InputError: there are too few points, the seconds of one are not above 0, or one has no
        sparse layer.
    """
    _require([each.point for each in points], 3)
    if any(
        each.layers.share == 0 or each.point.seq_len < each.layers.min_tokens for each in points
    ):
        raise InputError("fit: a point of sparse attention has dense attention in all layers")
    seconds = np.asarray([each.point.seconds for each in points])
    units = [SparseCost(0.0, 0.0, 0.0, c3=c3, c4=c4, c5=c5) for c3, c4, c5 in np.eye(3).tolist()]
    terms = np.stack([predicted_sparse(unit, points) for unit in units], axis=1)
    known = predicted_sparse(SparseCost(**vars(quadratic)), points)
    c3, c4, c5 = _least_squares(terms, seconds - known, seconds)
    model = SparseCost(**vars(quadratic), c3=c3, c4=c4, c5=c5)
    return Fit(model, _goodness(predicted_sparse(model, points), seconds))


def predicted_sparse(model: SparseCost, points: Sequence[SparsePoint]) -> np.ndarray:
    """Predicted seconds of each point, with the point's layers: [N] float64."""
    found = [predicted(model.at(each.layers), [each.point]) for each in points]
    return np.concatenate(found)


def _least_squares(terms: np.ndarray, seconds: np.ndarray, unit: np.ndarray) -> list[float]:
    """Coefficients of 0 or more with the least squares of (terms·coefficients − seconds) / unit."""
    matrix = terms / unit[:, None]
    # Columns differ by twelve orders of magnitude; at equal norms the solver loses no digits.
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms == 0, 1.0, norms)
    solution, _ = nnls(matrix / scale, seconds / unit)
    return [float(value) for value in solution / scale]


def fit_power(points: Sequence[Point]) -> Fit[PowerCost]:
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
    model = PowerCost(float(p), float(np.exp(log_a)))
    return Fit(model, evaluate(model, points))


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
    scale = np.linalg.norm(matrix, axis=0)
    solution, _ = nnls(matrix / scale, np.asarray(bytes_, np.float64))
    base, per_token, per_sequence = (solution / scale).tolist()
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
