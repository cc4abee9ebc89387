"""`benchmarks/planning_workloads.py`: lengths of samples of models with joint attention."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("planning_workloads")


def test_bucketed_rows_have_room_for_the_longest_condition(program):
    samples = program.make_workload("wan-480p", 500)
    tokens = program.condition_tokens(500)
    assert tokens.min() >= 1
    assert tokens.max() <= program.MOST_TEXT + program.GLYPH_TOKENS[1]
    own = program.with_conditions(samples, packed=True).seq_len
    room = program.with_conditions(samples, packed=False).seq_len
    assert (own - samples.seq_len == tokens).all()
    assert (room - samples.seq_len == tokens.max()).all()


def test_the_longest_sample_fits_every_m_mem(program):
    for workload, m_mem in program.JOINT_M_MEM.items():
        longest = program.with_conditions(program.make_workload(workload, 20_000), packed=False)
        assert longest.seq_len.max() <= m_mem
