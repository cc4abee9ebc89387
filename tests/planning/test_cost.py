import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, refusal, write_json

from alload_jax.planning.cost import (
    FORMAT,
    CostFile,
    MemoryModel,
    PowerCost,
    QuadraticCost,
    bucketed_cost,
    read_cost_file,
    write_cost_file,
)

WORK = st.lists(st.tuples(st.integers(1, 512), st.integers(1, 100_000)), min_size=1, max_size=10)
COEFFICIENT = st.floats(1e-12, 1e3)
POWERS = st.builds(PowerCost, st.floats(0.5, 3.5), COEFFICIENT)
QUADRATICS = st.builds(QuadraticCost, COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT)
COST_FILES = st.builds(
    CostFile,
    power=st.none() | POWERS,
    quadratic=st.none() | QUADRATICS,
    memory=st.none() | st.builds(MemoryModel, COEFFICIENT, COEFFICIENT, COEFFICIENT),
    m_mem=st.none() | st.integers(1, 10**9),
    m_comp=st.none() | COEFFICIENT,
    bytes_per_split_token=st.none() | COEFFICIENT,
    model=st.none() | st.just({"dim": 8, "patch_size": [1, 2, 2]}),
    device=st.none() | st.just("NVIDIA H200"),
)


def close(found, expected):
    return np.shape(found) == np.shape(expected) and np.allclose(found, expected, rtol=1e-12)


@given(WORK, POWERS)
@examples(50)
def test_power_cost_is_a_times_rows_times_length_to_the_p(work, model):
    rows, seq_len = np.array(work).T
    expected = [model.a * b * math.pow(s, model.p) for b, s in work]
    assert close(bucketed_cost(model, rows, seq_len), expected)


@given(WORK, QUADRATICS)
@examples(50)
def test_quadratic_cost_sums_its_terms_over_sequences(work, model):
    rows, seq_len = np.array(work).T
    expected = [
        model.c0 + math.fsum([model.c_sequence + model.c1 * s + model.c2 * s * s] * b)
        for b, s in work
    ]  # one addend for each sequence
    assert close(bucketed_cost(model, rows, seq_len), expected)


@pytest.mark.parametrize("model", [PowerCost(), QuadraticCost(0.0, 0.0, 1.0)])
def test_costs_of_long_sequences_do_not_overflow_small_integers(model):
    cost = bucketed_cost(model, np.array([100], np.int32), np.array([75_600], np.int32))
    assert cost.tolist() == [100 * 75_600**2]


@given(costs=COST_FILES)
@examples(40)
def test_a_cost_file_comes_back_as_it_was_written(tmp_path_factory, costs):
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    write_cost_file(path, costs)
    assert read_cost_file(path) == costs
    assert json.loads(path.read_text())["format"] == FORMAT


def test_missing_fields_of_a_cost_file_are_none(tmp_path):
    path = write_json(tmp_path / "cost.json", {"format": FORMAT, "power": {"p": 1.7}})
    assert read_cost_file(path) == CostFile(power=PowerCost(1.7, 1.0))


def test_a_file_with_the_name_that_a_field_had_is_read(tmp_path):
    path = write_json(tmp_path / "cost.json", {"format": FORMAT, "anchor_bytes": 1105920.0})
    assert read_cost_file(path) == CostFile(bytes_per_split_token=1105920.0)
    wrong = write_json(tmp_path / "cost.json", {"format": FORMAT, "anchor_bytes": -1})
    assert "bytes_per_split_token is -1" in refusal(read_cost_file, wrong)


def test_the_calibration_that_benchmarks_plan_with_is_read():
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    costs = read_cost_file(folder / "calibration_wan_1_3b_h200.json")
    assert costs.bytes_per_split_token == 12 * 2 * 1536 * 30


def test_a_missing_cost_file_is_refused(tmp_path):
    message = refusal(read_cost_file, tmp_path / "cost.json")
    assert str(tmp_path / "cost.json") in message
    assert "no such cost model" in message


@pytest.mark.parametrize("content", [b"", b"{", b"c0: 1", b'{"format": "alload', b"\xff\xfe{}"])
def test_invalid_json_is_refused(tmp_path, content):
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    message = refusal(read_cost_file, path)
    assert str(path) in message
    assert "is not valid" in message


@pytest.mark.parametrize("content", [[], 3, None, {}, {"m_mem": 3}, {"format": FORMAT + "0"}])
def test_json_of_another_format_is_refused(tmp_path, content):
    path = write_json(tmp_path / "cost.json", content)
    message = refusal(read_cost_file, path)
    assert str(path) in message
    assert FORMAT in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"memory": 3}, "memory"),
        ({"memory": {"base": 1.0}}, "per_token"),
        ({"throughput": 3}, "throughput"),
        ({"power": {"q": 2.0}}, "q"),
        ({"quadratic": {"c0": 1.0, "c1": 1.0, "c2": 1.0, "c3": 1.0}}, "c3"),
        ({"quadratic": {"c0": 1.0, "c1": 1.0}}, "c2"),
        ({"power": 2.0}, "power"),
        ({"quadratic": [1, 2, 3]}, "quadratic"),
    ],
)
def test_fields_that_are_unknown_or_missing_are_refused(tmp_path, fields, named):
    path = write_json(tmp_path / "cost.json", {"format": FORMAT} | fields)
    message = refusal(read_cost_file, path)
    assert str(path) in message
    assert named in message
    assert "power, quadratic, sparse, memory, m_mem" in message or "object of numbers" in message


@given(st.floats(0, 1e11), st.floats(1e3, 1e6), st.floats(1.1, 8), st.floats(0, 0.3))
@examples(50)
def test_m_mem_is_the_maximum_that_fits_with_the_margin(base, per_token, times, margin):
    memory = MemoryModel(base, per_token)
    budget = times * (base + 1000 * per_token) / (1 - margin)
    tokens = memory.max_tokens(budget, margin)
    assert memory.bytes_of(tokens) <= budget * (1 - margin) * (1 + 1e-12)
    assert memory.bytes_of(tokens + 1) > budget * (1 - margin) * (1 - 1e-12)


def test_m_mem_includes_memory_per_sequence():
    memory = MemoryModel(1e9, 1e5, 1e7)
    tokens = memory.max_tokens(5e9, 0.0, shortest=100)
    assert memory.bytes_of(tokens, tokens / 100) == pytest.approx(5e9, rel=1e-3)
    assert tokens < memory.max_tokens(5e9, 0.0)


def test_a_model_that_fills_a_device_alone_is_refused():
    message = refusal(MemoryModel(80e9, 1e6).max_tokens, 80e9)
    assert "80.0 GB before any token" in message
    assert "more devices" in message
