"""Cost models fitted to the step times of a run."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, refusal

from alload_jax.planning.cost import CostFile, QuadraticCost, micro_batch_costs, micro_batch_terms
from alload_jax.planning.factory import make_plan
from alload_jax.planning.fit import LEAST, MOST, CostFilter, fit_run
from alload_jax.planning.metrics import step_metrics
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload

PLANNED = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)


def coefficients(model):
    return np.asarray([model.c0, model.c_sequence, model.c1, model.c2])


def rows_of(model, count=300, noise=0.01, seed=0):
    """Steps of two kinds of plans that take what `model` says, with noise."""
    random = np.random.default_rng(seed)
    rows = []
    for policy in ("balanced", "equal_tokens"):
        config = PlanningConfig(policy, m_mem=90_000, sample_spread=None)
        samples = make_workload("mixed-resolution", 4000)
        plan = make_plan(config, samples, 4, 0, CostFile(quadratic=PLANNED))
        for number in range(count // 2):
            terms = step_metrics(plan.step(number), plan, PLANNED).cost_terms
            seconds = float(np.dot(terms, coefficients(model)))
            seconds *= float(np.exp(noise * random.standard_normal()))
            rows.append({"cost_terms": terms, "step_seconds": seconds, "input_wait_seconds": 0.0})
    return [rows[n] for n in random.permutation(len(rows))]


@pytest.mark.parametrize(
    ("policy", "context"),
    [("equal_tokens", 1), ("sorted", 1), ("first_fit", 1), ("balanced", 1), ("balanced", 4)],
)
def test_terms_times_coefficients_are_the_predicted_cost(policy, context):
    config = PlanningConfig(policy, m_mem=90_000, context=context, link_bandwidth=1e30)
    samples = make_workload("mixed-resolution", 600)
    epoch = make_plan(config, samples, 4, 0, CostFile(quadratic=PLANNED)).epoch(0)
    cost = micro_batch_costs(epoch, samples.seq_len, PLANNED)
    terms = micro_batch_terms(epoch, samples.seq_len)
    np.testing.assert_allclose(terms @ coefficients(PLANNED), cost, rtol=1e-9)


def test_the_filter_follows_a_device_that_is_slower_than_planned():
    true = QuadraticCost(0.06, 2.1e-5, 1.2e-9, 5e-4)
    costs = CostFilter(PLANNED)
    for row in rows_of(true):
        costs.add(row["cost_terms"], row["step_seconds"])
    found = costs.fitted()
    assert costs.drift(PLANNED) == pytest.approx(0.21, abs=0.03)
    assert costs.drift(true) == pytest.approx(0.0, abs=0.01)
    for row in rows_of(true, seed=1)[:50]:
        predicted = np.dot(row["cost_terms"], coefficients(found))
        assert predicted == pytest.approx(row["step_seconds"], rel=0.05)


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.integers(0, 9))
@examples(30)
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


def test_steps_that_compiled_or_waited_are_left_out():
    rows = rows_of(PLANNED, noise=0.0)
    rows[3] = rows[3] | {"step_seconds": 50 * rows[3]["step_seconds"]}
    rows[9] = rows[9] | {"input_wait_seconds": rows[9]["step_seconds"] / 2}
    for planned_by in (None, PLANNED):
        found = fit_run(rows, planned_by)
        assert found.steps == len(rows) - 2
        assert found.mape < 1e-3
        for row in rows[20:40]:
            predicted = np.dot(row["cost_terms"], coefficients(found.model))
            assert predicted == pytest.approx(row["step_seconds"], rel=1e-3)


def test_a_short_or_old_run_is_refused():
    assert "0 steps can be fitted" in refusal(fit_run, [{"step_seconds": 1.0}], None)
    assert "3 steps" in refusal(fit_run, rows_of(PLANNED)[:3], PLANNED)


def test_an_unused_filter_returns_the_planning_model():
    costs = CostFilter(PLANNED)
    costs.add((0.0, 0.0, 0.0, 0.0), 1.0)
    assert costs.fitted() == PLANNED
    assert costs.drift(PLANNED) == 0.0


def test_a_restored_filter_goes_on_as_if_nothing_had_happened():
    rows = rows_of(QuadraticCost(0.06, 2.1e-5, 1.2e-9, 5e-4))
    whole, first = CostFilter(PLANNED), CostFilter(PLANNED)
    for row in rows[:150]:
        first.add(row["cost_terms"], row["step_seconds"])
    second = CostFilter(PLANNED)
    second.restore(json.loads(json.dumps(first.state())))
    for number, row in enumerate(rows):
        whole.add(row["cost_terms"], row["step_seconds"])
        if number >= 150:
            second.add(row["cost_terms"], row["step_seconds"])
    assert second.fitted() == whole.fitted()
    assert second.drift(PLANNED) == whole.drift(PLANNED)
    assert second.steps == whole.steps


@pytest.mark.parametrize("slower", [0.1, 5.0])
def test_another_device_changes_the_scale_freely(slower):
    true = QuadraticCost(0.06 * slower, 2.1e-5 * slower, 1.2e-9 * slower, 5e-4 * slower)
    costs = CostFilter(PLANNED)
    for row in rows_of(true):
        costs.add(row["cost_terms"], row["step_seconds"])
    found = costs.fitted()
    for row in rows_of(true, seed=1)[:50]:
        predicted = np.dot(row["cost_terms"], coefficients(found))
        assert predicted == pytest.approx(row["step_seconds"], rel=0.05)


@pytest.mark.parametrize(
    "damage",
    [
        {"cost_terms": None},
        {"cost_terms": [1.0]},
        {"cost_terms": ["x"] * 4},
        {"input_wait_seconds": None},
        {"step_seconds": float("nan")},
        {"step_seconds": -1.0},
    ],
)
def test_damaged_lines_are_left_out(damage):
    rows = rows_of(PLANNED, noise=0.0)
    found = fit_run([*rows[:50], rows[50] | damage, *rows[51:]], PLANNED)
    assert found.steps == len(rows) - 1


def test_noise_does_not_bias_the_fit():
    rows = rows_of(PLANNED, noise=0.2)
    model = fit_run(rows, PLANNED).model
    predicted = sum(float(np.dot(row["cost_terms"], coefficients(model))) for row in rows)
    assert predicted == pytest.approx(sum(row["step_seconds"] for row in rows), rel=0.04)
