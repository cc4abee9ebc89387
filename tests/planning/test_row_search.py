"""Rows, context sizes and bounds that are searched, against an exhaustive search."""

from dataclasses import replace

import numpy as np
import pytest
from planning_cases import of_lengths, refused

from alload_jax.planning.cost import CostFile, QuadraticCost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.policies.search import makespan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.study import Study, advice

COSTS = CostFile(quadratic=QuadraticCost(0.044, 2.0e-5, 1.2e-9, 1.1e-3))
"""About seconds of Wan 2.1's 1.3B model on an H200."""


def drawn_case(seed):
    """Lengths of 10 to 4,000 samples, 1 to 128 ranks, and M_mem."""
    rng = np.random.default_rng(seed)
    count = int(np.exp(rng.uniform(np.log(10), np.log(4000))))
    ranks = int(2 ** rng.integers(0, 8)) if rng.random() < 0.6 else int(rng.integers(1, 129))
    lengths = (
        lambda: np.exp(rng.normal(rng.uniform(6, 9.5), rng.uniform(0.2, 1.3), count)),
        lambda: rng.choice(rng.integers(200, 80_000, rng.integers(1, 7)), count),
        lambda: np.where(
            rng.random(count) < rng.uniform(0.02, 0.5),
            rng.integers(20_000, 76_000),
            rng.integers(256, 4000, count),
        ),
        lambda: rng.integers(256, rng.integers(1000, 76_000), count),
    )[seed % 4]()
    lengths = np.maximum(16, lengths).astype(int)
    return lengths, ranks, int(lengths.max() * np.exp(rng.uniform(0, np.log(6))))


def rate(plan):
    seq_len = plan.samples.seq_len
    return seq_len.sum() / makespan(plan.epoch(0), seq_len, COSTS.quadratic)


def compare_with_every_row(seed):
    lengths, ranks, m_mem = drawn_case(seed)
    samples = of_lengths(*lengths.tolist())
    config = PlanningConfig("balanced", m_mem=m_mem, sample_spread=None if seed % 3 else 2.5)
    plan = make_plan(config, samples, ranks, 0, COSTS)
    best, tokens = 0.0, float(lengths.max())
    while tokens <= m_mem:
        policy = replace(plan.policy, row_tokens=int(tokens))
        best = max(best, rate(Plan(samples, policy, RankTopology(ranks), 0)))
        tokens *= 1.02
    assert lengths.max() <= plan.policy.row_tokens <= m_mem
    assert rate(plan) >= 0.98 * best


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_tokens_of_a_row_are_as_good_as_any(seed):
    compare_with_every_row(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 22))
def test_the_tokens_of_a_row_are_as_good_as_any_on_more_sets(seed):
    compare_with_every_row(seed)


@pytest.mark.parametrize("giants", [1, 4])
def test_context_and_row_are_chosen_together(giants):
    rng = np.random.default_rng(giants - 1)
    lengths = np.exp(rng.normal(8, 0.8, 200)).astype(int) + 16
    lengths[:giants] = rng.integers(60_000, 200_000, giants)
    samples = of_lengths(*lengths.tolist())
    auto = PlanningConfig("balanced", m_mem=220_000, context="auto")
    best = max(
        rate(make_plan(replace(auto, context=context), samples, 8, 0, COSTS))
        for context in (1, 2, 4, 8)
    )
    assert rate(make_plan(auto, samples, 8, 0, COSTS)) >= 0.98 * best


def test_heads_limit_the_context():
    samples, costs = of_lengths(*[500] * 600, 90_000), replace(COSTS, model={"num_heads": 12})
    auto = PlanningConfig("balanced", m_mem=100_000, context="auto")
    assert 12 % make_plan(auto, samples, 64, 0, costs).policy.context == 0
    said = ("planning.context is 8", "12 heads")
    refused(said, make_plan, replace(auto, context=8), samples, 64, 0, costs)


def test_a_small_set_gets_rows_of_its_size():
    """Rows had at least half of M_mem, however few samples there were."""
    samples = of_lengths(*[1200] * 8)
    plan = make_plan(PlanningConfig("balanced", m_mem=60_000), samples, 8, 0, COSTS)
    assert plan.policy.row_tokens == 1200
    assert plan_metrics(plan.epoch(0), samples.seq_len, COSTS.quadratic, 60_000).padding == 0


def stills_and_clips(count=6000):
    rng = np.random.default_rng(0)
    stills = rng.integers(256, 4096, count)
    return of_lengths(*np.where(rng.random(count) < 0.05, 75_600, stills).tolist())


def test_a_bound_on_samples_that_costs_much_is_relaxed():
    samples = stills_and_clips()
    config = PlanningConfig("balanced", m_mem=75_600)
    study = Study(samples, config, COSTS)
    balanced, by_cost = (study.case(name, 8) for name in ("balanced", "sorted:independent"))
    assert balanced.plan.policy.sample_spread != 2.5
    tokens = [case.metrics.tokens_per_second for case in (balanced, by_cost)]
    assert tokens[0] >= 0.97 * tokens[1]
    [told] = advice(study, [balanced])
    assert "would cost" in told
    m_mem = int(told.split("--m-mem ")[1].split()[0])
    larger = Study(samples, replace(config, m_mem=m_mem), COSTS).case("balanced", 8)
    assert larger.plan.policy.sample_spread == 2.5
    assert larger.metrics.tokens_per_second >= 0.985 * tokens[0]


def test_a_bound_on_samples_that_costs_little_stays():
    samples = of_lengths(*np.random.default_rng(0).integers(200, 9000, 3000).tolist())
    plan = make_plan(PlanningConfig("balanced", m_mem=40_000), samples, 8, 0, COSTS)
    assert plan.policy.sample_spread == 2.5


def test_samples_weigh_the_same_over_an_epoch():
    samples = stills_and_clips(2000)
    for policy in ("balanced", "sorted", "equal_tokens", "first_fit"):
        plan = make_plan(PlanningConfig(policy, m_mem=80_000), samples, 4, 0, COSTS)
        found = plan_metrics(plan.epoch(0), samples.seq_len, COSTS.quadratic, 80_000)
        assert found.longest_weight == pytest.approx(1)
        assert abs(found.longest_weight_by_step - 1) > 0.02
