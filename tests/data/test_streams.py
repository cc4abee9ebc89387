"""Streams of Grain: steps go on from its states, and processes read their own samples alone."""

import itertools
import json
from dataclasses import asdict

import grain
import numpy as np
import pytest
from absl import flags
from data_helpers import PATCH, classes, says

from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.loader import LoaderConfig, PatientReader, StepLoader
from alload_jax.data.sources import grain_samples
from alload_jax.data.sources.grain_samples import GrainStream
from alload_jax.data.store import damaged_records
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.cost import PowerCost
from alload_jax.planning.policies import balanced
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.stream import RoundStart, StreamPlan

MODEL = WanConfig(dim=16, num_heads=2, num_layers=1, patch_size=PATCH)
SIZES = [(1, 4, 4), (1, 4, 8), (5, 4, 4), (9, 8, 8)]
RANKS = 3
READING = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""Threads would take longer than the entries do."""


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(balanced, "_FEWEST_SAMPLES", 1)
    monkeypatch.setattr(grain_samples, "_DRAWN", 48)
    monkeypatch.setattr(grain_samples, "_CHUNK", 10)


def entry(number, text=False):
    size = SIZES[number % 3]
    key = f"clip {number}" if text else number
    return dict(zip(("key", "frames", "height", "width"), (key, *size), strict=True))


def content(key):
    number = int(str(key).rpartition(" ")[2])
    if number == 13:
        raise OSError("disk gone")
    return {"latents": np.full((*SIZES[number % 3], 1), number / 100), "labels": np.array([1])}


def listed(entries=entry, count=100, batch=0, repeated=True):
    """Numbers in random order, another each time."""
    numbers = grain.MapDataset.range(count).seed(0).shuffle()
    found = (numbers.repeat() if repeated else numbers).map(entries)
    found = found.to_iter_dataset(READING)
    return found.batch(batch) if batch else found


def stream(entries, arrays=content, sizes=SIZES):
    return GrainStream(entries, arrays, sizes, (1, 1, 1))


def plan_of(source, *start):
    samples = source.manifest.samples(PATCH)
    policy = Balanced(int(samples.seq_len.max()), PowerCost(1.0), look_ahead=2, max_segments=9)
    return StreamPlan(samples, policy, RankTopology(RANKS), 0, source, *start)


def collator_of(plan, ranks):
    source = plan.feed
    collation = collation_for(plan, source.manifest, MODEL, classes(1))
    return Collator(PatientReader(source, ()), frozenset(ranks), collation)


@pytest.mark.parametrize("batch", [0, 7])
@pytest.mark.parametrize("text", [False, True])
def test_steps_go_on_from_the_state_of_grain(batch, text):
    source = stream(listed(lambda number: entry(number, text), batch=batch))
    whole = plan_of(source)
    step = whole.first_step(17) + 1
    kept = json.loads(json.dumps(asdict(whole.round_start(step))))
    assert (kept["window"], kept["step"] < step) == (16, True)
    later = plan_of(source, RoundStart(**kept))
    for number in range(step, step + 8):
        one, other = whole.step(number), later.step(number)
        assert one.micro_batches == other.micro_batches
        np.testing.assert_array_equal(one.window.keys, other.window.keys)
    keys = [key for window in range(16) for key in window_keys(whole, window)]
    upto = len(keys) // 100 * 100
    assert {keys.count(key) for key in set(keys)} <= {upto // 100, upto // 100 + 1}


def test_a_state_of_other_entries_is_refused():
    """Whose first samples may be the same."""
    shuffled = grain.experimental.WindowShuffleIterDataset(listed(), window_size=50, seed=0)
    plan = plan_of(stream(shuffled))
    start = plan.round_start(plan.first_step(8))
    with says("stream: cannot go on", "entries as they were"):
        plan_of(stream(listed()), start).step(start.step)


def window_keys(plan, number):
    return plan.step(plan.first_step(number)).window.keys.tolist()


def test_processes_read_the_samples_of_their_ranks_alone():
    """A damaged one gets weight 0 and is named by its key."""
    read = []

    def counted(key):
        read.append(key)
        return content(key)

    plan, damaged = plan_of(stream(listed(), counted)), 0
    collators = [collator_of(plan, [rank]) for rank in range(RANKS)]
    for number in range(12):
        step = plan.step(number)
        for collate, part in zip(collators, step.micro_batches, strict=True):
            read.clear()
            host = collate(step)
            wanted = step.window.keys[list(part.samples)].tolist()
            assert read == wanted
            (batch,) = host.batches
            held = [key != 13 for key in wanted]
            assert batch.weight[0, : len(wanted)].tolist() == held
            assert batch.sample[0, : len(wanted)][held].tolist() == list(
                itertools.compress(part.samples, held)
            )
            first = batch.tokens[0, list(part.row_plan.offsets), 0][held]
            np.testing.assert_allclose(first, [key / 100 for key in wanted if key != 13], rtol=1e-6)
            assert len(host.problems) == (13 in wanted)
            assert all("stream: sample 13 cannot be read: disk" in each for each in host.problems)
            damaged += wanted.count(13)
    assert damaged


def test_samples_beyond_those_that_were_drawn_have_the_sizes_of_the_source():
    source = stream(listed())
    assert set(map(tuple, source.manifest.shape.tolist())) == set(SIZES)
    window = plan_of(source).step(0).window
    shown = source.of_window(window)
    assert shown.manifest.shape.tolist() == [list(SIZES[key % 3]) for key in window.keys.tolist()]


def test_keys_of_64_bits_stay_whole_numbers():
    source = stream(listed(lambda n: entry(n) | {"key": 2**63 + n}))
    assert set((plan_of(source).step(0).window.keys - 2**63).tolist()) <= set(range(100))


@pytest.mark.parametrize(
    ("entries", "sizes", "words"),
    [
        (listed(count=20, repeated=False), SIZES, ["has an end", "repeat it"]),
        (listed(lambda number: number), SIZES, ["gives", "dicts with key, frames"]),
        (listed(lambda n: entry(n) | {"key": 0.5}), SIZES, ["0.5", "whole number or text"]),
        (listed(lambda n: entry(n) | {"frames": 0.5}), SIZES, ["whole numbers"]),
        (listed(lambda n: entry(n) | {"key": [1, 2]}), SIZES, ["equally many"]),
        (listed(lambda n: entry(n, text=n % 2)), SIZES, ["of one type"]),
        (listed(lambda n: entry(n) | {"key": n << 57}), SIZES, ["uint64", "of one type"]),
        (listed(), SIZES[:2], ["sample", "5×4×4", "none of the source's sizes; add it"]),
        (listed(), [], ["sizes are", "whole numbers [K, 3]"]),
        (listed(), [(1, 4), (5, 4), (9, 8)], ["sizes are", "of shape (3, 2)"]),
        (listed(), [(1.5, 4, 4)], ["sizes are float64"]),
        (listed(), [(0, 4, 4)], ["size 0 is 0×4×4", "from 1 to"]),
    ],
)
def test_a_stream_that_cannot_be_used_is_refused(entries, sizes, words):
    with says("stream", *words):
        stream(entries, sizes=sizes)


def test_a_size_that_no_sample_has_yet_is_no_damage():
    damaged = list(damaged_records(stream(listed())))
    assert damaged
    assert all("stream: sample 13 cannot be read" in line for line in damaged)


def test_entries_may_come_from_processes():
    """Which Grain starts when absl's flags are parsed only."""
    flags.FLAGS.unparse_flags()
    stream(listed())
    assert flags.FLAGS.is_parsed()


def test_a_stream_whose_first_sample_cannot_be_read_is_refused():
    def broken(key):
        raise OSError("disk gone")

    with says("stream: sample", "disk gone"):
        stream(listed(), broken)


def test_a_stream_that_ends_while_it_is_planned_says_so():
    plan = plan_of(stream(listed(count=300, repeated=False)))
    with says("stream: has an end"):
        for number in itertools.count():
            plan.step(number)


def test_a_worker_that_replaces_another_plans_from_the_round_of_its_step(monkeypatch):
    def begin(loader):
        begun.append(loader._plan)
        return map(loader._plan.step, loader._numbers) if len(begun) > 1 else Killed()

    class Killed:
        def __next__(self):
            raise RuntimeError("Worker process was terminated unexpectedly with exit code -9.")

        def close(self):
            """Nothing is open."""

    begun, plan = [], plan_of(stream(listed()))
    monkeypatch.setattr(StepLoader, "_begin", begin)
    number = plan.first_step(9)  # rounds have eight windows
    loader = StepLoader(plan, range(number, number + 2), None, LoaderConfig(processes=1))
    expected = [plan.step(each).micro_batches for each in (number, number + 1)]
    assert [step.micro_batches for step in loader] == expected
    assert begun[1].beginning.epoch == 8
