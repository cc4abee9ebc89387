"""Ladders of lengths: few programs, little padding, no more rows than samples."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, of_lengths

from alload_jax.planning.cost import CostFile, MemoryModel, QuadraticCost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.policies.ladder import choose_ladder
from alload_jax.planning.settings import PlanningConfig

COST = QuadraticCost(0.044, 2.0e-5, 1.2e-9, 1.1e-3)


def padding_of(rungs, lengths):
    """Padding of samples that are padded to the rungs alone."""
    padded = np.asarray(rungs)[np.searchsorted(rungs, lengths)]
    return 1 - lengths.sum() / padded.sum()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6))
@examples(60)
def test_little_padding_is_found_where_so_few_buckets_allow_it(lengths, most):
    lengths = np.asarray(lengths)
    shapes = of_lengths(*lengths.tolist()).buckets()
    one_row = np.ones_like
    ladder = choose_ladder(shapes, lambda found: one_row(found.seq_len), 1, most, 0.0)
    assert len(ladder.lengths) <= most
    kinds = np.unique(lengths)
    possible = min(
        padding_of(sorted({*rungs, int(kinds[-1])}), lengths)
        for count in range(most)
        for rungs in itertools.combinations(kinds.tolist(), min(count, len(kinds)))
    )
    found = padding_of(ladder.lengths, lengths)
    assert found <= max(0.05, possible) + 1e-9


@pytest.mark.parametrize(("policy", "mode"), [("equal_tokens", None), ("sorted", "independent")])
def test_continuous_lengths_need_few_programs_and_little_padding(policy, mode):
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(256), np.log(75_600), 30_000))
    samples = of_lengths(*lengths.astype(int).tolist())
    config = PlanningConfig(policy, mode, m_mem=163_840)
    plan = make_plan(config, samples, 8, 0, CostFile(quadratic=COST))
    found = plan_metrics(plan.epoch(0), samples.seq_len, COST, 163_840)
    assert found.buckets <= 64
    assert found.padding <= 0.15
    few = make_plan(
        PlanningConfig(policy, mode, m_mem=163_840, max_programs=7), samples, 8, 0, CostFile()
    )
    assert plan_metrics(few.epoch(0), samples.seq_len, COST, 163_840).buckets <= 7


def test_few_samples_of_many_shapes_fill_their_rows():
    """Rows were always M_mem // S: half of what 32 samples of 15 shapes computed was padding."""
    rng = np.random.default_rng(1)
    lengths = rng.choice([64, 63, 60, 66, 1088, 1071, 1020, 1122], 32)
    samples = of_lengths(*lengths.tolist())
    plan = make_plan(PlanningConfig("equal_tokens", m_mem=4352), samples, 1, 0, CostFile())
    assert plan_metrics(plan.epoch(0), samples.seq_len, COST, 4352).padding <= 0.1


def test_short_sequences_are_bounded_by_the_memory_of_their_conditions():
    samples = of_lengths(*[16] * 40_000, 4000)
    costs = CostFile(quadratic=COST, memory=MemoryModel(0.0, 1.0, 30.0))
    plan = make_plan(PlanningConfig("equal_tokens", m_mem=100_000), samples, 1, 0, costs)
    within = 100_000 * (1 + 30 / 256)
    epoch = plan.epoch(0)
    assert (epoch.rows * (epoch.padded_len + 30) <= within).all()


def test_a_fixed_batch_is_not_merged():
    samples = of_lengths(*[10] * 8, *[11] * 8)
    plan = make_plan(PlanningConfig("fixed", rows=4), samples, 1, 0)
    assert set(plan.epoch(0).padded_len.tolist()) == {10, 11}
    assert set(plan.epoch(0).rows.tolist()) == {4}
