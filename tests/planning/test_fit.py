"""Cost models fitted to measurements and to the step times of a run."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import WAN as PLANNED
from planning_cases import examples, refused

from alload_jax.planning import cost
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
    fit_sparse,
    predicted,
)
from alload_jax.planning.metrics import step_metrics
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload

GRID = [(rows, s) for s in (256, 1024, 4096, 16_384, 65_536) for rows in (1, 4, 16)]
TIMES = st.lists(st.floats(1e-3, 10), min_size=len(GRID), max_size=len(GRID))
SLOWER = cost.QuadraticCost(0.06, 2.1e-5, 1.2e-9, 5e-4)
LAYERS = cost.SparseLayers(25 / 30, 0.1)
SPARSE = cost.SparseCost(**vars(PLANNED), c3=1.4e-9, c4=1.5e-6, c5=6e-12, layers=LAYERS)


def measured(seconds):
    return [Point(b, s, t) for (b, s), t in zip(GRID, seconds, strict=True)]


def points_of(model):
    return measured(cost.bucketed_cost(model, *np.array(GRID).T).tolist())


# Realistic coefficients of a step: a fixed cost of 1 to 100 ms, 1 to 100 µs per token, and so on.
COEFFICIENTS = (st.floats(1e-3, 1e-1), st.floats(1e-6, 1e-4), st.floats(1e-10, 1e-8))
QUADRATICS = st.builds(cost.QuadraticCost, *COEFFICIENTS, st.just(0.0) | st.floats(1e-4, 1e-2))


@given(QUADRATICS, st.integers(0, 2**32 - 1))
@examples(30)
def test_the_coefficients_of_exact_points_are_found_and_noise_changes_predictions_little(
    model, seed
):
    exact = points_of(model)
    found = fit_quadratic(exact, per_sequence=model.c_sequence > 0)
    assert found.coefficients == pytest.approx(model.coefficients, rel=1e-6)
    goodness = evaluate(found, exact)
    assert goodness.mape < 1e-8
    assert goodness.r2 == pytest.approx(1)
    noise = np.random.default_rng(seed).normal(1, 0.02, len(GRID))
    noisy = measured([p.seconds * n for p, n in zip(exact, noise, strict=True)])
    assert evaluate(fit_quadratic(noisy), exact).mape < 0.05


@given(st.floats(0.2, 3), st.floats(1e-12, 1e3))
@examples(30)
def test_a_power_law_is_found(p, a):
    found = fit_power(points_of(cost.PowerCost(p, a)))
    assert found.p == pytest.approx(p, abs=1e-9)
    assert found.a == pytest.approx(a, rel=1e-6)


@given(TIMES, QUADRATICS)
@examples(40)
def test_no_coefficient_is_negative_and_goodness_is_by_the_usual_formulas(seconds, model):
    points = measured(seconds)
    for per_sequence in (True, False):
        fitted = fit_quadratic(points, per_sequence=per_sequence)
        assert min(fitted.coefficients) >= 0
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
    assert evaluate(PLANNED, [Point(1, 10, 1.0), Point(2, 5, 1.0)]).r2 is None


@given(st.floats(1e6, 1e12), st.floats(1e3, 1e7), st.just(0.0) | st.floats(1e4, 1e8))
@examples(20)
def test_memory_is_a_plane_through_its_sizes(base, per_token, per_sequence):
    rows, tokens = np.array([1, 2, 4, 16, 32, 64]), np.array([1, 2, 4, 1, 2, 4]) * 4096
    model = fit_memory(rows, tokens, base + per_token * tokens + per_sequence * rows)
    for b, t in zip(rows.tolist(), tokens.tolist(), strict=True):
        expected = base + per_token * t + per_sequence * b
        assert model.bytes_of(t, b) == pytest.approx(expected, rel=1e-6)
    assert fit_memory([1, 1], [1, 2], [0.0, 10.0]).base == 0  # never below


@given(
    st.tuples(st.floats(0.5e-9, 5e-9), st.floats(0, 2e-5), st.floats(0, 2e-10)),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.005]),
)
@examples(15)
def test_sparse_terms_are_recovered(coefficients, seed, noise):
    model = cost.SparseCost(**vars(PLANNED), **vars(cost.SparseTerms(*coefficients)))
    random = np.random.default_rng(seed)
    points = []
    for density in (0.1, 0.3):
        for seq_len in (16_384, 32_768, 65_536, 80_000):
            layers = cost.SparseLayers(1.0, density)
            exact = Point(1, seq_len, 1.0, layers)
            seconds = float(predicted(model, [exact])[0])
            seconds *= float(np.exp(noise * random.standard_normal()))
            points.append(Point(1, seq_len, seconds, layers))
    found = fit_sparse(points, PLANNED)
    if not noise:
        np.testing.assert_allclose(found.coefficients, model.coefficients, 1e-5, 1e-15)
    assert evaluate(found, points).mape < 0.01
    # What the fit is for: other densities and lengths, and some layers dense.
    other = [Point(2, 50_000, 1.0, cost.SparseLayers(0.8, each)) for each in (0.05, 0.5)]
    np.testing.assert_allclose(predicted(found, other), predicted(model, other), rtol=0.03)


GOOD = Point(1, 20_000, 1.0, cost.SparseLayers(1.0, 0.1))
DENSE = Point(1, 20_000, 1.0, cost.SparseLayers())
SHORT = Point(1, 2_000, 1.0, cost.SparseLayers(1.0, 0.1))


def test_impossible_fits_are_reported_in_one_line():
    for action, words in (
        (lambda: fit_quadratic([Point(1, 2, 1.0)] * 3), "3 points for 4 coefficients"),
        (lambda: fit_quadratic([Point(1, 2, 1.0)] * 2, per_sequence=False), "2 points for 3 "),
        (lambda: fit_quadratic([Point(1, 2, 0.0)] * 4), "must be above 0"),
        (lambda: fit_power([Point(1, 2, 1.0)]), "1 points for 2"),
        (lambda: fit_power([Point(1, 2, 1.0), Point(2, 2, 2.0)]), "two lengths"),
        (lambda: fit_power([Point(1, 2, 1.0), Point(1, 4, 0.5)]), "p comes out as -1.000"),
        (lambda: evaluate(cost.PowerCost(), []), "no points"),
        (lambda: fit_memory([1, 1], [5, 5], [1.0, 1.0]), "at 1 size"),
        (lambda: fit_memory([1, 1], [1, 2], [5.0, 0.0]), "does not grow"),
        (lambda: fit_sparse([GOOD, GOOD, DENSE], PLANNED), "dense attention in all layers"),
        (lambda: fit_sparse([GOOD, GOOD, SHORT], PLANNED), "dense attention in all layers"),
        (lambda: fit_sparse([GOOD] * 2, PLANNED), "2 points for 3"),
        (lambda: fit_run([{"step_seconds": 1.0}], None), "0 steps can be fitted"),
        (lambda: fit_run(rows_of(PLANNED)[:19], PLANNED), "19 steps"),
        (lambda: fit_run(rows_of(PLANNED), SPARSE), "0 steps can be fitted"),
    ):
        refused([words], action)


@functools.cache
def planned_terms(count):
    """Terms of the cost of steps of two kinds of plans."""
    terms = []
    samples = make_workload("mixed-resolution", 2000)
    for policy in ("balanced", "equal_tokens"):
        config = PlanningConfig(policy, m_mem=90_000, sample_spread=None)
        plan = make_plan(config, samples, 4, 0, cost.CostFile(quadratic=PLANNED))
        steps = (step_metrics(plan.step(n), plan, PLANNED) for n in range(count // 2))
        terms += [step.cost_terms for step in steps]
    return terms


@functools.cache
def switching_terms(count):
    """Terms of steps of a run whose layers become sparse one after another."""
    random, terms = np.random.default_rng(0), []
    for number in range(count):
        layers = cost.SparseLayers(min(1.0, number / count), 0.5 - 0.4 * number / count)
        lengths = random.choice([1560, 16_380, 32_760, 75_600], int(random.integers(1, 4)))
        seq_len, unit = np.sort(lengths), cost.SparseCost(0.0, 0.0, 1.0, layers=layers)
        attention = [
            float(unit.with_coefficients(each).sequence_cost(seq_len).sum())
            for each in np.eye(7)[3:].tolist()
        ]
        terms.append([1.0, float(len(seq_len)), float(seq_len.sum()), *attention])
    return terms


def rows_of(model, count=240, noise=0.01, seed=0):
    """Steps that take what `model` says, with noise."""
    random, rows = np.random.default_rng(seed), []
    sparse = isinstance(model, cost.SparseCost)
    for terms in (switching_terms if sparse else planned_terms)(count):
        seconds = float(np.dot(terms, model.coefficients))
        seconds *= float(np.exp(noise * random.standard_normal()))
        rows.append({"cost_terms": terms, "step_seconds": seconds, "input_wait_seconds": 0.0})
    return rows if sparse else [rows[n] for n in random.permutation(len(rows))]


def filtered(rows, model=PLANNED):
    """A filter that met the rows, and the largest drift on the way."""
    costs, largest = CostFilter(model), 0.0
    for row in rows:
        costs.add(tuple(row["cost_terms"]), row["step_seconds"])
        largest = max(largest, abs(costs.drift(model)))
    return costs, largest


def assert_predicts(model, rows, rtol):
    found = [np.dot(row["cost_terms"], model.coefficients) for row in rows]
    np.testing.assert_allclose(found, [row["step_seconds"] for row in rows], rtol=rtol)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_the_filter_follows_a_device_that_is_slower_than_planned_or_another(scale):
    true = cost.QuadraticCost(*(scale * c for c in dataclasses.astuple(SLOWER)))
    costs, _ = filtered(rows_of(true))
    assert costs.drift(PLANNED) == pytest.approx(1.21 * scale - 1, abs=0.03 * scale)
    assert costs.drift(true) == pytest.approx(0.0, abs=0.01)
    assert_predicts(costs.fitted(), rows_of(true, seed=1)[:50], 0.05)


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.integers(0, 9))
@examples(12)
def test_coefficients_stay_within_bounds(factors, seed):
    planned = dataclasses.astuple(PLANNED)
    true = cost.QuadraticCost(*(f * c for f, c in zip(factors, planned, strict=True)))
    costs, random = CostFilter(PLANNED), np.random.default_rng(seed)
    for _ in range(40):
        terms = (1.0, float(random.integers(1, 40)), 9e4, float(random.uniform(1e6, 8e9)))
        costs.add(terms, float(np.dot(terms, true.coefficients)))
    ratio = np.divide(costs.fitted().coefficients, PLANNED.coefficients)
    ratio /= 1 + costs.drift(PLANNED)
    assert (ratio >= LEAST - 1e-9).all()
    assert (ratio <= MOST + 1e-9).all()


def test_steps_that_compiled_or_waited_and_damaged_lines_are_left_out():
    rows = rows_of(PLANNED, noise=0.0)
    times = (50 * rows[0]["step_seconds"], float("nan"), -1.0)
    wrong = [{"step_seconds": seconds} for seconds in times]
    wrong += [{"input_wait_seconds": each} for each in (rows[1]["step_seconds"] / 2, None)]
    wrong += [{"cost_terms": terms} for terms in (None, [1.0], ["x"] * 4)]
    changed = dict(zip(range(3, 100, 11), wrong, strict=False))
    damaged = [row | changed.get(number, {}) for number, row in enumerate(rows)]
    for planned_by in (None, PLANNED):
        found = fit_run(damaged, planned_by)
        assert found.steps == len(rows) - len(wrong)
        assert found.mape < 1e-3
        assert_predicts(found.model, rows[20:40], 1e-3)
    assert fit_run(rows[:20], PLANNED).drift == pytest.approx(0, abs=1e-9)
    assert fit_run(rows, None).drift is None


def test_an_unused_filter_is_the_planning_model_and_a_restored_one_goes_on():
    unused = CostFilter(PLANNED)
    unused.add((0.0, 0.0, 0.0, 0.0), 1.0)
    assert (unused.fitted(), unused.drift(PLANNED)) == (PLANNED, 0.0)
    rows = rows_of(SLOWER)
    whole, restored = filtered(rows)[0], CostFilter(PLANNED)
    restored.restore(json.loads(json.dumps(filtered(rows[:150])[0].state())))
    for row in rows[150:]:
        restored.add(row["cost_terms"], row["step_seconds"])
    for found in ("fitted", "state"):
        assert getattr(restored, found)() == getattr(whole, found)()
    for times, counts in ((1.49, True), (1.51, False)):  # what takes so long is no usual step
        terms, steps = row["cost_terms"], whole.steps
        usual = np.dot(terms, PLANNED.coefficients) * (1 + whole.drift(PLANNED))
        whole.add(tuple(terms), times * usual)
        assert (whole.steps > steps) == counts


def test_noise_does_not_bias_the_fit():
    rows = rows_of(PLANNED, noise=0.2)
    fit = fit_run(rows, PLANNED)
    found = sum(float(np.dot(row["cost_terms"], fit.model.coefficients)) for row in rows)
    assert found == pytest.approx(sum(row["step_seconds"] for row in rows), rel=0.04)
    assert fit.mape == pytest.approx(0.2 * math.sqrt(2 / math.pi), rel=0.1)  # normal's mean of |x|


def test_layers_that_switch_are_no_drift_and_their_terms_are_fitted():
    costs, largest = filtered(rows_of(SPARSE), SPARSE)
    assert largest < 0.03
    assert_predicts(costs.fitted(), rows_of(SPARSE, noise=0.0), 0.01)
    assert costs.fitted().layers == LAYERS
    rows = rows_of(dataclasses.replace(SPARSE, c3=1.6 * SPARSE.c3))
    found = filtered(rows, SPARSE)[0].fitted()
    assert_predicts(found, rows[-40:], 0.06)
    assert found.c3 > 1.2 * SPARSE.c3
    for planned_by in (None, SPARSE):
        fit = fit_run(rows_of(SPARSE, noise=0.0), planned_by)
        assert fit.mape < 0.01
        assert isinstance(fit.model, cost.SparseCost)
        assert fit.model.c3 == pytest.approx(SPARSE.c3, rel=0.05)
