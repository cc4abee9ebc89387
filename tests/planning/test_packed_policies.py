"""Properties of every packed plan on random data, and the balance of `balanced` on workloads."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_cases import WAN, examples, of_lengths, refused

from alload_jax.planning.cost import (
    CostFile,
    PowerCost,
    QuadraticCost,
    computed_costs,
    empty_row_cost,
    marginal_cost,
)
from alload_jax.planning.epoch import RowShape, micro_batch
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import plan_metrics, repeated_neighbours
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies import filling, grouping
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.filling import STRATEGIES
from alload_jax.planning.policies.grouping import EMPTY, SampleBounds, Units, group_into_steps
from alload_jax.planning.policies.packed import (
    MOST_CORRELATION,
    FirstFit,
    Window,
    first_fit_decreasing,
)
from alload_jax.planning.policies.policy import RankTopology, makespan
from alload_jax.planning.policies.splitting import target_load
from alload_jax.planning.policies.windows import place_again, step_times
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload

COSTS = [WAN, PowerCost(0.5), PowerCost(1.0), PowerCost(2.0), QuadraticCost(0, 0, 0)]


def rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


@st.composite
def cases(draw):
    """(samples, policy, topology) of a packed plan that can be made."""
    ranks = draw(st.integers(1, 9))
    divisors = [c for c in range(1, ranks + 1) if ranks % c == 0]
    balanced = draw(st.booleans())
    context = draw(st.sampled_from(divisors)) if balanced else 1
    align = draw(st.sampled_from([1, 1, 4]))
    row = align * draw(st.integers(8, 200))
    kinds = draw(st.lists(st.integers(1, row * context), min_size=1, max_size=8))
    count = draw(st.integers(1, 200))
    lengths = np.random.default_rng(draw(st.integers(0, 99))).choice(kinds, count)
    segments = draw(st.none() | st.integers(1, 40))
    if not balanced:
        policy = FirstFit(row, align, segments, draw(st.integers(1, 4)))
    else:
        cost = draw(st.sampled_from(COSTS))
        policy = Balanced(
            row,
            cost,
            m_comp=draw(st.none() | st.floats(1e-9, 1e9)),
            align=align,
            max_segments=segments,
            look_ahead=draw(st.integers(1, 4)),
            context=context,
            seconds_per_split_token=draw(st.sampled_from([0.0, 1e-5])),
            split_above=draw(st.sampled_from([1.0, 1.0, 2.5, 0.0])),
        )
    topology = RankTopology(ranks, micro_batches_per_step=draw(st.integers(1, 3)))
    return of_lengths(*lengths.tolist()), policy, topology


def places_every_token_of_every_sample_once(plan, samples, **_):
    assert plan.steps
    assert (plan.packing.tokens > 0).all()
    placed = np.bincount(plan.sample, plan.packing.tokens, len(samples))
    assert (placed == samples.seq_len).all()
    whole = plan.sample[~plan.packing.is_split]
    assert len(np.unique(whole)) == len(whole)


def aligns_parts_of_a_row_and_lets_none_overlap(plan, policy, **_):
    assert (plan.padded_len == policy.m_mem).all()
    for row in range(len(plan.rows)):
        parts = plan.parts_of(row)
        begin, tokens = plan.packing.offset[parts], plan.packing.tokens[parts]
        is_split, region = plan.packing.is_split[parts], plan.packing.split_tokens[row]
        assert (begin[1:] >= (begin + tokens)[:-1]).all()
        assert ((begin + tokens)[is_split] <= region).all()
        assert (begin[~is_split] >= region).all()
        assert ((begin + tokens) <= policy.m_mem).all()
        assert (begin[~is_split] % policy.align == 0).all()


def keeps_micro_batches_in_order_and_leaves_no_step_empty(plan, topology, **_):
    turn = plan.step * topology.micro_batches_per_step + plan.micro_batch
    held = np.bincount(turn[plan.micro_batch_of_part()], minlength=turn.max() + 1)
    assert (held > 0).all()
    place = np.column_stack([plan.step, plan.micro_batch, plan.rank])
    assert (np.unique(place, axis=0) == place).all()
    assert plan.steps == plan.step[-1] + 1
    assert plan.micro_batch.max() < topology.micro_batches_per_step


def splits_a_sample_into_one_run_of_tokens_over_the_ranks_of_its_group(plan, topology, **_):
    packing = plan.packing
    by_turn = packing.split_tokens.reshape(-1, topology.ranks)
    assert (by_turn == by_turn[:, :1]).all()
    assert len(np.unique(by_turn)) <= 5
    owner = plan.micro_batch_of_part()
    split_place = (
        owner % topology.ranks % packing.context * packing.split_tokens[owner] + packing.offset
    )
    for sample in np.unique(plan.sample[packing.is_split]):
        parts = np.flatnonzero((plan.sample == sample) & packing.is_split)
        assert len(np.unique(owner[parts] // packing.context)) == 1
        order = parts[np.argsort(split_place[parts])]
        assert (split_place[order][1:] == (split_place + packing.tokens)[order][:-1]).all()
        whole = int(split_place[order[0]]), int(plan.seq_len[sample])
        for row in owner[parts].tolist():
            laid = micro_batch(plan, row).row_plan
            assert laid.split_segments[laid.split_samples.index(sample)] == whole


def holds_no_more_samples_in_rows_and_regions_than_allowed(plan, policy, **_):
    if policy.max_segments is None:
        return
    owner, is_split = plan.micro_batch_of_part(), plan.packing.is_split
    assert np.bincount(owner[~is_split], minlength=1).max() <= policy.max_segments
    group = owner[is_split] // plan.packing.context
    held = np.unique(np.column_stack([group, plan.sample[is_split]]), axis=0)[:, 0]
    all_split = isinstance(policy, Balanced) and not policy.split_above
    most = policy.max_segments * (policy.context if all_split else 1)
    assert not len(held) or np.bincount(held).max() <= most


def keeps_rows_of_several_samples_within_m_comp(plan, samples, policy, **_):
    if not isinstance(policy, Balanced) or policy.m_comp is None:
        return
    cost = computed_costs(plan, policy.cost)
    weighs = marginal_cost(policy.cost, samples.seq_len)[plan.sample] > 0
    several = np.bincount(plan.micro_batch_of_part()[weighs], minlength=len(cost)) > 1
    empty = empty_row_cost(policy.cost, plan.padded_len, plan.slots())
    assert (cost <= np.maximum(policy.m_comp, empty) * (1 + 1e-9))[several].all()


def is_no_faster_than_its_bound(plan, samples, policy, **_):
    found = plan_metrics(plan, getattr(policy, "cost", WAN), policy.m_mem)
    assert found.excess >= -1e-9
    assert found.excess_max >= found.excess - 1e-9


# Samples that no row and no region has room for: this plan grew without limit.
@example((of_lengths(1000, 1007), Balanced(1024, WAN, align=128, context=2), RankTopology(2)), 0)
@given(cases(), st.integers(0, 9))
@examples(100)
def test_every_packed_plan_keeps_its_promises_and_depends_on_its_seed_alone(case, seed):
    samples, policy, topology = case
    plans = [policy.plan_epoch(samples, topology, rng(seed + epoch)) for epoch in range(2)]
    if isinstance(policy, Balanced):  # and if its ranks are found to be of unlike speed
        speed = rng(seed).uniform(0.7, 1.3, topology.ranks)
        again = [place_again(plans[0], policy, topology, WAN, speed, rng()) for _ in range(2)]
        plans.insert(0, again[0])
        assert (again[0].sample == again[1].sample).all()
        assert (again[0].packing.offset == again[1].packing.offset).all()
        times = [step_times(plan, WAN, speed).sum() for plan in plans[:2]]
        assert len(again[0].rows) == len(plans[1].rows)
        assert again[0] is plans[1] or times[0] < times[1]
    for plan in plans:
        for promise in (
            places_every_token_of_every_sample_once,
            aligns_parts_of_a_row_and_lets_none_overlap,
            keeps_micro_batches_in_order_and_leaves_no_step_empty,
            splits_a_sample_into_one_run_of_tokens_over_the_ranks_of_its_group,
            holds_no_more_samples_in_rows_and_regions_than_allowed,
            keeps_rows_of_several_samples_within_m_comp,
            is_no_faster_than_its_bound,
        ):
            promise(plan, samples=samples, policy=policy, topology=topology)
    again = policy.plan_epoch(samples, topology, rng(seed + 1))
    for name in ("step", "micro_batch", "rank", "offsets", "sample"):
        assert (getattr(plan, name) == getattr(again, name)).all()
    assert (plan.packing.offset == again.packing.offset).all()


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=40), st.integers(1, 12))
@examples(50)
def test_the_target_load_is_what_oversized_samples_leave_for_the_other_bins(weights, bins):
    weights = np.sort(np.array(weights))[::-1]
    target = target_load(weights, bins)
    oversized = [w for w in weights if w > target * (1 + 1e-9)][: bins - 1]
    rest = sum(weights) - sum(oversized)
    assert target == pytest.approx(rest / (bins - len(oversized)))


@given(
    st.lists(st.floats(0.1, 10), min_size=0, max_size=40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
)
@examples(50)
def test_steps_hold_each_unit_once_and_all_where_they_must(costs, place_all, bounded, size):
    cost = np.array(costs)
    units = Units(cost, cost, np.ones(len(cost), int))
    bounds = SampleBounds(size / 2, size, 2 * size) if bounded else None
    steps = group_into_steps(units, size, bounds, place_all)
    placed = steps[steps != EMPTY]
    assert len(np.unique(placed)) == len(placed)
    if place_all:
        assert len(placed) == len(cost)
        assert len(steps) == -(-len(cost) // size)
    for step in steps:
        members = step[step != EMPTY]
        assert len(members)
        if not place_all:
            assert len(members) == size
            assert cost[members].max() <= 1.01 * cost[members].mean() * (1 + 1e-12)


@given(st.integers(0, 99), st.integers(2, 8), st.floats(1.2, 4))
@examples(40)
def test_samples_of_a_step_stay_within_bounds(seed, size, spread):
    """Costly units hold few samples, as rows of a long video do."""
    random = rng(seed)
    samples = np.r_[random.integers(1, 4, 40), random.integers(20, 60, 120)]
    cost = np.r_[np.full(40, 9.0), np.ones(120)] + random.random(160) * 1e-3
    mean = samples.mean() * size
    bounds = SampleBounds(mean / spread, mean, mean * spread)
    steps = group_into_steps(Units(cost, cost, samples), size, bounds)
    assert len(steps)
    held = samples[steps].sum(axis=1)
    assert (held >= bounds.least).all()
    assert (held <= bounds.most).all()


COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(COUNTS, COUNTS, st.integers(0, 40))
@examples(50)
def test_the_fewest_units_are_replaced_that_lift_a_step_but_for_its_first(few, others, least):
    samples = np.array(few + others)
    units = Units(np.ones(len(samples)), np.ones(len(samples)), samples)
    step, rest = np.split(np.arange(len(samples)), [len(few)])
    taken = grouping._to_replace(step, rest, units, least)
    dense = sorted(others, reverse=True)
    most = min(len(few) - 1, len(others))
    held = {n: sum(few[: len(few) - n]) + sum(dense[:n]) for n in range(1, most + 1)}
    enough = [n for n, total in held.items() if total >= least]
    assert (taken is None) == (not enough)
    if enough:
        assert sorted(np.array(others)[taken], reverse=True) == dense[: enough[0]]


def test_units_that_cost_more_than_the_mean_or_hold_samples_out_of_bounds_wait():
    for cost, samples, size, placed in (
        ([1.0, 1.0203], [1, 1], 2, []),  # by more than 1 % of the mean
        ([1.0, 1.0201], [1, 1], 2, [0, 1]),
        ([9.0, 1.0, 1.0, 1.0, 1.0], [1] * 5, 2, [1, 2, 3, 4]),
        ([1.0] * 6, [3, 0, 1, 0, 2, 0], 3, [0, 2, 4]),  # those with samples
    ):
        units = Units(np.array(cost), np.array(cost), np.array(samples))
        assert sorted(group_into_steps(units, size).ravel()) == placed
    bounds = SampleBounds(least=6, mean=8, most=10)
    assert bounds.eased(2) == SampleBounds(least=3, mean=8, most=20)
    for samples in (2, 6):  # of each of two units: 4 or 12 a step
        units = Units(np.ones(2), np.ones(2), np.full(2, samples))
        assert not len(group_into_steps(units, 2, bounds))
        assert len(group_into_steps(units, 2, bounds.eased(2))) == 1


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 90), st.integers(1, 9)
)
@examples(50)
def test_first_fit_is_that_of_the_textbook(lengths, tokens, segments):
    footprint = np.sort(np.array(lengths))[::-1]
    row, rows = first_fit_decreasing(footprint, RowShape(tokens, segments))
    expected = []
    for length in footprint.tolist():
        for held in expected:
            if sum(held) + length <= tokens and len(held) < segments:
                held.append(length)
                break
        else:
            expected.append([length])
    assert [footprint[row == k].tolist() for k in range(rows)] == expected


# ----------------------------------------------------------------------------- how good it is


def plan_of(samples, ranks, m_mem, **fields):
    config = PlanningConfig("balanced", m_mem=m_mem, **fields)
    return make_plan(config, samples, ranks, 0, CostFile(quadratic=WAN))


def planned(lengths, ranks, m_mem, **fields):
    return plan_of(of_lengths(*lengths), ranks, m_mem, **fields)


@pytest.mark.parametrize(
    ("name", "row", "size", "ranks"),
    [
        ("mixed-resolution", 81_920, 20_000, 32),
        ("long-video-V35", 350_000, 2000, 8),
        ("log-normal", 350_000, 2000, 8),
    ],
)
def test_balanced_is_near_its_bound_and_full_and_mixes_every_epoch_anew(name, row, size, ranks):
    if name == "log-normal":
        lengths = np.random.default_rng(1).lognormal(9.5, 1, size).clip(16, row).astype(int)
        samples = of_lengths(*lengths.tolist())
    else:
        samples = make_workload(name, size)
    plan = plan_of(samples, ranks, row)
    epochs, neighbours = [plan.epoch(number) for number in range(4 if size < 9999 else 3)], []
    for epoch, after in itertools.pairwise(epochs):
        neighbours.append(repeated_neighbours(epoch, after))
        if size < 9999:  # an epoch of so few steps idles more
            continue
        found = plan_metrics(epoch, WAN, row)
        assert found.idle < 0.01
        assert found.padding < 0.02
        assert abs(found.order_correlation) <= MOST_CORRELATION
        assert found.step_samples_min > 1 / 2.5 / 1.05
        assert found.step_samples_max < 2.5 * 1.05
    # Few pairs meet again, some twenty in two epochs: the sum varies less. Hardly any length
    # occurs twice in the last set, so that its rows vary less.
    most = 8 if name == "log-normal" else 2.5
    assert sum(each.share for each in neighbours) < most * sum(each.random for each in neighbours)


def test_an_epochs_end_idles_no_rank_but_for_samples_that_no_rank_can_share():
    """Steps of 64 ranks are few in an epoch, whose last ones hold what remains."""
    samples = make_workload("long-video-V60", 30_000)
    plan = plan_of(samples, 64, 350_000)
    epochs = [plan.epoch(number) for number in range(3)]
    found = [plan_metrics(epoch, WAN, 350_000).excess for epoch in epochs]
    assert np.mean(found) < 0.03


def efficiency(plan, epochs=3):
    """Work of the samples over the ranks' time."""
    seq_len, ranks = plan.samples.seq_len, plan.topology.ranks
    work = WAN.sequence_cost(seq_len)
    found = [plan.epoch(number) for number in range(epochs)]
    placed = sum(float(work[epoch.sample].sum()) for epoch in found)
    return placed / ranks / sum(makespan(epoch, WAN) for epoch in found)


