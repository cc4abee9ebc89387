"""Plans of weighted samples: how often each stands in an epoch, and what tells its times apart."""

import pickle
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import MODES, examples, of_lengths, refused

from alload_jax.planning.cost import PowerCost, QuadraticCost
from alload_jax.planning.epoch import Repeats, noise_epoch
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.bucketed import DualConstraint, EqualTokens, Fixed, Sorted
from alload_jax.planning.policies.packed import FirstFit
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.samples import Samples

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
    policy = draw(
        st.sampled_from(
            [
                Fixed(3),
                EqualTokens(row),
                DualConstraint(row, float(row) ** 2, 2.0),
                Sorted(row, cost),
                FirstFit(row, look_ahead=2),
                Balanced(row, cost, look_ahead=2),
                Balanced(row, cost, look_ahead=2, max_segments=8, context=context),
            ]
        )
    )
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
            if part.row_plan:
                lengths, first = part.row_plan.tokens, part.row_plan.first
                longest = plan.samples.seq_len.max()
                assert all(tokens <= longest for _, tokens in part.row_plan.split_segments)
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
        for packing in packings:
            assert set(packing.split_tokens.tolist()) <= set(packing.split_sizes)
            assert packing.tokens[~packing.is_split].max(initial=0) <= packing.longest_whole
        return
    known = set(zip(*(column.tolist() for column in plan.bucket_shapes()[:2]), strict=True))
    for epoch in epochs:
        assert set(zip(epoch.rows.tolist(), epoch.padded_len.tolist(), strict=True)) <= known


@given(plans(), st.integers(0, 60))
@examples(40)
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
    seq_len = plan.samples.seq_len
    for epoch in epochs:
        found = plan_metrics(epoch, seq_len, COSTS[0], None)
        assert (found.dropped, found.duplicated) == (0, 0)
    fewer = replace(epoch, counts=epoch.counts + 1)
    assert plan_metrics(fewer, seq_len, COSTS[0], None).dropped == len(plan.samples)


@given(
    st.lists(st.tuples(WEIGHTS, st.integers(1, 3)), min_size=1, max_size=60),
    st.integers(0, 999),
)
@examples(50)
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
    counts = [Repeats.of(weight, kind, seed).counts(5)[1].item() for seed in range(4000)]
    # A standard deviation of the mean is 0.007.
    assert np.mean(counts) == pytest.approx(0.3, abs=0.03)


def test_weights_of_one_change_no_step():
    lengths = np.random.default_rng(0).choice([4, 9, 30], 200)
    topology = RankTopology(2)
    for policy in (EqualTokens(60), FirstFit(60), Balanced(60, COSTS[0])):
        plain = Plan(of_lengths(*lengths), policy, topology, 3)
        even = Plan(weighted(lengths, np.ones(200)), policy, topology, 3)
        for index in range(40):
            for one, other in zip(
                plain.step(index).micro_batches, even.step(index).micro_batches, strict=True
            ):
                assert one == replace(other, repetitions=())


def test_plans_of_other_weights_have_other_identities():
    lengths, given = [4] * 20, (EqualTokens(8), RankTopology(1), 0)
    plans = [Plan(weighted(lengths, [w] * 10 + [1.0] * 10), *given) for w in (1.0, 2.0, 2.5)]
    assert len({plan.fingerprint() for plan in plans}) == 3
    assert "weights" not in Plan(of_lengths(*lengths), *given).identity()


def test_repetitions_have_epochs_of_noise_of_their_own():
    epochs = {
        noise_epoch(epoch, repetition) for epoch in (0, 5, 2**20 - 1) for repetition in (0, 1, 999)
    }
    assert len(epochs) == 9
    assert max(epochs) < 2**31
    assert noise_epoch(7, 0) == 7


class Once(EqualTokens):
    """A policy that does not know of weights."""

    def plan_epoch(self, samples, topology, rng):
        return super().plan_epoch(Samples(samples.shape, samples.seq_len), topology, rng)


def test_weights_that_an_epoch_or_a_policy_may_not_hold_are_refused():
    for samples, policy in (
        (weighted([4, 5], [0.1, 0.2]), EqualTokens(8)),
        (weighted([4] * 4, [2.0] * 4), Once(8)),
    ):
        refused(["data.weights"], Plan, samples, policy, RankTopology(1), 0)
    assert Plan(weighted([4] * 10, [0.1] * 10), EqualTokens(8), RankTopology(1), 0).epoch(3).steps
