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
    coefficient_of_variation,
    excess_over_bound,
    idle_fraction,
    imbalance,
    padding_ratio,
    plan_metrics,
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


def metrics_of(lengths, rows, ranks, mode="synchronous", cost=LINEAR, m_mem=None, micro_batches=1):
    samples = of_lengths(*lengths)
    plan = Plan(samples, Fixed(rows), RankTopology(ranks, mode, micro_batches), seed=0)
    return plan_metrics(plan.epoch(0), samples.seq_len, cost, m_mem)


@pytest.mark.parametrize(
    ("cost", "expected_imbalance", "expected_idle", "expected_cv"),
    [
        ([1, 1, 1, 1], 0, 0, 0),
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
        ([4, 4], 1, 0),
        ([6, 2], 1, 0.5),  # 6 where 4 each would do
        ([6, 2], 6, 0),  # one sample of 6 cannot be split
        ([6, 2], 5, 0.2),
        ([0, 0], 0, 0),
    ],
)
def test_excess_worked_out_by_hand(cost, largest_indivisible_cost, expected):
    found = excess_over_bound(np.array(cost, float), np.array(largest_indivisible_cost, float))
    assert found == pytest.approx(expected)


def test_padding_worked_out_by_hand():
    assert padding_ratio(75, 100) == 0.25
    assert padding_ratio(8, 8) == 0


@given(COSTS)
@examples(100)
def test_step_metrics_are_taken_over_the_last_axis(costs):
    array = np.array(costs)
    for function in (imbalance, idle_fraction, coefficient_of_variation):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = function(array)
        assert found.shape == array.shape[:-1]
        assert found == pytest.approx([float(function(row)) for row in array])
        assert np.isfinite(found).all()
        assert (found > -1e-9).all()


@given(COSTS)
@examples(60)
def test_idle_and_imbalance_are_two_views_of_one_ratio(costs):
    array = np.array(costs)
    assert 1 / (1 - idle_fraction(array)) - 1 == pytest.approx(imbalance(array), abs=1e-9)
    assert (idle_fraction(array) <= 1 - 1 / array.shape[-1] + 1e-9).all()


@given(COSTS, st.floats(1e-3, 1e3))
@examples(40)
def test_the_unit_of_cost_does_not_matter(costs, unit):
    array = np.array(costs)
    for function in (imbalance, idle_fraction, coefficient_of_variation):
        assert function(array * unit) == pytest.approx(function(array), abs=1e-9)


def test_a_plan_with_padding_worked_out_by_hand():
    # 5 samples of 10 tokens on 2 ranks × 2 rows: groups of 4 and 1, both of 4 rows.
    found = metrics_of([10] * 5, rows=2, ranks=2, m_mem=25)
    assert found.steps == 2
    assert (found.samples, found.tokens, found.buckets) == (5, 50, 1)
    assert found.padding == pytest.approx(1 - 50 / 80)
    assert found.utilisation == pytest.approx(50 / (25 * 4))
    assert found.cost == pytest.approx(2 * 20)
    assert (found.imbalance, found.idle, found.cost_cv, found.excess, found.step_cv) == (0,) * 5
    assert (found.dropped, found.duplicated) == (0, 0)


def test_buckets_of_equal_length_but_other_shape_are_programs_of_their_own():
    samples = of_shapes((1, 16, 32), (1, 32, 16), (1, 16, 32))
    plan = Plan(samples, Fixed(1), RankTopology(1), seed=0)
    assert plan_metrics(plan.epoch(0), samples.seq_len, LINEAR, None).buckets == 2


def test_a_rank_without_work_worked_out_by_hand():
    found = metrics_of([10], rows=1, ranks=4, mode="independent")
    assert (found.steps, found.samples) == (1, 1)
    assert found.imbalance == found.imbalance_max == pytest.approx(3)
    assert found.idle == pytest.approx(0.75)
    assert [found.cost_cv, found.compute_cv] == pytest.approx([math.sqrt(3)] * 2)
    assert found.excess == pytest.approx(0)  # one sample cannot be split
    assert found.utilisation is None
    assert found.padding == 0


def test_two_unequal_ranks_worked_out_by_hand():
    # Ranks cost 10 and 30; of squares 100 and 900.
    found = metrics_of([10, 30], rows=1, ranks=2, mode="independent", m_mem=40)
    assert found.imbalance == pytest.approx(0.5)
    assert found.idle == pytest.approx(1 / 3)
    assert found.cost_cv == pytest.approx(0.5)
    assert found.compute_cv == pytest.approx(400 / 500)
    assert found.excess == pytest.approx(0)
    assert found.cost == pytest.approx(30)
    assert found.utilisation == pytest.approx(40 / 80)
    assert found.buckets == 2