@pytest.mark.parametrize(
    ("name", "m_mem", "spread"),
    [
        ("wan-480p", 66_816, None),
        ("mixed-resolution", 81_920, 2.5),
        ("long-video-V45", 350_000, 2.5),
    ],
)
def test_the_window_takes_the_fastest_of_its_ways_to_fill_rows(name, m_mem, spread, monkeypatch):
    samples, topology = make_workload(name, 12_000), RankTopology(8)
    policy = Balanced(m_mem, WAN, sample_spread=spread)
    together = efficiency(Plan(samples, policy, topology, seed=0))
    for strategy in STRATEGIES:
        monkeypatch.setattr(filling, "STRATEGIES", (strategy,))
        assert together >= 0.998 * efficiency(Plan(samples, policy, topology, seed=0))


def test_a_way_to_fill_rows_is_tried_again_some_windows_after_it_was_slower():
    """First-fit fills rows of short samples badly, and those of long ones best."""
    lengths = -np.sort(-rng().integers([[16], [1600]], [[400], [4900]], (2, 4000)))
    policy, topology = Balanced(8192, WAN, sample_spread=None), RankTopology(8)
    planner = policy.window_planner(of_lengths(*lengths.ravel().tolist()), topology, rng())
    held = []
    for kind in (0, *[1] * 8):
        window = Window(np.arange(4000) + 4000 * kind, lengths[kind], False, 1.0)
        steps, _ = planner.place(window)
        held.append(steps.tokens.sum() / len(steps.split_tokens))
    assert held[8] > 1.05 * held[1]


