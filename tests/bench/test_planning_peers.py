"""`benchmarks/planning_peers.py`: epochs from the peers' batches, and their figures."""

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from alload_jax.planning.cost import QuadraticCost
from alload_jax.planning.samples import Samples

SEQ_LEN = np.asarray([4, 2, 6, 3, 5])
COST = QuadraticCost(c0=0.0, c1=1.0, c2=0.0)


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("planning_peers")
        for name in ("planning_peers", "peers"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def peers(program):
    return importlib.import_module("peers")


@pytest.fixture
def case(peers: ModuleType, monkeypatch):
    samples = Samples(np.zeros((5, 3), np.int64), SEQ_LEN)
    monkeypatch.setattr(peers, "_samples", lambda workload, size: samples)
    monkeypatch.setitem(peers.M_MEM, "tiny", 10)
    return peers.Case("tiny", 5, 2)


def array(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int64)


def test_padded_batches_cost_rows_times_the_longest(program, peers, case):
    epoch = peers.padded_epoch([[array(0, 1), array(2)], [array(3), array(4)]], SEQ_LEN)
    assert epoch.rows.tolist() == [2, 1, 1, 1]
    assert epoch.padded_len.tolist() == [4, 6, 3, 5]
    figures = program.measure(epoch, case, COST)
    assert figures["seconds"] == 8 + 5
    assert figures["padding"] == pytest.approx(1 - 20 / 22)
    assert figures["dropped"] == figures["duplicated"] == figures["uneven_steps"] == 0


def test_repeated_samples_count_once_and_dropped_samples_do_not_count(program, peers, case):
    epoch = peers.padded_epoch([[array(0, 0), array(0, 1, 3)]], SEQ_LEN)
    figures = program.measure(epoch, case, COST)
    assert figures["dropped"] == 2
    assert figures["duplicated"] == 2
    assert figures["over_memory"] == 1  # three rows of four tokens
    assert figures["tokens_per_second"] == (4 + 2 + 3) / 12


def test_ranks_without_a_row_wait(program, peers, case):
    steps = [[array(0, 4), array(2, 3)], [array(1), array()]]
    epoch = peers.packed_epoch(steps, SEQ_LEN, 10)
    assert (epoch.steps, epoch.step.tolist(), epoch.rank.tolist()) == (2, [0, 0, 1], [0, 1, 0])
    assert epoch.part_offsets().tolist() == [0, 4, 0, 6, 0]
    figures = program.measure(epoch, case, COST)
    assert figures["seconds"] == 20
    assert figures["idle"] == 0.25
    assert (figures["uneven_steps"], figures["uneven_samples"]) == (1, 1)


def test_later_rounds_keep_the_chosen_settings(program, peers):
    chosen = peers.Lhotse(True, num_buckets=None)
    assert program.merged(chosen, peers.Lhotse(True, quadratic=5)) == peers.Lhotse(True, None, 5)


def test_tuning_keeps_the_number_of_steps_if_ranks_suffice(program, peers):
    assert program.smaller(peers.Case("tiny", 100_000, 64), 20_000).ranks == 12
    assert program.smaller(peers.Case("tiny", 100_000, 8), 20_000).ranks == 8
    assert program.smaller(peers.Case("tiny", 100, 8), 20_000).size == 100


def test_left_over_samples_count_with_their_cost(program, peers, case):
    steps = [[array(0), array(2)]]
    epoch = peers.packed_epoch(steps, SEQ_LEN, 10)
    figures = program.measure(epoch, case, COST)
    assert figures["tokens_per_second"] == pytest.approx(20 * (4 + 6) / 20 / 10)


def test_ranks_with_several_micro_batches_are_one_each(program, peers, case):
    steps = [[array(0), array(2)], [array(1), array()]]
    epoch = peers.packed_epoch(steps, SEQ_LEN, 10)
    joined = dataclasses.replace(epoch, steps=1, step=epoch.step * 0, micro_batch=epoch.step)
    figures = program.measure(joined, case, COST)
    assert (figures["uneven_steps"], figures["seconds"]) == (0, 20)


def test_every_peer_has_settings_to_try(program):
    cost = QuadraticCost(c0=0.0, c1=1.0, c2=0.5)
    for peer in program.PEERS:
        rounds = program.sweep(peer, cost)
        tried = [one for settings in rounds for one in settings]
        assert tried
        assert all(dataclasses.is_dataclass(one) for one in tried)


def test_an_update_keeps_what_was_not_measured(program):
    where = {"workload": "tiny", "size": 5, "ranks": 2, "m_mem": 10}
    old = [{"planner": "balanced", "tokens_per_second": 1.0}]
    old += [{"planner": "theirs", "tokens_per_second": 6.0}]
    earlier = {"date": "then", "cases": [where | {"rows": old}]}
    new = [{"planner": "balanced", "tokens_per_second": 3.0, "date": "now"}]
    [case] = program.updated([where | {"rows": new}], earlier)
    rows = program.with_ratios(case)["rows"]
    assert [(row["planner"], row["date"]) for row in rows] == [
        ("balanced", "now"),
        ("theirs", "then"),
    ]
    assert [row["over_balanced"] for row in rows] == [1.0, 2.0]
