"""Promises of every plan, its identity, and plans of weighted samples."""

import pickle
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import Phase, assume, example, given
from hypothesis import strategies as st
from planning_cases import MODES, cases, examples, manifests, of_lengths, of_shapes, refused

from alload_jax.planning.cost import PowerCost, QuadraticCost
from alload_jax.planning.epoch import Repeats, noise_epoch
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import plan_metrics, programs_of
from alload_jax.planning.plan import Beginning, Plan, Revision, current_identity
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.bucketed import DualConstraint, EqualTokens, Fixed, Sorted
from alload_jax.planning.policies.packed import FirstFit
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload

SHAPES = ((1, 16, 32), (1, 16, 32), (17, 16, 16), (1, 16, 32), (17, 16, 16))


def plan_of(case):
    manifest, config, seed = case
    return make_plan(config, manifest.samples(), 1, seed)


def planned(samples, mesh=1, seed=0, **settings):
    return make_plan(PlanningConfig(**settings), samples, mesh, seed)


def steps_of(plan, epoch=0):
    first = epoch * plan.steps_per_epoch
    return [plan.step(index) for index in range(first, first + plan.steps_per_epoch)]


def parts_of(steps):
    return [part for step in steps for part in step.micro_batches]


def placed_by_step(plan, epoch=0):
    steps = steps_of(plan, epoch)
    return [sorted(s for part in step.micro_batches for s in part.samples) for step in steps]


def by_place(step, name):
    """The parts of every micro-batch index or rank of a step."""
    places = defaultdict(list)
    for part in step.micro_batches:
        places[getattr(part, name)].append(part)
    return places


# ------------------------------------------------------------------------------ every plan


def fits_memory_and_keeps_buckets_apart(parts, manifest, config):
    lengths, shapes = manifest.lengths(), manifest.shapes()
    for part in parts:
        assert len(part.samples) <= part.rows
        assert config.m_mem is None or part.rows * part.seq_len <= config.m_mem
        assert all(lengths[sample] <= part.seq_len for sample in part.samples)
        if any(part.shape):
            assert {shapes[sample] for sample in part.samples} <= {part.shape}
            assert {lengths[sample] for sample in part.samples} <= {part.seq_len}


