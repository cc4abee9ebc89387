import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, refusal

from alload_jax.planning.cost import MemoryModel, PowerCost, QuadraticCost, bucketed_cost
from alload_jax.planning.fit import (
    Point,
    evaluate,
    fit_memory,
    fit_power,
    fit_quadratic,
    predicted,
)

GRID = [(rows, s) for s in (256, 1024, 4096, 16_384, 65_536) for rows in (1, 4, 16)]


def points_of(model, grid=GRID):
    rows, seq_len = np.array(grid).T
    seconds = bucketed_cost(model, rows, seq_len)
    return [Point(b, s, float(t)) for (b, s), t in zip(grid, seconds, strict=True)]


# Realistic coefficients of a step: a fixed cost of 1 to 100 ms, 1 to 100 µs per token, and so on.
QUADRATICS = st.builds(
    QuadraticCost,
    c0=st.floats(1e-3, 1e-1),
    c1=st.floats(1e-6, 1e-4),
    c2=st.floats(1e-10, 1e-8),
    c_sequence=st.floats(1e-4, 1e-2),
)


@given(QUADRATICS)
@examples(60)
def test_the_coefficients_of_exact_points_are_found(model):
    fit = fit_quadratic(points_of(model))
    for name in ("c0", "c1", "c2", "c_sequence"):
        assert getattr(fit.model, name) == pytest.approx(getattr(model, name), rel=1e-6)
    assert fit.goodness.mape < 1e-8
    assert fit.goodness.r2 == pytest.approx(1)


@given(QUADRATICS)
@examples(30)
def test_three_terms_are_found_without_a_cost_per_sequence(model):
    model = QuadraticCost(model.c0, model.c1, model.c2)
    fit = fit_quadratic(points_of(model), per_sequence=False)
    assert fit.model.c_sequence == 0
    for name in ("c0", "c1", "c2"):
        assert getattr(fit.model, name) == pytest.approx(getattr(model, name), rel=1e-6)


@given(st.lists(st.floats(1e-4, 10), min_size=len(GRID), max_size=len(GRID)))
@examples(60)
def test_no_coefficient_is_negative_for_any_measurements(seconds):
    points = [Point(b, s, t) for (b, s), t in zip(GRID, seconds, strict=True)]
    for per_sequence in (True, False):
        model = fit_quadratic(points, per_sequence=per_sequence).model
        assert min(model.c0, model.c1, model.c2, model.c_sequence) >= 0
        assert np.isfinite(predicted(model, points)).all()


@given(QUADRATICS, st.integers(0, 2**32 - 1))
@examples(30)
def test_noise_of_two_percent_leaves_predictions_within_a_few(model, seed):
    noise = np.random.default_rng(seed).normal(1, 0.02, len(GRID))
    exact = points_of(model)
    noisy = [Point(p.rows, p.seq_len, p.seconds * n) for p, n in zip(exact, noise, strict=True)]
    assert evaluate(fit_quadratic(noisy).model, exact).mape < 0.05


@given(st.floats(0.2, 3), st.floats(1e-12, 1e3))
@examples(60)
def test_a_power_law_is_found(p, a):
    fit = fit_power(points_of(PowerCost(p, a)))
    assert fit.model.p == pytest.approx(p, abs=1e-9)
    assert fit.model.a == pytest.approx(a, rel=1e-6)
    assert fit.goodness.mape < 1e-8


@given(st.lists(st.floats(1e-3, 10), min_size=len(GRID), max_size=len(GRID)), QUADRATICS)
@examples(30)
def test_goodness_is_by_the_usual_formulas(seconds, model):
    points = [Point(b, s, t) for (b, s), t in zip(GRID, seconds, strict=True)]
    found = [
        model.c0 + model.c_sequence * b + model.c1 * b * s + model.c2 * b * s * s for b, s in GRID
    ]
    goodness = evaluate(model, points)
    errors = [abs(f - t) / t for f, t in zip(found, seconds, strict=True)]
    assert goodness.mape == pytest.approx(sum(errors) / len(errors))
    assert goodness.residuals == pytest.approx(
        [(f - t) / t for f, t in zip(found, seconds, strict=True)]
    )
    mean = sum(seconds) / len(seconds)
    spread = sum((t - mean) ** 2 for t in seconds)
    if spread > 1e-9:
        left = sum((t - f) ** 2 for f, t in zip(found, seconds, strict=True))
        assert goodness.r2 == pytest.approx(1 - left / spread)


def test_no_r2_where_nothing_varies():
    points = [Point(1, 10, 1.0), Point(2, 5, 1.0)]
    assert evaluate(QuadraticCost(1.0, 0.0, 0.0), points).r2 is None


@given(st.floats(1e6, 1e12), st.floats(1e3, 1e7), st.just(0.0) | st.floats(1e4, 1e8))
@examples(40)
def test_memory_is_a_plane_through_its_sizes(base, per_token, per_sequence):
    rows, tokens = np.array([1, 2, 4, 16, 32, 64]), np.array([1, 2, 4, 1, 2, 4]) * 4096
    model = fit_memory(rows, tokens, base + per_token * tokens + per_sequence * rows)
    for b, t in zip(rows.tolist(), tokens.tolist(), strict=True):
        expected = base + per_token * t + per_sequence * b
        assert model.bytes_of(t, b) == pytest.approx(expected, rel=1e-6)


def test_memory_has_no_base_below_zero():
    model = fit_memory([1, 1], [1, 2], [0.0, 10.0])
    assert model.base == 0
    assert isinstance(model, MemoryModel)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: fit_quadratic([Point(1, 2, 1.0)] * 3), "3 points for 4 coefficients"),
        (
            lambda: fit_quadratic([Point(1, 2, 1.0)] * 2, per_sequence=False),
            "2 points for 3 coefficients",
        ),
        (lambda: fit_quadratic([Point(1, 2, 0.0)] * 4), "must be above 0"),
        (lambda: fit_power([Point(1, 2, 1.0)]), "1 points for 2"),
        (lambda: fit_power([Point(1, 2, 1.0), Point(2, 2, 2.0)]), "two lengths"),
        (lambda: fit_power([Point(1, 2, 1.0), Point(1, 4, 0.5)]), "p comes out as -1.000"),
        (lambda: evaluate(PowerCost(), []), "no points"),
        (lambda: fit_memory([1, 1], [5, 5], [1.0, 1.0]), "at 1 size"),
        (lambda: fit_memory([1, 1], [1, 2], [5.0, 0.0]), "does not grow"),
    ],
)
def test_impossible_fits_are_reported_in_one_line(action, words):
    assert words in refusal(action)