@pytest.mark.parametrize(
    ("lengths", "ranks", "m_mem", "padding"),
    [([32_760] * 400, 8, 60_000, 0.01), ([256] * 9500 + [75_600] * 500, 16, 75_600, 0.03)],
)
def test_rows_are_as_long_and_have_as_many_slots_as_saves_padding(lengths, ranks, m_mem, padding):
    shuffled = np.random.default_rng(0).permutation(lengths).tolist()
    plan = planned(shuffled, ranks, m_mem, sample_spread=None)
    assert m_mem == 75_600 or plan.policy.row_tokens == 32_768  # room for one, in whole units
    assert plan_metrics(plan.epoch(0), WAN, m_mem).padding < padding


@given(st.lists(st.integers(16, 9000), min_size=1, max_size=40), st.integers(9000, 50_000))
@examples(25)
def test_rows_divide_into_windows_where_the_longest_leaves_room(lengths, m_mem):
    """Odd rows cost matrix products a copy of their operands, and attention long windows."""
    tokens = planned(lengths, 2, m_mem).policy.row_tokens
    assert max(lengths) <= tokens <= m_mem
    unit = 2 ** int(np.log2(max(1, tokens / 256)))
    assert tokens % unit == 0 or tokens == m_mem or -(-max(lengths) // unit) * unit > m_mem


@pytest.mark.parametrize(
    ("lengths", "m_mem"),
    [([667] * 60 + [1400] * 2, 2001), ([32_760] * 40 + [1560] * 10 + [60_000], 65_520)],
)
def test_rows_are_as_long_as_m_mem_where_that_just_holds_several_samples(lengths, m_mem):
    """In the nearest whole units there is room for one sample less."""
    assert planned(lengths, 2, m_mem).policy.row_tokens == m_mem


def test_splitting_brings_a_step_with_one_long_video_near_the_mean():
    samples = of_lengths(*[50_000, *[500] * 700] * 20)
    policies = Balanced(60_000, WAN), Balanced(60_000, WAN, context=8)
    plans = [policy.plan_epoch(samples, RankTopology(8), rng()) for policy in policies]
    whole, split = (plan_metrics(plan, WAN, 60_000).imbalance for plan in plans)
    assert plans[1].packing.is_split.any()
    assert split < min(0.01, whole)


def test_rows_that_hold_no_sample_or_fit_no_ranks_are_refused_with_a_remedy():
    for policy, named in (
        (FirstFit(99), ["first_fit", "m_mem is 99 tokens", "1 (100 tokens)", "at least 300"]),
        (Balanced(99, WAN), ["balanced", "3 (300 tokens)", "at least 300", "to at least 4"]),
        (Balanced(99, WAN, context=2), ["2 ranks hold 198", "at least 150", "to at least 4"]),
        (Balanced(99, WAN, context=3), ["planning.context is 3", "4 ranks"]),
        (Balanced(400, WAN, row_tokens=99), ["row_tokens is 99 tokens", "row_tokens to at least"]),
        (FirstFit(100, align=64), ["planning.align is 64", "m_mem to 64"]),
        (FirstFit(100, align=101), ["planning.align is 101, more than m_mem = 100"]),
    ):
        samples = of_lengths(50, 100, 99, 300)
        refused(named, policy.plan_epoch, samples, RankTopology(4), rng())
        for remedy in (FirstFit(300), Balanced(300, WAN), Balanced(99, WAN, context=4)):
            plan = remedy.plan_epoch(samples, RankTopology(4), rng())
            assert set(plan.sample) == {0, 1, 2, 3}


def test_bounds_and_splitting_take_no_more_steps_than_they_must():
    samples = of_lengths(*rng().integers(1, 3000, 3000).tolist())
    for bound in ({"max_segments": 1}, {"m_comp": 1e-9}):  # rows are nearly empty
        plan = Balanced(40_000, WAN, **bound).plan_epoch(samples, RankTopology(8), rng())
        assert plan.steps < 1.2 * 3000 / 8
    samples = of_lengths(*np.exp(rng().normal(6, 1.2, 3000)).astype(int).clip(1, 9000).tolist())
    policies = [Balanced(9000, WAN, context=context) for context in (1, 8, 64)]
    steps = [policy.plan_epoch(samples, RankTopology(64), rng()).steps for policy in policies]
    assert max(steps) <= steps[0] + 1


def test_a_window_is_not_deferred_whole_because_some_steps_hold_too_many_samples():
    """Rows of three long videos each: steps were all refused, and first-fit rows idled 15 %."""
    samples = make_workload("long-video-V60", 100_000)
    policy = Balanced(1_050_000, WAN, max_segments=500)
    plan = Plan(samples, policy, RankTopology(16), seed=0)
    assert plan_metrics(plan.epoch(0), WAN, 1_050_000).idle < 0.02