def test_unequal_steps_worked_out_by_hand():
    found = metrics_of([10, 30], rows=1, ranks=1)
    assert found.steps == 2
    assert found.step_cv == pytest.approx(0.5)
    assert found.cost == pytest.approx(40)
    assert found.imbalance == found.idle == found.cost_cv == 0


def test_micro_batches_of_a_rank_add_up():
    found = metrics_of([10] * 4, rows=1, ranks=2, micro_batches=2, cost=QuadraticCost(5.0, 1.0, 0))
    assert found.steps == 1
    assert found.cost == pytest.approx(2 * (5 + 10))


def test_the_fixed_cost_counts_for_ranks_with_only_padding():
    found = metrics_of([10], rows=1, ranks=2, cost=QuadraticCost(5.0, 0.0, 0.0))
    assert found.cost == pytest.approx(5)
    assert found.imbalance == 0
    assert found.padding == 0.5


def test_an_epoch_that_costs_nothing_is_balanced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics_of([10, 30], rows=1, ranks=2, cost=PowerCost(2.0, a=0.0))
    assert found.cost == 0
    assert (found.imbalance, found.idle, found.cost_cv, found.step_cv, found.excess) == (0,) * 5


@given(cases(), st.sampled_from([PowerCost(1.5), QuadraticCost(1e-3, 1e-6, 1e-9)]))
@examples(60)
def test_a_steps_metrics_are_those_of_its_micro_batches(case, cost):
    manifest, config, seed = case
    lengths = manifest.lengths()
    plan = make_plan(config, manifest.samples(), 1, seed)
    for index in range(plan.steps_per_epoch):
        step = plan.step(index)
        ranks = [0.0] * config.ranks
        for part in step.micro_batches:
            ranks[part.rank] += float(
                bucketed_cost(cost, np.array(part.rows), np.array(part.seq_len))
            )
        placed = [lengths[sample] for part in step.micro_batches for sample in part.samples]
        computed = sum(part.rows * part.seq_len for part in step.micro_batches)
        found = step_metrics(step, plan, cost)
        assert (found.samples, found.tokens) == (len(placed), sum(placed))
        assert found.predicted_cost == pytest.approx(max(ranks))
        assert found.imbalance == pytest.approx(max(ranks) / (sum(ranks) / len(ranks)) - 1)
        assert found.padding == pytest.approx(1 - sum(placed) / computed)


@given(cases(), st.sampled_from([PowerCost(1.5), QuadraticCost(1e-3, 1e-6, 1e-9)]))
@examples(40)
def test_a_plans_metrics_are_those_of_its_steps(case, cost):
    manifest, config, seed = case
    plan = make_plan(config, manifest.samples(), 1, seed)
    steps = [step_metrics(plan.step(i), plan, cost) for i in range(plan.steps_per_epoch)]
    whole = plan_metrics(plan.epoch(0), plan.samples.seq_len, cost, config.m_mem)
    assert whole.steps == len(steps)
    assert whole.samples == sum(step.samples for step in steps)
    assert whole.tokens == sum(step.tokens for step in steps)
    assert whole.cost == pytest.approx(sum(step.predicted_cost for step in steps))
    assert whole.imbalance == pytest.approx(np.mean([step.imbalance for step in steps]))
    assert whole.imbalance_max == pytest.approx(max(step.imbalance for step in steps))


@given(cases(modes=["synchronous"]))
@examples(40)
def test_synchronous_ranks_are_balanced(case):
    manifest, config, seed = case
    plan = make_plan(config, manifest.samples(), 1, seed)
    found = plan_metrics(plan.epoch(0), plan.samples.seq_len, config.predictor(), config.m_mem)
    for name in ("imbalance", "imbalance_max", "idle", "cost_cv", "compute_cv", "excess"):
        assert getattr(found, name) == pytest.approx(0, abs=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
@examples(40)
def test_dropped_and_duplicated_samples_are_counted(placements):
    samples = of_lengths(*[5] * 10)
    epoch = Plan(samples, Fixed(1), RankTopology(2), seed=0).epoch(0)
    offsets = np.r_[np.zeros(len(epoch.rows), int), len(placements)]
    broken = dataclasses.replace(epoch, sample=np.array(placements), offsets=offsets)
    found = plan_metrics(broken, samples.seq_len, LINEAR, None)
    assert found.dropped == 10 - len(set(placements))
    assert found.duplicated == len(placements) - len(set(placements))


def test_metrics_are_plain_numbers():
    values = dataclasses.asdict(metrics_of([10, 30, 10], rows=2, ranks=3, m_mem=60))
    assert {type(value) for value in values.values()} == {int, float}
    whole = {name for name, value in values.items() if type(value) is int}
    assert whole == {
        "steps",
        "samples",
        "tokens",
        "buckets",
        "segments",
        "dropped",
        "duplicated",
    }
