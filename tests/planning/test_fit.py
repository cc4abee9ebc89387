"""Cost models fitted to measurements and to the step times of a run."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, refusal

from alload_jax.planning.cost import (
    CostFile,
    PowerCost,
    QuadraticCost,
    bucketed_cost,
    micro_batch_costs,
    micro_batch_terms,
)
from alload_jax.planning.factory import make_plan
from alload_jax.planning.fit import (
    LEAST,
    MOST,
    CostFilter,
    Point,
    evaluate,
    fit_memory,
    fit_power,
    fit_quadratic,
    fit_run,
    predicted,
)
from alload_jax.planning.metrics import step_metrics
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload

GRID = [(rows, s) for s in (256, 1024, 4096, 16_384, 65_536) for rows in (1, 4, 16)]
TIMES = st.lists(st.floats(1e-3, 10), min_size=len(GRID), max_size=len(GRID))


def points_of(model, grid=GRID):
    rows, seq_len = np.array(grid).T
    seconds = bucketed_cost(model, rows, seq_len)
    return [Point(b, s, float(t)) for (b, s), t in zip(grid, seconds, strict=True)]


def measured(seconds):
    return [Point(b, s, t) for (b, s), t in zip(GRID, seconds, strict=True)]


# Realistic coefficients of a step: a fixed cost of 1 to 100 ms, 1 to 100 µs per token, and so on.
QUADRATICS = st.builds(
    QuadraticCost,
    c0=st.floats(1e-3, 1e-1),
    c1=st.floats(1e-6, 1e-4),
    c2=st.floats(1e-10, 1e-8),
    c_sequence=st.floats(1e-4, 1e-2),
)


@given(QUADRATICS, st.booleans(), st.integers(0, 2**32 - 1))
@examples(50)
def test_the_coefficients_of_exact_points_are_found_and_noise_changes_predictions_little(
    model, per_sequence, seed
):
    if not per_sequence:
        model = QuadraticCost(model.c0, model.c1, model.c2)
    exact = points_of(model)
    fit = fit_quadratic(exact, per_sequence=per_sequence)
    for name in ("c0", "c1", "c2", "c_sequence"):
        assert getattr(fit.model, name) == pytest.approx(getattr(model, name), rel=1e-6)
    assert fit.goodness.mape < 1e-8
    assert fit.goodness.r2 == pytest.approx(1)
    noise = np.random.default_rng(seed).normal(1, 0.02, len(GRID))
    noisy = measured([p.seconds * n for p, n in zip(exact, noise, strict=True)])
    assert evaluate(fit_quadratic(noisy).model, exact).mape < 0.05


@given(st.floats(0.2, 3), st.floats(1e-12, 1e3))
@examples(40)
def test_a_power_law_is_found(p, a):
    fit = fit_power(points_of(PowerCost(p, a)))
    assert fit.model.p == pytest.approx(p, abs=1e-9)
    assert fit.model.a == pytest.approx(a, rel=1e-6)
    assert fit.goodness.mape < 1e-8


@given(TIMES, QUADRATICS)
@examples(50)
def test_no_coefficient_is_negative_and_goodness_is_by_the_usual_formulas(seconds, model):
    points = measured(seconds)
    for per_sequence in (True, False):
        fitted = fit_quadratic(points, per_sequence=per_sequence).model
        assert min(fitted.c0, fitted.c1, fitted.c2, fitted.c_sequence) >= 0
        assert np.isfinite(predicted(fitted, points)).all()
    found = [
        model.c0 + model.c_sequence * b + model.c1 * b * s + model.c2 * b * s * s for b, s in GRID
    ]
    goodness = evaluate(model, points)
    errors = [(f - t) / t for f, t in zip(found, seconds, strict=True)]
    assert goodness.mape == pytest.approx(np.mean(np.abs(errors)))
    assert goodness.residuals == pytest.approx(errors)
    spread = len(seconds) * np.var(seconds)
    if spread > 1e-9:
        left = sum((t - f) ** 2 for f, t in zip(found, seconds, strict=True))
        assert goodness.r2 == pytest.approx(1 - left / spread)


def test_no_r2_where_nothing_varies():
    points = [Point(1, 10, 1.0), Point(2, 5, 1.0)]
    assert evaluate(QuadraticCost(1.0, 0.0, 0.0), points).r2 is None


@given(st.floats(1e6, 1e12), st.floats(1e3, 1e7), st.just(0.0) | st.floats(1e4, 1e8))
@examples(30)
def test_memory_is_a_plane_through_its_sizes(base, per_token, per_sequence):
    rows, tokens = np.array([1, 2, 4, 16, 32, 64]), np.array([1, 2, 4, 1, 2, 4]) * 4096
    model = fit_memory(rows, tokens, base + per_token * tokens + per_sequence * rows)
    for b, t in zip(rows.tolist(), tokens.tolist(), strict=True):
        expected = base + per_token * t + per_sequence * b
        assert model.bytes_of(t, b) == pytest.approx(expected, rel=1e-6)
    assert fit_memory([1, 1], [1, 2], [0.0, 10.0]).base == 0  # never below


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: fit_quadratic([Point(1, 2, 1.0)] * 3), "3 points for 4 coefficients"),
        (lambda: fit_quadratic([Point(1, 2, 1.0)] * 2, per_sequence=False), "2 points for 3 "),
        (lambda: fit_quadratic([Point(1, 2, 0.0)] * 4), "must be above 0"),
        (lambda: fit_power([Point(1, 2, 1.0)]), "1 points for 2"),
        (lambda: fit_power([Point(1, 2, 1.0), Point(2, 2, 2.0)]), "two lengths"),
        (lambda: fit_power([Point(1, 2, 1.0), Point(1, 4, 0.5)]), "p comes out as -1.000"),
        (lambda: evaluate(PowerCost(), []), "no points"),
        (lambda: fit_memory([1, 1], [5, 5], [1.0, 1.0]), "at 1 size"),
        (lambda: fit_memory([1, 1], [1, 2], [5.0, 0.0]), "does not grow"),
        (lambda: fit_run([{"step_seconds": 1.0}], None), "0 steps can be fitted"),
        (lambda: fit_run(rows_of(PLANNED)[:3], PLANNED), "3 steps"),
    ],
)
def test_impossible_fits_are_reported_in_one_line(action, words):
    assert words in refusal(action)


# ---------------------------------------------------------------- step times of a run


PLANNED = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)


def coefficients(model):
    return np.asarray([model.c0, model.c_sequence, model.c1, model.c2])


@functools.cache
def planned_terms(count):
    """Terms of the cost of steps of two kinds of plans."""
    terms = []
    for policy in ("balanced", "equal_tokens"):
        config = PlanningConfig(policy, m_mem=90_000, sample_spread=None)
        samples = make_workload("mixed-resolution", 4000)
        plan = make_plan(config, samples, 4, 0, CostFile(quadratic=PLANNED))
        steps = (step_metrics(plan.step(n), plan, PLANNED) for n in range(count // 2))
        terms += [step.cost_terms for step in steps]
    return terms


def rows_of(model, count=300, noise=0.01, seed=0):
    """Steps that take what `model` says, with noise."""
    random, rows = np.random.default_rng(seed), []
    for terms in planned_terms(count):
        seconds = float(np.dot(terms, coefficients(model)))
        seconds *= float(np.exp(noise * random.standard_normal()))
        rows.append({"cost_terms": terms, "step_seconds": seconds, "input_wait_seconds": 0.0})
    return [rows[n] for n in random.permutation(len(rows))]


def filtered(rows):
    costs = CostFilter(PLANNED)
    for row in rows:
        costs.add(row["cost_terms"], row["step_seconds"])
    return costs


def assert_predicts(model, rows, rel):
    for row in rows:
        predicted = np.dot(row["cost_terms"], coefficients(model))
        assert predicted == pytest.approx(row["step_seconds"], rel=rel)


@pytest.mark.parametrize(
    ("policy", "context"),
    [("equal_tokens", 1), ("first_fit", 1), ("balanced", 4)],
)
def test_terms_times_coefficients_are_the_predicted_cost(policy, context):
    config = PlanningConfig(policy, m_mem=90_000, context=context, link_bandwidth=1e30)
    samples = make_workload("mixed-resolution", 600)
    epoch = make_plan(config, samples, 4, 0, CostFile(quadratic=PLANNED)).epoch(0)
    cost = micro_batch_costs(epoch, samples.seq_len, PLANNED)
    terms = micro_batch_terms(epoch, samples.seq_len)
    np.testing.assert_allclose(terms @ coefficients(PLANNED), cost, rtol=1e-9)


SLOWER = QuadraticCost(0.06, 2.1e-5, 1.2e-9, 5e-4)


def test_the_filter_follows_a_device_that_is_slower_than_planned():
    costs = filtered(rows_of(SLOWER))
    assert costs.drift(PLANNED) == pytest.approx(0.21, abs=0.03)
    assert costs.drift(SLOWER) == pytest.approx(0.0, abs=0.01)
    assert_predicts(costs.fitted(), rows_of(SLOWER, seed=1)[:50], 0.05)


@pytest.mark.parametrize("slower", [0.1, 5.0])
def test_another_device_changes_the_scale_freely(slower):
    true = QuadraticCost(*(slower * c for c in dataclasses.astuple(SLOWER)))
    assert_predicts(filtered(rows_of(true)).fitted(), rows_of(true, seed=1)[:50], 0.05)


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.integers(0, 9))
@examples(15)
def test_coefficients_stay_within_bounds(factors, seed):
    planned = dataclasses.astuple(PLANNED)
    true = QuadraticCost(*(f * c for f, c in zip(factors, planned, strict=True)))
    costs = CostFilter(PLANNED)
    random = np.random.default_rng(seed)
    for _ in range(40):
        terms = (1.0, float(random.integers(1, 40)), 9e4, float(random.uniform(1e6, 8e9)))
        costs.add(terms, float(np.dot(terms, coefficients(true))))
    ratio = coefficients(costs.fitted()) / coefficients(PLANNED) / (1 + costs.drift(PLANNED))
    assert (ratio >= LEAST - 1e-9).all()
    assert (ratio <= MOST + 1e-9).all()


def test_steps_that_compiled_or_waited_and_damaged_lines_are_left_out():
    rows = rows_of(PLANNED, noise=0.0)
    wrong = [
        {"step_seconds": 50 * rows[0]["step_seconds"]},
        {"input_wait_seconds": rows[1]["step_seconds"] / 2},
        *({"cost_terms": terms} for terms in (None, [1.0], ["x"] * 4)),
        {"input_wait_seconds": None},
        *({"step_seconds": seconds} for seconds in (float("nan"), -1.0)),
    ]
    changed = dict(zip(range(3, 100, 11), wrong, strict=False))
    damaged = [row | changed.get(number, {}) for number, row in enumerate(rows)]
    for planned_by in (None, PLANNED):
        found = fit_run(damaged, planned_by)
        assert found.steps == len(rows) - len(wrong)
        assert found.mape < 1e-3
        assert_predicts(found.model, rows[20:40], 1e-3)


def test_an_unused_filter_returns_the_planning_model():
    costs = CostFilter(PLANNED)
    costs.add((0.0, 0.0, 0.0, 0.0), 1.0)
    assert costs.fitted() == PLANNED
    assert costs.drift(PLANNED) == 0.0


def test_a_restored_filter_goes_on_as_if_nothing_had_happened():
    rows = rows_of(SLOWER)
    whole, restored = filtered(rows), CostFilter(PLANNED)
    restored.restore(json.loads(json.dumps(filtered(rows[:150]).state())))
    for row in rows[150:]:
        restored.add(row["cost_terms"], row["step_seconds"])
    assert restored.fitted() == whole.fitted()
    assert restored.drift(PLANNED) == whole.drift(PLANNED)
    assert restored.steps == whole.steps


def test_noise_does_not_bias_the_fit():
    rows = rows_of(PLANNED, noise=0.2)
    model = fit_run(rows, PLANNED).model
    predicted = sum(float(np.dot(row["cost_terms"], coefficients(model))) for row in rows)
    assert predicted == pytest.approx(sum(row["step_seconds"] for row in rows), rel=0.04)
