"""Makes a cost-model file from measured steps, with data to judge its accuracy."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import jax

from alload_jax.bench.calibration import LEAST_POINTS, Calibration, MemoryFinding, Outcome
from alload_jax.bench.harness import provenance
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.planning.analytic import bytes_per_split_token
from alload_jax.planning.architecture import from_fields
from alload_jax.planning.cost import CostFile, PowerCost, QuadraticCost, SparseTerms, without_layers
from alload_jax.planning.fit import (
    Point,
    evaluate,
    fit_power,
    fit_quadratic,
    fit_sparse,
    predicted,
)
from alload_jax.training.run_plan import sparse_layers

LEAST_SPARSE_POINTS = 3
"""Minimum number of points of a fit of sparse layers."""
_HOLD_OUT_FROM = 8
"""With at least this many points, every fourth is held out of the fit."""


@dataclass(frozen=True)
class Fits:
    """The cost models of one calibration.

    Attributes:
      points: all measured points.
      held_out: whether each point was excluded from the fits.
      quadratic: c0 + c_sequence·B + c1·ΣS + c2·ΣS².
      three_term: the same without c_sequence.
      power: a·B·S^p, fitted to the point with most rows of each length, because it has no fixed
        cost and policies fill micro-batches. None if costs do not grow with length.
    """

    points: list[Point]
    held_out: list[bool]
    quadratic: QuadraticCost
    three_term: QuadraticCost
    power: PowerCost | None

    def summary(self) -> Json:
        """Coefficients, R² and MAPE of each form, over fitted and held-out points."""
        points = list(zip(self.points, self.held_out, strict=True))
        fitted, held = ([p for p, out in points if out == kind] for kind in (False, True))
        found = {}
        for name in ("quadratic", "three_term", "power"):
            if model := getattr(self, name):
                goodness = evaluate(model, fitted)
                found[name] = {
                    "coefficients": asdict(model),
                    "r2": goodness.r2,
                    "mape": goodness.mape,
                    "held_out_mape": evaluate(model, held).mape if held else None,
                }
        return found


def fit_points(points: Sequence[Point]) -> Fits:
    """Fits all forms. Every fourth point is held out, but never the longest sequence.

    Raises:
      InputError: fewer than `LEAST_POINTS` points.
    """
    if len(points) < LEAST_POINTS:
        raise InputError(
            f"{len(points)} steps were measured, a fit needs {LEAST_POINTS}; give more --seconds"
        )
    longest = max(point.seq_len for point in points)
    held = [
        len(points) >= _HOLD_OUT_FROM and number % 4 == 3 and point.seq_len < longest
        for number, point in enumerate(points)
    ]
    fitted = [point for point, out in zip(points, held, strict=True) if not out]
    fullest = {p.seq_len: p for p in sorted(fitted, key=lambda p: p.rows)}
    try:
        power = fit_power(list(fullest.values()))
    except InputError:  # the fixed cost of a tiny model dominates; the other forms are still valid
        power = None
    return Fits(
        points=list(points),
        held_out=held,
        quadratic=fit_quadratic(fitted),
        three_term=fit_quadratic(fitted, per_sequence=False),
        power=power,
    )


def point_rows(fits: Fits, outcomes: Sequence[Outcome]) -> list[Json]:
    """Each measured point with the prediction of the quadratic form."""
    measured = [o for o in outcomes if o.seconds is not None]
    seconds = predicted(fits.quadratic, fits.points).tolist()
    return [
        {
            **o.fields(),
            "seconds": o.seconds,
            "seconds_least": o.least,
            "seconds_most": o.most,
            "repeats": o.repeats,
            "predicted_seconds": found,
            "residual": found / point.seconds - 1,
            "held_out": out,
            "compiled_bytes": o.bytes,
        }
        for o, point, found, out in zip(measured, fits.points, seconds, fits.held_out, strict=True)
    ]


def memory_details(finding: MemoryFinding, outcomes: Sequence[Outcome]) -> Json:
    """The memory limit, the compiled sizes, and the worst relative error of the memory model."""
    model = finding.model
    compiled = [(o.case, o.bytes) for o in outcomes if o.bytes is not None]
    return {
        "limit_bytes": finding.limit,
        "shortest": finding.shortest,
        "beside": finding.sizes[0][0].beside,
        "sizes": [
            {"rows": c.rows, "seq_len": c.seq_len, "compiled_bytes": b} for c, b in finding.sizes
        ],
        "worst_relative_error": max(
            (abs(model.bytes_of(c.tokens, c.rows) / b - 1) for c, b in compiled), default=None
        ),
    }


def fit_sparse_outcomes(
    outcomes: Sequence[Outcome], quadratic: QuadraticCost, config: SparseAttentionConfig
) -> tuple[SparseTerms | None, Json]:
    """Terms of sparse layers, None if there are too few points, and the data to judge them.

    Args:
      outcomes: each with the density that all layers had.
      quadratic: the cost of the model with dense attention.
      config: of the model's sparse attention.
    """
    measured = [each for each in outcomes if each.seconds is not None]
    skipped = [o.fields() | {"note": o.note} for o in outcomes if o.seconds is None]
    points = [
        replace(each.point(), layers=sparse_layers(config, 1.0, each.density)) for each in measured
    ]
    if len(points) < LEAST_SPARSE_POINTS:
        return None, {"points": [], "skipped": skipped}
    model = fit_sparse(points, quadratic)
    terms, goodness = without_layers(model)[1], evaluate(model, points)
    seconds = predicted(model, points).tolist()
    rows = [
        o.fields() | {"seconds": o.seconds, "predicted_seconds": found, "residual": residual}
        for o, found, residual in zip(measured, seconds, goodness.residuals, strict=True)
    ]
    return terms, {
        "coefficients": asdict(terms) if terms else {},
        "r2": goodness.r2,
        "mape": goodness.mape,
        "held_out_mape": None,
        "points": rows,
        "skipped": skipped,
    }


def calibrated(
    calibration: Calibration,
    finding: MemoryFinding,
    outcomes: Sequence[Outcome],
    sparse: Sequence[Outcome],
    command: str,
    peak: int | None,
) -> CostFile:
    """The cost-model file of a calibration.

    Args:
      calibration: of the measured step.
      finding, outcomes: its results.
      sparse: outcomes of sparse attention.
      command: the command line of the calibration, for the file's details.
      peak: of the allocator after the outcomes, in bytes; None if unknown.

    Raises:
      InputError: too few points for a fit.
    """
    step = calibration.step
    # What determines the cost: model, trained parameters, condition tokens.
    model = step.model.step_fields() | {"parameters": step.spec.parameters.identity()}
    if not step.model.text:
        model["condition_tokens"] = step.condition_tokens
    fits = fit_points([o.point() for o in outcomes if o.seconds is not None])
    allocator = None  # of the largest step; None on CPUs
    ran = [o for o in outcomes if o.seconds is not None and o.bytes is not None]
    if peak is not None and ran:
        largest = max(ran, key=lambda o: o.bytes or 0)
        found = finding.model.bytes_of(largest.case.tokens, largest.case.rows)
        allocator = {
            "rows": largest.case.rows,
            "seq_len": largest.case.seq_len,
            "peak_bytes": peak,
            "compiled_bytes": largest.bytes,
            "predicted_bytes": found,
            "relative_error": found / peak - 1,
        }
    details = {
        "command": command,
        **provenance(["jax", "jaxlib", "flax", "numpy", "scipy"]),
        "margin": finding.margin,
        "fits": fits.summary(),
        "memory": memory_details(finding, outcomes),
        "allocator": allocator,
        "points": point_rows(fits, outcomes),
        "skipped": [o.fields() | {"note": o.note} for o in outcomes if o.seconds is None],
    }
    terms = None
    if config := step.model.sparse_attention:
        terms, details["sparse"] = fit_sparse_outcomes(sparse, fits.quadratic, config)
    itemsize = step.model.compute_dtype.itemsize
    return CostFile(
        power=fits.power,
        quadratic=fits.quadratic,
        sparse=terms,
        memory=finding.model,
        m_mem=finding.m_mem,
        bytes_per_split_token=bytes_per_split_token(
            from_fields(model), step.model.policies, itemsize
        ),
        program_seconds=calibration.program_seconds,
        model=model,
        device=jax.local_devices()[0].device_kind,
        origin="measured",
        details=details,
    )
