"""Plans of streams: every sample once, the same from any step on, and as fast as of a whole set."""

import contextlib
import json
import pickle
from dataclasses import asdict, dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import WAN, examples, of_lengths

from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.packed import FirstFit
from alload_jax.planning.policies.policy import RankTopology, makespan
from alload_jax.planning.stream import Chunk, RoundStart, StreamPlan, enough_samples
from alload_jax.planning.workloads import make_workload


@dataclass(frozen=True)
class Numbers:
    """Samples 0, 1, 2 and so on, of the sizes of a few rows again and again."""

    rows: tuple
    per_chunk: int = 7

    def chunks(self, state):
        first = (state or {"next": 0})["next"]
        while True:
            keys = np.arange(first, first + self.per_chunk)
            first += self.per_chunk
            yield Chunk(np.asarray(self.rows)[keys % len(self.rows)], keys, {"next": first})


@st.composite
def cases(draw):
    context = draw(st.sampled_from([1, 2]))
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=9, unique=True))
    few = st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=60)
    policy = Balanced(
        m_mem=300, cost=WAN, context=context, look_ahead=draw(st.integers(1, 3)), max_segments=8
    )
    topology = RankTopology(context * draw(st.integers(1, 3)), micro_batches_per_step=2)
    samples = enough_samples(of_lengths(*lengths), 300, topology.ranks, 3)
    feed = Numbers(tuple(draw(few)), draw(st.integers(1, 40)))
    return StreamPlan(samples, policy, topology, draw(st.integers(0, 9)), feed)


def content(plan, steps):
    """What the steps train: samples by their keys."""
    found = [plan.step(number) for number in steps]
    return [(step.micro_batches, step.window.keys.tolist()) for step in found]


@given(st.lists(st.integers(90, 300), min_size=1), st.integers(1, 9), st.integers(1, 200))
@examples(20)
def test_rows_are_made_for_samples_that_fill_a_window_and_hardly_more(lengths, ranks, look_ahead):
    samples = enough_samples(of_lengths(*lengths), 300, ranks, look_ahead)
    steps, least = (samples.weight * samples.seq_len).sum() / (300 * ranks), max(64, look_ahead)
    once = sum(lengths) / (300 * ranks)
    assert min(least, 1000 * once) <= steps * (1 + 1e-9)
    assert steps < least + once


@given(plan=cases())
@examples(10)
def test_a_round_holds_each_sample_once_and_in_the_order_of_the_stream(plan):
    keys = []
    for number in range(10):
        window, held = plan.epoch(number), plan.step(plan.first_step(number)).window
        times = np.bincount(window.sample, weights=window.part_tokens())
        np.testing.assert_array_equal(times, plan.samples.seq_len[held.rows])
        keys += held.keys.tolist()
        if number == 7:  # the last of its round
            assert sorted(keys) == list(range(len(keys)))
    assert len(keys) == len(set(keys))


@given(plan=cases(), window=st.integers(0, 12), data=st.data())
@examples(10)
def test_a_plan_goes_on_from_any_step(plan, window, data):
    """From what a checkpoint keeps, in another process, and from steps that were forgotten."""
    first = plan.first_step(window)
    step = first + data.draw(st.integers(0, plan.epoch_of_steps(window).steps - 1))
    wanted = content(plan, range(step, step + 3))
    start = RoundStart(**json.loads(json.dumps(asdict(plan.round_start(step)))))
    later = plan.starting_at(start)
    assert content(later, range(step, step + 3)) == wanted
    assert content(pickle.loads(pickle.dumps(later)), range(step, step + 3)) == wanted
    assert later.round_start(step) == start
    assert later.identity() == plan.identity()
    assert later.steps_per_epoch == plan.steps_per_epoch
    plan.first_step(window + 9)
    assert content(plan, range(step, step + 3)) == wanted


@pytest.mark.parametrize("workload", ["wan-480p", "mixed-resolution", "long-video-V60"])
def test_a_stream_takes_no_longer_than_a_plan_of_all_samples(workload):
    """The same samples, of which no more than 64 steps are known at a time."""
    samples, topology = make_workload(workload, 15_000), RankTopology(8)
    policy = Balanced(350_000 if "long" in workload else 81_920, WAN, look_ahead=64)
    policy = policy.fitted(samples, topology)
    whole = Plan(samples, policy, topology, seed=0).epoch(0)
    order = np.random.default_rng(0).permutation(len(samples))
    feed = Numbers(tuple(order.tolist()), per_chunk=1000)
    stream = StreamPlan(enough_samples(samples, 1, 8, 64), policy, topology, 0, feed)
    tokens = time = window = 0
    while tokens < samples.seq_len.sum():
        part, window = stream.epoch(window), window + 1
        tokens, time = tokens + part.part_tokens().sum(), time + makespan(part, WAN)
    assert tokens / time > 0.99 * samples.seq_len.sum() / makespan(whole, WAN)


def test_an_error_of_the_feed_loses_no_sample():
    failures = [5, 9]

    @dataclass(frozen=True)
    class Unsteady(Numbers):
        def chunks(self, state):
            for number, chunk in enumerate(super().chunks(state)):
                if failures and number == failures[0]:
                    del failures[0]
                    raise OSError("no connection")
                yield chunk

    samples = enough_samples(of_lengths(100, 200, 300), 300, 2, 30)
    given = samples, Balanced(300, WAN, look_ahead=30), RankTopology(2), 0
    steady, plan = StreamPlan(*given, Numbers((0, 1, 2))), None
    while plan is None:
        with contextlib.suppress(OSError):
            plan = StreamPlan(*given, Unsteady((0, 1, 2)))
    failures[:] = [30, 41]
    for window in range(1, 12):
        found = None
        while found is None:
            with contextlib.suppress(OSError):
                found = plan.epoch_of_steps(window)
        np.testing.assert_array_equal(found.sample, steady.epoch_of_steps(window).sample)
        one, other = (each.step(each.first_step(window)).window.keys for each in (plan, steady))
        np.testing.assert_array_equal(one, other)
    assert not failures


def test_other_policies_are_refused():
    with pytest.raises(ValueError, match="first_fit plans no stream; take balanced"):
        StreamPlan(of_lengths(8), FirstFit(64), RankTopology(1), 0, Numbers((0,)))
