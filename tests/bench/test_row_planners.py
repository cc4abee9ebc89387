"""`benchmarks/peers.py`: rows within their limits, in steps of neighbouring cost."""

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

COST = QuadraticCost(c0=1.0, c1=0.1, c2=0.01, c_sequence=0.05)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
M_MEM = 100


@pytest.fixture(scope="module")
def planners():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        peers = importlib.import_module("peers")
        patch.setitem(peers.M_MEM, "tiny", M_MEM)
        yield peers
        del sys.modules["peers"]


def planner_of(planners, kind: str, **fields):
    kinds = {
        "lpt": lambda: planners.LongestFirst(COST, window=3, **fields),
        "lpt per step": lambda: planners.LongestFirst(COST, window=1, **fields),
        "ffd": lambda: planners.FirstFitGrouped(COST, window=3, **fields),
        "kk": lambda: planners.KarmarkarKarp(COST, **fields),
        "kk, many": lambda: planners.KarmarkarKarp(COST, micro_batches=4, **fields),
    }
    return kinds[kind]()


KINDS = ("lpt", "lpt per step", "ffd", "kk", "kk, many")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, M_MEM), min_size=1, max_size=120),
    ranks=st.integers(1, 5),
    fill=st.sampled_from((0.5, 0.9, 1.0)),
    slot_factor=st.sampled_from((1.0, 2.5)),
    row_share=st.sampled_from((0.5, 1.0)),
    by_total=st.booleans(),
)
def test_plans_are_valid(planners, kind, lengths, ranks, **fields):
    seq_len = np.asarray(lengths)
    with pytest.MonkeyPatch.context() as patch:
        samples = Samples(np.zeros((len(seq_len), 3), np.int64), seq_len)
        patch.setattr(planners, "_samples", lambda workload, size: samples)
        planner = planner_of(planners, kind, **fields)
        epoch = planner.epoch(planners.Case("tiny", len(seq_len), ranks))
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


def test_karmarkar_karp_follows_the_known_example(planners):
    # 8, 7, 6, 5, 4 in two parts: the method's difference is 2, the least is 0.
    weight = np.asarray([8.0, 7.0, 6.0, 5.0, 4.0])
    parts = planners.karmarkar_karp(weight, 2)
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3, 4]
    assert sorted(weight[part].sum() for part in parts) == [14.0, 16.0]


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0, 100), min_size=1, max_size=40), parts=st.integers(1, 6))
def test_karmarkar_karp_divides_all_items_evenly(planners, weights, parts):
    weight = np.asarray(weights)
    found = planners.karmarkar_karp(weight, parts)
    assert len(found) == parts
    assert sorted(itertools.chain(*map(np.ndarray.tolist, found))) == list(range(len(weight)))
    sums = np.asarray([weight[part].sum() for part in found])
    # The difference of sums never exceeds the largest item.
    assert sums.max() - sums.min() <= weight.max() * (1 + 1e-9) + 1e-9


def test_longest_first_keeps_rows_even_and_below_their_limits(planners):
    limits = planners.Limits(ranks=2, capacity=10, slots=2)
    row = planners.longest_first(np.asarray([6, 5, 4, 3, 2]), np.arange(5.0, 0, -1), 2, limits)
    assert row.tolist() == [0, 1, 1, 0, planners.UNPLACED]


def test_rows_of_neighbouring_cost_form_a_step(planners):
    row = np.asarray([0, 1, 2, 3, planners.UNPLACED])
    steps = planners.group_by_cost(row, np.asarray([1.0, 9.0, 2.0, 8.0, 5.0]), 4, 2)
    assert [[rows[0].tolist() for rows in step] for step in steps] == [[[1], [3]], [[2], [0]]]
