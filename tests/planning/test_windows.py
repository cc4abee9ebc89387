"""Plans whose windows follow measured times and the speeds of ranks."""

import itertools
import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import WAN, examples, of_lengths

from alload_jax.planning.cost import BandedCost, CostFile, QuadraticCost
from alload_jax.planning.epoch import times_placed
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import step_metrics
from alload_jax.planning.plan import Revision
from alload_jax.planning.policies.packed import FirstFit
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.policies.windows import by_speed, place_again, step_times
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload


@cache
def plan(m_mem=160_000, workload="mixed-resolution", ranks=8):
    config = PlanningConfig("balanced", m_mem=m_mem)
    return make_plan(config, make_workload(workload, 6_000), ranks, 0, CostFile(quadratic=WAN))


def seconds(plan, cost, speed):
    """Predicted time of the first epoch, a step's from its slowest rank."""
    found = [plan.of_step(index) for index in range(plan.steps_per_epoch)]
    parts = [window.only(within) for window, within in found]
    return sum(step_times(part, cost, np.asarray(speed)).sum() for part in parts)


@pytest.mark.parametrize(
    ("m_mem", "workload", "most"),
    [(160_000, "mixed-resolution", 0.02), (81_920, "mixed-resolution", 0.03),
     (66_816, "wan-480p", 0.03)],
)  # fmt: skip
def test_a_slow_rank_of_eight_costs_little(m_mem, workload, most):
    """Equal rows lose 11.1 %; with the same work for every second of every rank it were 1.3 %."""
    equal, speed = plan(m_mem, workload), (1, 1, 1, 0.9, 1, 1, 1, 1)
    usual = seconds(equal, WAN, np.ones(8))
    assert seconds(equal, WAN, speed) > 1.1 * usual
    assert seconds(equal.revised(Revision(0, WAN, speed)), WAN, speed) < (1 + most) * usual


def test_lengths_that_cost_more_than_planned_are_spread_anew():
    """In packed rows nothing else than the cost of lengths beside each other matters."""
    banded = BandedCost.of(WAN, plan().samples.seq_len)
    cost = replace(banded, squares=(*banded.squares[:-1], 1.5 * WAN.c2))
    after = plan().revised(Revision(0, cost))
    times = [seconds(each, cost, np.ones(8)) for each in (plan(), after)]
    assert times[1] < 0.97 * times[0]


def test_equal_speeds_change_no_step():
    before = plan()
    after = before.revised(Revision(0, WAN, (1.0,) * 8))
    assert [before.step(n) for n in range(40)] == [after.step(n) for n in range(40)]
    assert after.identity() == before.identity()


def test_a_revision_plans_no_epoch_again(monkeypatch):
    before = plan()
    whole = before.epoch(0)
    monkeypatch.setattr(type(before.policy), "plan_epoch", None)
    after = before.revised(Revision(0, WAN, (1.0,) * 7 + (0.5,)))
    assert after.epoch(0) is whole
    assert after.step(0) != before.step(0)


@given(st.lists(st.floats(0.7, 1.3), min_size=8, max_size=8), st.integers(0, 40))
@examples(5)
def test_a_revision_changes_the_windows_from_its_own_on_alone(speed, first):
    """Each window keeps its samples and its number of steps, whichever steps are asked for."""
    before, cost = plan(), QuadraticCost(0.05, 1.7e-5, 2.0e-9, 1e-3)
    after = before.revised(Revision(first, cost, tuple(speed)))
    again = pickle.loads(pickle.dumps(after))
    index = 0
    assert after.steps_per_epoch == before.steps_per_epoch
    while index < before.end_of_epoch(0):
        steps = before.window(index)
        assert steps.start == index
        assert {before.window(n) for n in steps} == {steps}
        whole = before.epoch(0).only(index, steps.stop)
        window, _ = after.of_step(index)
        if index < first:
            assert all(after.step(n) == before.step(n) for n in steps)
        else:
            assert (times_placed(window) == times_placed(whole)).all()
            assert seconds_of(window, cost, speed) <= seconds_of(whole, cost, speed)
            assert again.step(steps.stop - 1) == after.step(steps.stop - 1)
        index = steps.stop
    assert after.done_before(first)[1].sum() == sum(
        len(part.samples) for n in range(first) for part in after.step(n).micro_batches
    )


def seconds_of(window, cost, speed):
    return step_times(window, cost, np.asarray(speed)).sum()


