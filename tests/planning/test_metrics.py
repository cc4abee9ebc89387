"""Metrics of plans, and simulations of their steps."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import cases, examples, of_lengths, of_shapes

from alload_jax.planning.cost import PowerCost, QuadraticCost, bucketed_cost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import (
    SimulationSettings,
    coefficient_of_variation,
    excess_over_bound,
    idle_fraction,
    imbalance,
    padding_ratio,
    plan_metrics,
    simulate,
    step_metrics,
)
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.bucketed import Fixed
from alload_jax.planning.policies.policy import RankTopology

COSTS = st.integers(1, 9).flatmap(
    lambda ranks: st.lists(
        st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=ranks, max_size=ranks),
        min_size=1,
        max_size=5,
    )
)
LINEAR = PowerCost(1.0)


def epoch_of(lengths, ranks, rows=1, mode="independent", micro_batches=1):
    samples = of_lengths(*lengths)
    topology = RankTopology(ranks, mode, micro_batches)
    return Plan(samples, Fixed(rows), topology, seed=0).epoch(0), samples.seq_len


def metrics_of(lengths, rows, ranks, mode="synchronous", cost=LINEAR, m_mem=None, **topology):
    epoch, seq_len = epoch_of(lengths, ranks, rows, mode, **topology)
    return plan_metrics(epoch, seq_len, cost, m_mem)


@pytest.mark.parametrize(
    ("cost", "expected_imbalance", "expected_idle", "expected_cv"),
    [
        ([3, 1], 0.5, 1 / 3, 0.5),
        ([2, 4, 6], 0.5, 1 / 3, math.sqrt(8 / 3) / 4),
        ([5, 0, 0, 0], 3, 0.75, math.sqrt(3)),
        ([7], 0, 0, 0),
        ([0, 0], 0, 0, 0),
    ],
)
def test_metrics_of_a_step_worked_out_by_hand(cost, expected_imbalance, expected_idle, expected_cv):
    cost = np.array(cost, float)
    assert imbalance(cost) == pytest.approx(expected_imbalance)
    assert idle_fraction(cost) == pytest.approx(expected_idle)
    assert coefficient_of_variation(cost) == pytest.approx(expected_cv)


@pytest.mark.parametrize(
    ("cost", "largest_indivisible_cost", "expected"),
    [
        ([6, 2], 1, 0.5),  # 6 where 4 each would do
        ([6, 2], 6, 0),  # one sample of 6 cannot be split
        ([6, 2], 5, 0.2),
        ([0, 0], 0, 0),
    ],
)
def test_excess_and_padding_worked_out_by_hand(cost, largest_indivisible_cost, expected):
    found = excess_over_bound(np.array(cost, float), np.array(largest_indivisible_cost, float))
    assert found == pytest.approx(expected)
    assert padding_ratio(75, 100) == 0.25


@given(COSTS, st.floats(1e-3, 1e3))
@examples(80)
def test_step_metrics_are_taken_over_the_last_axis_in_any_unit(costs, unit):
    array = np.array(costs)
    for function in (imbalance, idle_fraction, coefficient_of_variation):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = function(array)
        assert found.shape == array.shape[:-1]
        assert found == pytest.approx([float(function(row)) for row in array])
        assert np.isfinite(found).all()
        assert (found > -1e-9).all()
        assert function(array * unit) == pytest.approx(found, abs=1e-9)
    # Idle time and imbalance are two views of one ratio.
    assert 1 / (1 - idle_fraction(array)) - 1 == pytest.approx(imbalance(array), abs=1e-9)
    assert (idle_fraction(array) <= 1 - 1 / array.shape[-1] + 1e-9).all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (  # groups of 4 and of 1 sample, both of 4 rows
            {"lengths": [10] * 5, "rows": 2, "ranks": 2, "m_mem": 25},
            {"steps": 2, "samples": 5, "tokens": 50, "buckets": 1, "padding": 1 - 50 / 80}
            | {"utilisation": 50 / (25 * 4), "cost": 2 * 20, "imbalance": 0, "idle": 0}
            | {"cost_cv": 0, "excess": 0, "step_cv": 0, "dropped": 0, "duplicated": 0},
        ),
        (  # a rank without work; one sample cannot be split
            {"lengths": [10], "rows": 1, "ranks": 4, "mode": "independent"},
            {"steps": 1, "samples": 1, "imbalance": 3, "imbalance_max": 3, "idle": 0.75}
            | {"cost_cv": math.sqrt(3), "compute_cv": math.sqrt(3), "excess": 0, "padding": 0}
            | {"utilisation": None},
        ),
        (  # ranks of 10 and 30, of squares 100 and 900
            {"lengths": [10, 30], "rows": 1, "ranks": 2, "mode": "independent", "m_mem": 40},
            {"imbalance": 0.5, "idle": 1 / 3, "cost_cv": 0.5, "compute_cv": 400 / 500}
            | {"excess": 0, "cost": 30, "utilisation": 40 / 80, "buckets": 2},
        ),
        (
            {"lengths": [10, 30], "rows": 1, "ranks": 1},
            {"steps": 2, "step_cv": 0.5, "cost": 40, "imbalance": 0, "idle": 0, "cost_cv": 0},
        ),
        (  # micro-batches of a rank add up
            {"lengths": [10] * 4, "rows": 1, "ranks": 2, "micro_batches": 2}
            | {"cost": QuadraticCost(5.0, 1.0, 0)},
            {"steps": 1, "cost": 2 * (5 + 10)},
        ),
        (  # the fixed cost counts for ranks with only padding
            {"lengths": [10], "rows": 1, "ranks": 2, "cost": QuadraticCost(5.0, 0.0, 0.0)},
            {"cost": 5, "imbalance": 0, "padding": 0.5},
        ),
        (
            {"lengths": [10, 30], "rows": 1, "ranks": 2, "cost": PowerCost(2.0, a=0.0)},
            {"cost": 0, "imbalance": 0, "idle": 0, "cost_cv": 0, "step_cv": 0, "excess": 0},
        ),
    ],
)
def test_metrics_of_a_plan_worked_out_by_hand(arguments, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics_of(**arguments)
    for name, value in expected.items():
        value = None if value is None else pytest.approx(value)
        assert getattr(found, name) == value, name


def test_buckets_of_equal_length_but_other_shape_are_programs_of_their_own():
    samples = of_shapes((1, 16, 32), (1, 32, 16), (1, 16, 32))
    plan = Plan(samples, Fixed(1), RankTopology(1), seed=0)
    assert plan_metrics(plan.epoch(0), samples.seq_len, LINEAR, None).buckets == 2


@given(cases(), st.sampled_from([PowerCost(1.5), QuadraticCost(1e-3, 1e-6, 1e-9)]))
@examples(40)
def test_metrics_of_a_plan_are_those_of_its_steps_and_theirs_of_their_micro_batches(case, cost):
    manifest, config, seed = case
    lengths = manifest.lengths()
    plan = make_plan(config, manifest.samples(), 1, seed)
    steps = []
    for index in range(plan.steps_per_epoch):
        step = plan.step(index)
        ranks = [0.0] * config.ranks
        for part in step.micro_batches:
            rows, seq_len = np.array(part.rows), np.array(part.seq_len)
            ranks[part.rank] += float(bucketed_cost(cost, rows, seq_len))
        placed = [lengths[sample] for part in step.micro_batches for sample in part.samples]
        computed = sum(part.rows * part.seq_len for part in step.micro_batches)
        found = step_metrics(step, plan, cost)
        assert (found.samples, found.tokens) == (len(placed), sum(placed))
        assert found.predicted_cost == pytest.approx(max(ranks))
        assert found.imbalance == pytest.approx(max(ranks) / (sum(ranks) / len(ranks)) - 1)
        assert found.padding == pytest.approx(1 - sum(placed) / computed)
        steps.append(found)
    whole = plan_metrics(plan.epoch(0), plan.samples.seq_len, cost, config.m_mem)
    assert whole.steps == len(steps)
    assert whole.samples == sum(step.samples for step in steps)
    assert whole.tokens == sum(step.tokens for step in steps)
    assert whole.cost == pytest.approx(sum(step.predicted_cost for step in steps))
    assert whole.imbalance == pytest.approx(np.mean([step.imbalance for step in steps]))
    assert whole.imbalance_max == pytest.approx(max(step.imbalance for step in steps))
    if config.ranks_mode == "synchronous":
        for name in ("imbalance", "imbalance_max", "idle", "cost_cv", "compute_cv", "excess"):
            assert getattr(whole, name) == pytest.approx(0, abs=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
@examples(30)
def test_dropped_and_duplicated_samples_are_counted(placements):
    epoch, seq_len = epoch_of([5] * 10, 2, mode="synchronous")
    offsets = np.r_[np.zeros(len(epoch.rows), int), len(placements)]
    broken = dataclasses.replace(epoch, sample=np.array(placements), offsets=offsets)
    found = plan_metrics(broken, seq_len, LINEAR, None)
    assert found.dropped == 10 - len(set(placements))
    assert found.duplicated == len(placements) - len(set(placements))


def test_metrics_are_plain_numbers():
    values = dataclasses.asdict(metrics_of([10, 30, 10], rows=2, ranks=3, m_mem=60))
    assert {type(value) for value in values.values()} == {int, float}
    whole = {name for name, value in values.items() if type(value) is int}
    assert whole == {
        *("steps", "samples", "tokens", "buckets", "segments", "dropped", "duplicated")
    }


# ---------------------------------------------------------------- simulations


def test_a_simulation_without_noise_matches_the_metrics():
    plan, seq_len = epoch_of([10, 30, 20, 20, 50], 2)
    found = simulate(plan, seq_len, LINEAR, SimulationSettings())
    expected = plan_metrics(plan, seq_len, LINEAR, None)
    assert found.seconds == pytest.approx(expected.cost)
    for name in ("imbalance", "imbalance_max", "idle", "step_cv"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))
    assert found.tokens_per_second == pytest.approx(130 / expected.cost)
    assert found.samples_per_second == pytest.approx(5 / expected.cost)


def test_the_all_reduce_delays_every_step_and_leaves_ranks_idle():
    found = simulate(*epoch_of([10] * 4, 2), LINEAR, SimulationSettings(all_reduce=5.0))
    assert found.seconds == pytest.approx(2 * 15)
    assert found.idle == pytest.approx(5 / 15)
    assert found.imbalance == 0


def test_noise_keeps_the_work_but_makes_ranks_wait_and_depends_on_its_seed():
    plan, seq_len = epoch_of([10] * 8000, 8)
    quiet, noisy, again, other = (
        simulate(plan, seq_len, LINEAR, SimulationSettings(noise, 0.0, seed))
        for noise, seed in ((0.0, 1), (0.05, 1), (0.05, 1), (0.05, 2))
    )
    # The mean of the largest of 8 standard normal numbers is 1.4236.
    assert noisy.seconds / quiet.seconds == pytest.approx(1 + 0.05 * 1.4236, rel=0.01)
    assert noisy.idle == pytest.approx(1 - 1 / (1 + 0.05 * 1.4236), abs=0.005)
    assert noisy == again
    assert noisy.seconds != other.seconds


def test_a_plan_that_costs_nothing_has_no_speed():
    found = simulate(*epoch_of([10, 20], 2), QuadraticCost(0, 0, 0), SimulationSettings())
    assert (found.seconds, found.tokens_per_second, found.idle) == (0, 0, 0)
    assert np.isfinite([found.imbalance, found.step_cv]).all()
