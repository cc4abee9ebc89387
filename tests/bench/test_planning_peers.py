"""Benchmarks of planning: epochs from peers' batches, rows by cost, lengths with conditions."""

import dataclasses
import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.planning.cost import QuadraticCost
from alload_jax.planning.samples import Samples

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEQ_LEN = np.asarray([4, 2, 6, 3, 5])
COST = QuadraticCost(c0=0.0, c1=1.0, c2=0.0)
M_MEM = 100


@pytest.fixture(scope="module")
def programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield [importlib.import_module(name) for name in ("planning_peers", "peers")]
        for name in ("planning_peers", "peers"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def peers(programs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(programs[1].M_MEM, "tiny", M_MEM)
        yield programs[1]


@pytest.fixture
def measure(programs, peers, monkeypatch):
    """The figures of an epoch of five samples on two ranks of ten tokens."""
    samples = Samples(np.zeros((5, 3), np.int64), SEQ_LEN)
    monkeypatch.setattr(peers, "_samples", lambda workload, size: samples)
    monkeypatch.setitem(peers.M_MEM, "tiny", 10)
    return lambda epoch: programs[0].measure(epoch, peers.Case("tiny", 5, 2), COST)


def array(*numbers):
    return np.asarray(numbers, np.int64)


def test_padded_batches_cost_rows_times_the_longest(peers, measure):
    epoch = peers.padded_epoch([[array(0, 1), array(2)], [array(3), array(4)]], SEQ_LEN)
    assert epoch.rows.tolist() == [2, 1, 1, 1]
    assert epoch.padded_len.tolist() == [4, 6, 3, 5]
    figures = measure(epoch)
    assert figures["seconds"] == 8 + 5
    assert figures["padding"] == pytest.approx(1 - 20 / 22)
    assert figures["dropped"] == figures["duplicated"] == figures["uneven_steps"] == 0
    # Repeated samples count once, and dropped ones do not.
    figures = measure(peers.padded_epoch([[array(0, 0), array(0, 1, 3)]], SEQ_LEN))
    assert (figures["dropped"], figures["duplicated"]) == (2, 2)
    assert figures["over_memory"] == 1  # three rows of four tokens
    assert figures["tokens_per_second"] == (4 + 2 + 3) / 12


def test_ranks_without_a_row_wait(peers, measure):
    epoch = peers.packed_epoch([[array(0, 4), array(2, 3)], [array(1), array()]], SEQ_LEN, 10)
    assert (epoch.steps, epoch.step.tolist(), epoch.rank.tolist()) == (2, [0, 0, 1], [0, 1, 0])
    assert epoch.part_offsets().tolist() == [0, 4, 0, 6, 0]
    figures = measure(epoch)
    assert (figures["seconds"], figures["idle"]) == (20, 0.25)
    assert (figures["uneven_steps"], figures["uneven_samples"]) == (1, 1)
    # Ranks with several micro-batches are one each.
    joined = dataclasses.replace(epoch, steps=1, step=epoch.step * 0, micro_batch=epoch.step)
    figures = measure(joined)
    assert (figures["uneven_steps"], figures["seconds"]) == (0, 20)
    # Samples that are left over count with their cost.
    figures = measure(peers.packed_epoch([[array(0), array(2)]], SEQ_LEN, 10))
    assert figures["tokens_per_second"] == pytest.approx(20 * (4 + 6) / 20 / 10)


def test_peers_are_tuned_in_rounds_on_less(programs, peers):
    program = programs[0]
    chosen = peers.Lhotse(True, num_buckets=None)
    assert program.merged(chosen, peers.Lhotse(True, quadratic=5)) == peers.Lhotse(True, None, 5)
    # The number of steps is kept if ranks suffice.
    assert program.smaller(peers.Case("tiny", 100_000, 64), 20_000).ranks == 12
    assert program.smaller(peers.Case("tiny", 100_000, 8), 20_000).ranks == 8
    assert program.smaller(peers.Case("tiny", 100, 8), 20_000).size == 100
    for peer in program.PEERS:
        rounds = program.sweep(peer, QuadraticCost(c0=0.0, c1=1.0, c2=0.5))
        assert [one for settings in rounds for one in settings]


def test_an_update_keeps_what_was_not_measured(programs):
    where = {"workload": "tiny", "size": 5, "ranks": 2, "m_mem": 10}
    old = [{"planner": "balanced", "tokens_per_second": 1.0}]
    old += [{"planner": "theirs", "tokens_per_second": 6.0}]
    earlier = {"date": "then", "cases": [where | {"rows": old}]}
    new = [{"planner": "balanced", "tokens_per_second": 3.0, "date": "now"}]
    [case] = programs[0].updated([where | {"rows": new}], earlier)
    rows = programs[0].with_ratios(case)["rows"]
    assert {row["planner"]: row["date"] for row in rows} == {"balanced": "now", "theirs": "then"}
    assert [row["over_balanced"] for row in rows] == [1.0, 2.0]


ROW_COST = QuadraticCost(c0=1.0, c1=0.1, c2=0.01, c_sequence=0.05)


KINDS = {
    "lpt": ("LongestFirst", {"window": 3}),
    "lpt per step": ("LongestFirst", {"window": 1}),
    "ffd": ("FirstFitGrouped", {"window": 3}),
    "kk": ("KarmarkarKarp", {}),
    "kk, many": ("KarmarkarKarp", {"micro_batches": 4}),
}


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    lengths=st.lists(st.integers(1, M_MEM), min_size=1, max_size=120),
    ranks=st.integers(1, 5),
    fill=st.sampled_from((0.5, 0.9, 1.0)),
    slot_factor=st.sampled_from((1.0, 2.5)),
    row_share=st.sampled_from((0.5, 1.0)),
    by_total=st.booleans(),
)
def test_plans_are_valid(peers, kind, lengths, ranks, **fields):
    seq_len = np.asarray(lengths)
    with pytest.MonkeyPatch.context() as patch:
        samples = Samples(np.zeros((len(seq_len), 3), np.int64), seq_len)
        patch.setattr(peers, "_samples", lambda workload, size: samples)
        name, options = KINDS[kind]
        planner = getattr(peers, name)(ROW_COST, **options, **fields)
        epoch = planner.epoch(peers.Case("tiny", len(seq_len), ranks))
    assert sorted(epoch.sample.tolist()) == list(range(len(seq_len)))
    row = np.repeat(np.arange(len(epoch.rows)), np.diff(epoch.offsets))
    capacity = epoch.packing.capacity
    assert max(seq_len) <= capacity <= M_MEM
    assert np.bincount(row, weights=seq_len[epoch.sample]).max() <= capacity
    slots = np.ceil(planner.slot_factor * capacity / seq_len.mean())
    assert np.diff(epoch.offsets).max() <= slots
    places = list(zip(epoch.step, epoch.micro_batch, epoch.rank, strict=True))
    assert places == sorted(set(places))
    assert epoch.rank.max() < epoch.ranks == ranks
    assert set(epoch.step.tolist()) == set(range(epoch.steps))
    if kind in ("lpt", "lpt per step", "ffd"):
        assert not epoch.micro_batch.any()


def test_peers_follow_small_examples(peers):
    # 8, 7, 6, 5, 4 in two parts: the method's difference is 2, the least is 0.
    weight = np.asarray([8.0, 7.0, 6.0, 5.0, 4.0])
    parts = peers.karmarkar_karp(weight, 2)
    assert sorted(weight[part].sum() for part in parts) == [14.0, 16.0]
    limits = peers.Limits(ranks=2, capacity=10, slots=2)
    row = peers.longest_first(np.asarray([6, 5, 4, 3, 2]), np.arange(5.0, 0, -1), 2, limits)
    assert row.tolist() == [0, 1, 1, 0, peers.UNPLACED]
    row = np.asarray([0, 1, 2, 3, peers.UNPLACED])
    steps = peers.group_by_cost(row, np.asarray([1.0, 9.0, 2.0, 8.0, 5.0]), 4, 2)
    assert [[rows[0].tolist() for rows in step] for step in steps] == [[[1], [3]], [[2], [0]]]


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0, 100), min_size=1, max_size=40), parts=st.integers(1, 6))
def test_karmarkar_karp_divides_all_items_evenly(peers, weights, parts):
    weight = np.asarray(weights)
    found = peers.karmarkar_karp(weight, parts)
    assert len(found) == parts
    assert sorted(itertools.chain(*map(np.ndarray.tolist, found))) == list(range(len(weight)))
    sums = np.asarray([weight[part].sum() for part in found])
    # The difference of sums never exceeds the largest item.
    assert sums.max() - sums.min() <= weight.max() * (1 + 1e-9) + 1e-9