def test_a_slow_rank_counts_in_the_metrics_of_a_step():
    speed = (1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0)
    slow = plan().revised(Revision(0, WAN, speed))
    found = step_metrics(slow.step(3), slow, WAN)
    window, within = slow.of_step(3)
    assert found.predicted_cost == pytest.approx(seconds_of(window.only(within), WAN, speed))
    terms = np.dot(found.cost_terms, [WAN.c0, WAN.c_sequence, WAN.c1, WAN.c2])
    assert terms == pytest.approx(found.predicted_cost)


@given(st.integers(1, 6), st.lists(st.floats(0.7, 1.3), min_size=1, max_size=6), st.integers(0, 99))
@examples(40)
def test_rows_by_speed_are_all_rows_and_fit_the_fastest_rank(turns, speed, seed):
    """Of rows that cost what ranks do in one time, each rank gets its own."""
    rng, speed = np.random.default_rng(seed), np.array(speed)
    cost = rng.permutation(np.outer(np.linspace(1, 2, turns) ** 8, speed).ravel())
    chosen = by_speed(cost, speed, rng)
    assert sorted(chosen.ravel().tolist()) == list(range(len(cost)))
    spread = cost[chosen] / speed
    if np.ptp(speed) < 0.1:
        assert (spread.max(axis=1) <= 1.2 * spread.min(axis=1)).all()


@given(st.integers(0, 10**6), st.integers(3, 8))
@examples(60)
def test_few_samples_of_two_ranks_are_divided_in_the_best_way(seed, segments):
    """Among all ways that fit, but for those that save less than a thousandth."""
    rng, topology, cost = np.random.default_rng(seed), RankTopology(2), QuadraticCost(0.0, 0.0, 1.0)
    lengths, speed = rng.integers(1, 20, 8).tolist(), rng.uniform(0.7, 1.3, 2)
    policy = FirstFit(-(-sum(lengths) // 2), max_segments=segments)
    before = policy.plan_epoch(of_lengths(*lengths), topology, rng)
    after = place_again(before, policy, topology, cost, speed, rng)
    best = 0.0
    for step in range(after.steps):
        seq_len = after.only(step).part_tokens()
        on_first = np.array([*itertools.product([0, 1], repeat=len(seq_len))])
        on_each = np.stack([on_first, 1 - on_first], axis=1)
        fits = (on_each.sum(axis=2) <= segments) & (on_each @ seq_len <= policy.m_mem)
        times = (on_each @ seq_len**2 / speed).max(axis=1)
        best += times[fits.all(axis=1)].min()
    assert 1 - 1e-9 < seconds_of(after, cost, speed) / best < 1 / 0.999


def test_later_revisions_leave_earlier_windows_as_they_are():
    windows = [plan().window(0)]
    for _ in range(2):
        windows.append(plan().window(windows[-1].stop))
    speeds = [(*[1.0] * 7, speed) for speed in (0.9, 0.7, 0.8)]
    revisions = [Revision(each.start, WAN, s) for each, s in zip(windows, speeds, strict=True)]
    after, asked = plan(), plan()
    for revision in revisions:
        asked = asked.revised(revision)
        for each in windows:  # also those that a later revision changes
            asked.of_step(each.start)
        after = after.revised(revision)
    assert [after.revision(each.start) for each in windows] == revisions
    for each in windows:
        assert asked.step(each.start + 3) == after.step(each.start + 3)


def test_windows_keep_how_often_samples_stand_in_an_epoch(monkeypatch):
    monkeypatch.setattr("alload_jax.planning.plan._ROWS", 0)
    drawn = make_workload("mixed-resolution", 2_000)
    samples = replace(drawn, weight=np.where(np.arange(2_000) % 3 == 0, 2.5, 1.0))
    config = PlanningConfig("balanced", m_mem=81_920)
    whole = make_plan(config, samples, 8, 0, CostFile(quadratic=WAN))
    after = whole.revised(Revision(0, WAN, (*[1.0] * 7, 0.8)))
    index, moved = 0, 0
    while index < whole.end_of_epoch(0):
        steps = whole.window(index)
        before = whole.epoch(0).only(index, steps.stop)
        window, _ = after.of_step(index)
        ours, theirs = (
            sorted(zip(each.sample, each.repetition, strict=True)) for each in (window, before)
        )
        assert ours == theirs
        assert (window.counts == before.counts).all()
        moved += (window.sample != before.sample).any()
        index = steps.stop
    assert moved > 1