def has_as_few_rows_and_steps_as_its_buckets_and_ranks_allow(plan, parts, config):
    shared = config.ranks if config.ranks_mode == "synchronous" else 1
    held, rows = Counter(), {}
    for part in parts:
        held[part.seq_len, part.shape] += len(part.samples)
        rows[part.seq_len, part.shape] = part.rows
    for part in parts:
        assert part.rows <= -(-held[part.seq_len, part.shape] // plan.topology.ranks_per_bucket)
    groups = sum(-(-size // (rows[bucket] * shared)) for bucket, size in held.items())
    turns = groups if shared > 1 else -(-groups // config.ranks)
    assert plan.steps_per_epoch == -(-turns // config.micro_batches_per_step)


def orders_and_fills_its_steps(steps, config):
    for step in steps:
        places = [(part.index, part.rank) for part in step.micro_batches]
        assert places == sorted(set(places))
        held = by_place(step, "rank")
        assert held.keys() <= set(range(config.ranks))
        for parts in held.values():
            assert [part.index for part in parts] == list(range(len(parts)))
            assert len(parts) <= config.micro_batches_per_step
    full = config.ranks * config.micro_batches_per_step
    assert all(len(step.micro_batches) == full for step in steps[:-1])
    assert 0 < len(steps[-1].micro_batches) <= full


def keeps_ranks_synchronous_or_none_idle(steps, config):
    for step in steps:
        if config.ranks_mode == "independent":
            assert all(part.samples for part in step.micro_batches)
            continue
        for parts in by_place(step, "index").values():
            assert [part.rank for part in parts] == list(range(config.ranks))
            assert len({(part.rows, part.seq_len, part.shape) for part in parts}) == 1
            counts = [len(part.samples) for part in parts]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) >= 1


@given(cases())
@examples(80)
def test_every_plan_keeps_its_promises(case):
    manifest, config, _ = case
    plan = plan_of(case)
    for epoch in range(2):
        steps = steps_of(plan, epoch)
        parts = parts_of(steps)
        placed = Counter(sample for part in parts for sample in part.samples)
        assert placed == Counter(range(len(plan.samples)))
        assert {step.epoch for step in steps} == {epoch}
        assert steps[0].index == epoch * plan.steps_per_epoch
        fits_memory_and_keeps_buckets_apart(parts, manifest, config)
        has_as_few_rows_and_steps_as_its_buckets_and_ranks_allow(plan, parts, config)
        orders_and_fills_its_steps(steps, config)
        keeps_ranks_synchronous_or_none_idle(steps, config)


@given(cases(), st.lists(st.integers(0, 500) | st.just(10**12), min_size=1, max_size=4))
@examples(30)
def test_a_step_is_a_pure_function_of_its_index(case, indices):
    used, fresh = plan_of(case), plan_of(case)
    steps = {index: used.step(index) for index in sorted(indices)}
    copy = deepcopy(used)  # travels by __reduce__, as to a worker
    for index in indices:
        assert fresh.step(index) == copy.step(index) == steps[index]
        assert steps[index].index == index
        assert steps[index].epoch == index // used.steps_per_epoch
    # Where a plan was looked at is no part of it.
    assert used.identity() == fresh.identity()
    assert used.fingerprint() == fresh.fingerprint() == copy.fingerprint()


def test_epochs_and_seeds_differ_in_order_which_mixes_buckets_and_samples():
    samples = of_lengths(*[1] * 500, *[2] * 500)
    plan, other = (planned(samples, seed=seed, policy="fixed", rows=1) for seed in (3, 4))
    epochs = [plan.epoch(0), plan.epoch(1), plan.epoch(2), other.epoch(0), other.epoch(1)]
    assert len({tuple(epoch.sample.tolist()) for epoch in epochs}) == len(epochs)
    for epoch in epochs:
        assert 150 < (epoch.sample[:500] < 500).sum() < 350
        positions = np.argsort(epoch.sample)
        assert abs(np.corrcoef(positions[:500], np.arange(500))[0, 1]) < 0.2


@given(manifests(), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
@examples(15)
def test_synchronous_steps_hold_the_same_samples_on_few_ranks_as_on_many(
    manifest, ranks, rows, micro_batches, seed
):
    samples = manifest.samples()
    many = RankTopology(ranks, "synchronous", micro_batches)
    one = RankTopology(1, "synchronous", micro_batches)
    spread = Plan(samples, Fixed(rows), many, seed)
    alone = Plan(samples, Fixed(rows * ranks), one, seed)
    for epoch in range(2):
        assert placed_by_step(spread, epoch) == placed_by_step(alone, epoch)


def test_ranks_of_a_shape_group_share_rows_and_shape_and_are_idle_together():
    samples = of_shapes(*SHAPES * 7)
    settings = {"policy": "fixed", "ranks_mode": "independent", "rows": 2, "ranks": 6}
    for group_ranks in (1, 2, 6):
        plan = planned(samples, **settings, ranks_per_group=group_ranks)
        assert (plan.group_ranks, plan.shape_groups) == (group_ranks, 6 // group_ranks)
        for step in steps_of(plan):
            for group in range(plan.shape_groups):
                parts = [p for p in step.micro_batches if p.rank // group_ranks == group]
                assert len(parts) in (0, group_ranks)
                assert len({(part.rows, part.shape) for part in parts}) <= 1
        placed = sorted(s for step in placed_by_step(plan) for s in step)
        assert placed == list(range(len(samples)))
    # They count where ranks are independent alone.
    for options in ({"policy": "fixed", "rows": 1}, {"policy": "balanced", "m_mem": 10_000}):
        plain, grouped = (
            planned(samples, **options, ranks=4, ranks_per_group=n) for n in (None, 2)
        )
        assert grouped.identity() == plain.identity()
        assert (grouped.group_ranks, grouped.shape_groups) == (4, 1)


@pytest.mark.parametrize("policy", ["balanced", "first_fit", "equal_tokens"])
def test_an_epoch_begins_at_its_first_step(policy):
    plan = planned(make_workload("mixed-resolution", 300), 2, policy=policy, m_mem=90_000)
    firsts = [plan.first_step(epoch) for epoch in (3, 0, 1, 2)]
    assert [plan.locate(first) for first in firsts] == [(3, 0), (0, 0), (1, 0), (2, 0)]
    assert firsts[1] == 0
    assert firsts[0] == sum(plan.epoch(epoch).steps for epoch in range(3))
    assert plan.end_of_epoch(firsts[2]) == plan.end_of_epoch(firsts[3] - 1) == firsts[3]


# ------------------------------------------------------------------------------ identity


def test_identity_and_fingerprint_depend_on_everything_that_determines_the_steps():
    base = {"policy": "dual_constraint", "m_mem": 100, "ranks": 2}
    fixed = {"policy": "fixed"}
    by_name = {"1x16x32": 2, "17x16x16": 1}, {"1x16x32": 1, "17x16x16": 2}
    changes = [
        *({}, {"m_mem": 101}, {"m_comp": 1000.0}, {"p": 1.5}, {"policy": "equal_tokens"}),
        *(fixed | {"rows": rows} for rows in (1, 2, *by_name)),
        *({"ranks": 3}, {"micro_batches_per_step": 2}, {"ranks_mode": "independent"}),
        {"ranks_mode": "independent", "ranks_per_group": 2},
    ]
    samples = of_shapes(*SHAPES)
    plans = [planned(samples, **base | change) for change in changes]
    others = [of_shapes(*SHAPES, SHAPES[0]), of_shapes(*reversed(SHAPES))]
    others += [of_shapes((1, n, 512 // n), *SHAPES[1:]) for n in (32, 8)]  # of equal length, or not
    others.append(of_lengths(*samples.seq_len.tolist()))
    plans += [planned(samples, 1, 1, **base), *(planned(each, 1, 0, **base) for each in others)]
    # Seeds count even where the first epochs are equal.
    plans += [planned(of_lengths(5, 5), 1, n, policy="equal_tokens", m_mem=10) for n in range(9)]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)
    identities = [plan.identity() for plan in plans]
    assert all(identities.count(identity) == 1 for identity in identities)


def test_settings_that_give_equal_steps_give_equal_fingerprints():
    equal_tokens = {"policy": "equal_tokens"}
    for one, other, meshes in (
        (equal_tokens | {"p": 1.5}, equal_tokens, (2, 2)),
        *(({}, {"ranks": 3}, (3, 8)), ({"p": 2}, {"p": 2.0}, (2, 2))),
    ):
        base, samples = {"policy": "dual_constraint", "m_mem": 100}, of_lengths(10, 20, 10)
        one, other = (
            planned(samples, mesh, **base | each)
            for mesh, each in zip(meshes, (one, other), strict=True)
        )
        assert one.fingerprint() == other.fingerprint()
        assert one.identity() == other.identity()


def test_an_identity_from_before_fields_were_added_or_renamed_is_still_that_of_the_plan():
    settings = {"policy": "balanced", "m_mem": 100, "ranks": 2, "context": 2}
    plan = planned(of_lengths(10, 20, 10), **settings)
    identity = plan.identity()
    assert not identity.keys() & {"split_above", "ranks_per_group", "refitted"}
    assert identity["samples"] == "096411646966e86a"
    other = planned(of_lengths(10, 20, 10), **settings, split_above=0.5)
    assert other.identity()["split_above"] == 0.5
    assert identity["seconds_per_split_token"] == 0.0
    old = {k: v for k, v in identity.items() if k != "seconds_per_split_token"}
    assert current_identity(old | {"anchor_seconds": 0.0}) == identity
    assert current_identity(old | {"anchor_seconds": 1e-6}) != identity
    assert current_identity(identity) == identity


def test_recalibration_changes_epochs_from_one_on_alone():
    settings = {"policy": "balanced", "m_mem": 8000, "ranks": 2}
    plan = planned(of_lengths(*range(100, 4000, 37)), **settings)
    costs = [QuadraticCost(0.0, 1.0, 0.0), QuadraticCost(0.0, 0.0, 1.0)]
    later = plan.recalibrated(3, costs[1])
    both = later.recalibrated(2, costs[0])
    assert [later.cost_model(n) for n in range(2, 5)] == [None, costs[1], costs[1]]
    assert [both.cost_model(n) for n in range(1, 4)] == [None, costs[0], costs[0]]
    # One after another: the last one counts, and one of the same epoch replaces it.
    two = plan.recalibrated(1, costs[0]).recalibrated(3, costs[1]).recalibrated(3, costs[0])
    two = two.recalibrated(4, costs[1])
    assert [two.cost_model(n) for n in range(5)] == [None, costs[0], costs[0], costs[0], costs[1]]
    assert [each.epoch for each in two.recalibrations] == [1, 3, 4]
    assert both.epoch(1).sample.tolist() == plan.epoch(1).sample.tolist()
    assert both.first_step(2) == plan.first_step(2)
    policy = plan.policy.recalibrated(costs[0])
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 2])))
    alone = policy.plan_epoch(plan.samples, plan.topology, rng)
    assert both.epoch(2).sample.tolist() == alone.sample.tolist()
    assert both.identity() == plan.identity()


EPOCHS = 4
WEIGHTS = st.sampled_from([0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 2.75]) | st.integers(1, 4000).map(
    lambda thousandths: thousandths / 1000
)
COSTS = [QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4), PowerCost(2.0)]


def weighted(lengths, weights):
    return replace(of_lengths(*lengths), weight=np.array(weights, float))


@st.composite
def plans(draw):
    """A plan of weighted samples by any policy."""
    ranks = draw(st.integers(1, 6))
    row = draw(st.integers(8, 100))
    context = draw(st.sampled_from([c for c in range(1, ranks + 1) if ranks % c == 0]))
    cost = draw(st.sampled_from(COSTS))
    policies = [Fixed(3), EqualTokens(row), DualConstraint(row, float(row) ** 2, 2.0)]
    policies += [Sorted(row, cost), FirstFit(row, look_ahead=2), Balanced(row, cost, look_ahead=2)]
    policies.append(replace(policies[-1], max_segments=8, context=context))
    policy = draw(st.sampled_from(policies))
    longest = row * getattr(policy, "context", 1)
    kinds = draw(st.lists(st.integers(1, longest), min_size=1, max_size=6))
    picked = np.random.default_rng(draw(st.integers(0, 99)))
    count = draw(st.integers(1, 60))
    weights = draw(st.lists(WEIGHTS, min_size=1, max_size=3))
    samples = weighted(
        [kinds[0], *picked.choice(kinds, count)], [1.0, *picked.choice(weights, count)]
    )
    mode = "synchronous" if policy.packed else draw(st.sampled_from(MODES))
    topology = RankTopology(ranks, mode, draw(st.integers(1, 2)))
    return Plan(samples, policy, topology, draw(st.integers(0, 99)))


def times_of(plan, epochs):
    """(sample, epoch, repetition) → tokens that the steps of the first epochs hold."""
    found, index = defaultdict(list), 0
    while (step := plan.step(index)).epoch < epochs:
        for part in step.micro_batches:
            lengths = plan.samples.seq_len[list(part.samples)].tolist()
            first = [0] * len(lengths)
            if row := part.row_plan:
                lengths, first = row.tokens, row.first
                for sample, (_, tokens) in zip(row.split_samples, row.split_segments, strict=True):
                    assert tokens == plan.samples.seq_len[sample]
            columns = (part.samples, part.repetitions, first, lengths)
            for sample, repetition, begin, tokens in zip(*columns, strict=True):
                found[sample, step.epoch, repetition].append((step.index, begin, tokens))
        index += 1
    return found


def stands_as_often_as_its_weight_says(plan, placed):
    for sample, weight in enumerate(plan.samples.weight.tolist()):
        exact = Fraction(round(weight * 10**6), 10**6)
        counts = []
        for epoch in range(EPOCHS):
            numbers = [n for (s, e, n) in placed if (s, e) == (sample, epoch)]
            assert sorted(numbers) == list(range(len(numbers)))
            counts.append(len(numbers))
        for first in range(EPOCHS):
            for end in range(first + 1, EPOCHS + 1):
                some = sum(counts[first:end])
                assert floor((end - first) * exact) <= some <= ceil((end - first) * exact)


def is_whole_each_time_and_in_one_step(plan, placed):
    for (sample, _, _), parts in placed.items():
        assert len({step for step, _, _ in parts}) == 1
        at = 0
        for _, begin, tokens in sorted(parts):
            assert begin == at
            at += tokens
        assert at == plan.samples.seq_len[sample]


def has_shapes_that_are_known_from_the_start(plan, epochs):
    """Of packed rows too: what is compiled is the same in every epoch."""
    if plan.policy.packed:
        names = ("capacity", "segments", "split_sizes", "region_segments", "longest_whole")
        packings = [epoch.packing for epoch in epochs]
        assert len({tuple(getattr(packing, name) for name in names) for packing in packings}) == 1
        for epoch, packing in zip(epochs, packings, strict=True):
            assert (sizes := set(packing.split_tokens.tolist())) <= set(packing.split_sizes)
            assert programs_of(epoch) == len(sizes)
            assert packing.tokens[~packing.is_split].max(initial=0) <= packing.longest_whole
        return
    known = set(zip(*(column.tolist() for column in plan.bucket_shapes()[:2]), strict=True))
    for epoch in epochs:
        assert set(zip(epoch.rows.tolist(), epoch.padded_len.tolist(), strict=True)) <= known


_TWICE = weighted([36, 17, 10], [1, 1, 2]), Balanced(36, COSTS[0], max_segments=8, context=2)


# The last sample is split once, and whole once beside its first part: that was torn.
@example(Plan(*_TWICE, RankTopology(4), seed=0), 0)
@given(plans(), st.integers(0, 60))
@examples(30, phases=(Phase.explicit, Phase.generate))  # to shrink plans takes minutes
def test_every_plan_of_weighted_samples_keeps_its_promises(plan, index):
    alone = Plan(plan.samples, plan.policy, plan.topology, plan.seed).step(index)
    placed = times_of(plan, EPOCHS)
    assert plan.step(index) == alone
    assert plan.locate(index)[0] == alone.epoch
    assert pickle.loads(pickle.dumps(plan)).step(index) == alone
    stands_as_often_as_its_weight_says(plan, placed)
    is_whole_each_time_and_in_one_step(plan, placed)
    epochs = [plan.epoch(number) for number in range(EPOCHS)]
    has_shapes_that_are_known_from_the_start(plan, epochs)
    for epoch in epochs:
        found = plan_metrics(epoch, COSTS[0], None)
        assert (found.dropped, found.duplicated) == (0, 0)
        assert found.longest_weight == pytest.approx(1)
    fewer = replace(epoch, counts=epoch.counts + 1)
    assert plan_metrics(fewer, COSTS[0], None).dropped == len(plan.samples)


# Of two samples the one that is left is the one that was taken.
@example(Plan(weighted([20, 20], [1, 1]), EqualTokens(20), RankTopology(1), 0), False, 1, 4, 0)
@given(plans(), st.booleans(), st.integers(0, 40), st.integers(0, 99), st.integers(0, 9))
@examples(30)
def test_other_samples_join_the_rest_of_an_epoch(old, has_weights, index, seed, new):
    """Of those that stay, each stands in the epoch as often as ever, with noise of its own."""
    assume(old.samples.weight.sum() < 300)
    if not has_weights:
        samples = replace(old.samples, weight=None)
        old = Plan(samples, old.policy, old.topology, old.seed)
    rng = np.random.default_rng(seed)
    kept = np.r_[0, 1 + np.flatnonzero(rng.random(len(old.samples) - 1) < 0.7)]  # 0 has weight 1
    rows = np.r_[kept, rng.choice(kept, new)]
    taken = {name: value[rows] for name, value in vars(old.samples).items() if value is not None}
    fresh = Plan(Samples(**taken), old.policy, old.topology, old.seed)
    if isinstance(old.policy, Balanced):  # windows hold the same samples, whatever their places
        speed = tuple(rng.uniform(0.7, 1.3, old.topology.ranks))
        old, fresh = (plan.revised(Revision(0, COSTS[0], speed)) for plan in (old, fresh))
    epoch, done = old.done_before(index)
    assert (done > 0).any() == (old.locate(index)[1] > 0)
    done = np.r_[done[kept], np.zeros(new, int)]
    plan = fresh.beginning_at(Beginning(epoch, index, done))
    over = plan.beginning.epoch > epoch
    wanted = np.ones(len(rows)) if not has_weights else times_in(fresh, epoch)
    placed = defaultdict(list)
    steps = iter(range(index, 10**6))
    while (step := plan.step(next(steps))).epoch == epoch:
        for part in step.micro_batches:
            times = part.repetitions or [0] * len(part.samples)
            for sample, number in zip(part.samples, times, strict=True):
                if (number, step.index) not in placed[sample]:  # parts of one that is split
                    placed[sample].append((number, step.index))
    assert over == (not placed)
    for sample, times in enumerate(wanted.astype(int).tolist()):
        found = sorted(number for number, _ in placed[sample])
        assert found == list(range(done[sample], times))
    assert step.index == plan.first_step(epoch + 1)
    again = pickle.loads(pickle.dumps(plan))
    assert [again.step(n) for n in (index, step.index)] == [plan.step(index), step]
    assert again.steps_per_epoch == fresh.steps_per_epoch
    assert plan.identity() == fresh.identity()
    if not over:
        rest = plan.epoch_of_steps(epoch)
        has_shapes_that_are_known_from_the_start(plan, [rest, plan.epoch(epoch + 1)])
    whole = fresh.epoch(epoch + 1).sample.tolist()
    assert plan.epoch(epoch + 1).sample.tolist() == whole


def test_a_window_that_can_place_nothing_gets_more_samples():
    samples = weighted([56, 47, 47], [1.0, 1.786, 1.786])
    policy, topology = Balanced(58, COSTS[0], look_ahead=2), RankTopology(3)
    for seed in range(20):  # seeds 1, 4 and 9 never came to an end
        plan = Plan(samples, policy, topology, seed)
        assert plan.epoch(0).counts.sum() in (4, 5)


def times_in(plan, epoch):
    return plan.samples.repeats(plan.seed).counts(epoch)


@given(
    st.lists(st.tuples(WEIGHTS, st.integers(1, 3)), min_size=1, max_size=60), st.integers(0, 999)
)
@examples(30)
def test_samples_alike_stand_in_an_epoch_as_often_as_one_of_their_summed_weight(pairs, seed):
    weight, kind = np.array([1.0, *(w for w, _ in pairs)]), np.array([9, *(k for _, k in pairs)])
    repeats = Repeats.of(weight, kind[:, None], seed)
    for epoch in (0, 1, 7, 1000):
        counts = repeats.counts(epoch)
        for w, k in set(zip(weight.tolist(), kind.tolist(), strict=True)):
            alike = (weight == w) & (kind == k)
            exact = int(alike.sum()) * Fraction(round(w * 10**6), 10**6)
            assert floor(exact) <= counts[alike].sum() <= ceil(exact)


def test_the_expected_number_is_the_weight():
    weight, kind = np.array([1.0, 0.3]), np.arange(2)[:, None]
    counts = [Repeats.of(weight, kind, seed).counts(5)[1].item() for seed in range(2000)]
    # A standard deviation of the mean is 0.01.
    assert np.mean(counts) == pytest.approx(0.3, abs=0.04)


def test_weights_of_one_change_no_step_and_others_the_identity():
    lengths = np.random.default_rng(0).choice([4, 9, 30], 200)
    for policy in (EqualTokens(60), FirstFit(60), Balanced(60, COSTS[0])):
        plain = Plan(of_lengths(*lengths), policy, RankTopology(2), 3)
        even = Plan(weighted(lengths, np.ones(200)), policy, RankTopology(2), 3)
        for index in range(40):
            parts = (plan.step(index).micro_batches for plan in (plain, even))
            for one, other in zip(*parts, strict=True):
                assert one == replace(other, repetitions=())
    assert "weights" not in plain.identity()
    given = (EqualTokens(8), RankTopology(1), 0)
    plans = [Plan(weighted([4] * 20, [w] * 10 + [1.0] * 10), *given) for w in (1.0, 2.0, 2.5)]
    assert len({plan.fingerprint() for plan in plans}) == 3


def test_repetitions_have_epochs_of_noise_of_their_own():
    epochs = [noise_epoch(e, repetition) for e in (0, 5, 2**20 - 1) for repetition in (0, 1, 999)]
    assert len(set(epochs)) == 9
    assert max(epochs) < 2**31
    assert noise_epoch(7, 0) == 7


class Once(EqualTokens):
    """A policy that does not know of weights."""

    def plan_epoch(self, samples, topology, rng):
        return super().plan_epoch(Samples(samples.shape, samples.seq_len), topology, rng)


def test_weights_that_an_epoch_or_a_policy_may_not_hold_are_refused():
    rare, twice = weighted([4, 5], [0.1, 0.2]), weighted([4] * 4, [2.0] * 4)
    for samples, policy in ((rare, EqualTokens(8)), (twice, Once(8))):
        refused(["data.weights"], Plan, samples, policy, RankTopology(1), 0)
    assert Plan(weighted([4] * 10, [0.1] * 10), EqualTokens(8), RankTopology(1), 0).epoch(3).steps
