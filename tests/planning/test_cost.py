import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, refused, write_json

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


@given(WORK, POWERS, QUADRATICS)
@examples(50)
def test_rows_cost_by_the_formulas(work, power, quadratic):
    rows, seq_len = np.array(work).T
    expected = [power.a * b * math.pow(s, power.p) for b, s in work]
    np.testing.assert_allclose(bucketed_cost(power, rows, seq_len), expected, rtol=1e-12)
    c0, c1, c2, each = quadratic.c0, quadratic.c1, quadratic.c2, quadratic.c_sequence
    expected = [c0 + math.fsum([each + c1 * s + c2 * s * s] * b) for b, s in work]
    np.testing.assert_allclose(bucketed_cost(quadratic, rows, seq_len), expected, rtol=1e-12)


@pytest.mark.parametrize("model", [PowerCost(), QuadraticCost(0.0, 0.0, 1.0)])
def test_costs_of_long_sequences_do_not_overflow_small_integers(model):
    cost = bucketed_cost(model, np.array([100], np.int32), np.array([75_600], np.int32))
    assert cost.tolist() == [100 * 75_600**2]


# ---------------------------------------------------------------- files


@given(costs=COST_FILES)
@examples(40)
def test_a_cost_file_comes_back_as_it_was_written(tmp_path_factory, costs):
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    write_cost_file(path, costs)
    assert read_cost_file(path) == costs
    assert json.loads(path.read_text())["format"] == FORMAT


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"power": {"p": 1.7}}, CostFile(power=PowerCost(1.7, 1.0))),
        ({"anchor_bytes": 1105920.0}, CostFile(bytes_per_split_token=1105920.0)),  # its old name
    ],
)
def test_fields_may_be_missing_or_have_the_name_that_they_had(tmp_path, fields, expected):
    path = write_json(tmp_path / "cost.json", {"format": FORMAT} | fields)
    assert read_cost_file(path) == expected


def test_the_calibration_that_benchmarks_plan_with_is_read():
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    costs = read_cost_file(folder / "calibration_wan_1_3b_h200.json")
    assert costs.bytes_per_split_token == 12 * 2 * 1536 * 30


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such cost model"),
        *((text, "is not valid") for text in (b"", b"{", b"c0: 1", b"\xff\xfe{}")),
        *((json.dumps(x).encode(), FORMAT) for x in ([], 3, None, {}, {"format": FORMAT + "0"})),
    ],
)
def test_what_is_no_cost_file_is_refused(tmp_path, content, said):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_bytes(content)
    refused((path, said), read_cost_file, path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"memory": 3}, "memory"),
        ({"memory": {"base": 1.0}}, "per_token"),
        ({"throughput": 3}, "throughput"),
        ({"power": {"q": 2.0}}, "q"),
        ({"quadratic": {"c0": 1.0, "c1": 1.0, "c2": 1.0, "c3": 1.0}}, "c3"),
        ({"quadratic": [1, 2, 3]}, "quadratic"),
        ({"anchor_bytes": -1}, "bytes_per_split_token is -1"),
    ],
)
def test_fields_that_are_unknown_missing_or_wrong_are_refused(tmp_path, fields, named):
    path = write_json(tmp_path / "cost.json", {"format": FORMAT} | fields)
    message = refused((path, named), read_cost_file, path)
    remedies = ("power, quadratic, sparse, memory, m_mem", "object of numbers", "0 or more")
    assert any(remedy in message for remedy in remedies), message


# ---------------------------------------------------------------- memory


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
    refused(("80.0 GB before any token", "more devices"), MemoryModel(80e9, 1e6).max_tokens, 80e9)
