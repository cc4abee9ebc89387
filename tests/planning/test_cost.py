"""Cost models of dense and of sparse layers, their files, and plans by them."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import WAN, examples, of_lengths, refused, write_json

from alload_jax.models.wan.costs import WAN_1_3B
from alload_jax.planning.analytic import analytic_costs
from alload_jax.planning.cost import (
    FORMAT,
    CostFile,
    MemoryModel,
    PowerCost,
    QuadraticCost,
    SparseCost,
    SparseLayers,
    SparseTerms,
    assumed_terms,
    bucketed_cost,
    cost_of_fields,
    marginal_cost,
    micro_batch_costs,
    micro_batch_terms,
    read_cost_file,
    with_layers,
    without_layers,
    write_cost_file,
)
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import SimulationSettings, plan_metrics, simulate
from alload_jax.planning.settings import PlanningConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TERMS = SparseTerms(1.4e-9, 1.5e-6, 6e-12)
LAYERS = SparseLayers(25 / 30, 0.1)
SPARSE = SparseCost(**vars(WAN), **vars(TERMS), layers=LAYERS)
MIXED = of_lengths(*[1560] * 60, *[16_380] * 20, *[32_760] * 15, *[75_600] * 9)

WORK = st.lists(st.tuples(st.integers(1, 512), st.integers(1, 100_000)), min_size=1, max_size=10)
COEFFICIENT = st.floats(1e-12, 1e3)
POWERS = st.builds(PowerCost, st.floats(0.5, 3.5), COEFFICIENT)
QUADRATICS = st.builds(QuadraticCost, *[COEFFICIENT] * 4)
TERMS_OF = st.builds(SparseTerms, *[COEFFICIENT] * 3)
COST_FILES = st.builds(
    CostFile,
    power=st.none() | POWERS,
    quadratic=st.none() | QUADRATICS,
    sparse=st.none() | TERMS_OF,
    memory=st.none() | st.builds(MemoryModel, *[COEFFICIENT] * 3),
    m_mem=st.none() | st.integers(1, 10**9),
    m_comp=st.none() | COEFFICIENT,
    bytes_per_split_token=st.none() | COEFFICIENT,
    program_seconds=st.none() | COEFFICIENT,
    start_seconds=st.none() | st.just(0.0),
    model=st.none() | st.just({"dim": 8, "patch_size": [1, 2, 2]}),
    device=st.none() | st.just("NVIDIA H200"),
)


@given(WORK, POWERS, QUADRATICS)
@examples(40)
def test_rows_cost_by_the_formulas(work, power, quadratic):
    rows, seq_len = np.array(work, np.int32).T  # whose squares overflow
    expected = [power.a * b * math.pow(s, power.p) for b, s in work]
    np.testing.assert_allclose(bucketed_cost(power, rows, seq_len), expected, rtol=1e-12)
    c0, c1, c2, each = quadratic.c0, quadratic.c1, quadratic.c2, quadratic.c_sequence
    expected = [c0 + math.fsum([each + c1 * s + c2 * s * s] * b) for b, s in work]
    np.testing.assert_allclose(bucketed_cost(quadratic, rows, seq_len), expected, rtol=1e-12)


@given(
    st.lists(st.just(1.0) | st.floats(0.01, 0.99), min_size=1, max_size=6),
    st.sampled_from([999, 1000]) | st.integers(1, 100_000),
    TERMS_OF,
)
@examples(60)
def test_a_sequence_costs_the_sum_over_its_layers(densities, seq_len, terms):
    """Each layer alone, dense or sparse, with at least one block of keys for each query."""
    sparse = [density for density in densities if density < 1]
    # All sparse layers attend to the mean, which matters where one block is the least.
    mean = sum(sparse) / len(sparse) if sparse else 1.0
    layers = SparseLayers(len(sparse) / len(densities), mean, 1000)
    quadratic, lengths = QuadraticCost(2.0, 3.0, 5.0, 7.0), np.array([seq_len])
    model = SparseCost(**vars(quadratic), **vars(terms), layers=layers)
    expected = 7.0 + 3.0 * seq_len
    for density in densities:
        if density == 1 or seq_len < 1000:
            attention = 5.0 * seq_len**2
        else:
            keys = min(seq_len, max(64, mean * seq_len))
            attention = terms.c3 * seq_len * keys + terms.c4 * seq_len + terms.c5 * seq_len**2
        expected += attention / len(densities)
    assert model.sequence_cost(lengths) == pytest.approx(expected, rel=1e-9)
    dense = model.at(dataclasses.replace(layers, share=0.0))
    assert dense.sequence_cost(lengths) == quadratic.sequence_cost(lengths)
    assert marginal_cost(dense, lengths) == marginal_cost(quadratic, lengths)


@pytest.mark.parametrize("model", [WAN, SPARSE])
@pytest.mark.parametrize(
    ("policy", "context"), [("equal_tokens", 1), ("first_fit", 1), ("balanced", 2)]
)
def test_terms_times_coefficients_are_the_predicted_cost(policy, context, model):
    config = PlanningConfig(policy, m_mem=80_000, context=context, link_bandwidth=1e30)
    epoch = make_plan(config, MIXED, 4, 0, CostFile(quadratic=model)).epoch(0)
    terms = micro_batch_terms(epoch, model)
    cost = micro_batch_costs(epoch, model)
    np.testing.assert_allclose(terms @ np.array(model.coefficients), cost, rtol=1e-9)


def test_balance_splitting_and_simulation_follow_the_sparse_layers():
    config = PlanningConfig("balanced", m_mem=80_000, row_tokens=80_000, max_segments=60)
    plans = [make_plan(config, MIXED, 3, 0, CostFile(quadratic=each)) for each in (WAN, SPARSE)]
    dense, sparse = (plan_metrics(plan.epoch(0), SPARSE, 80_000) for plan in plans)
    assert sparse.idle < dense.idle
    assert plans[0].identity() != plans[1].identity()
    found = simulate(plans[1].epoch(0), SPARSE, SimulationSettings())
    assert found.seconds == pytest.approx(sparse.cost)
    # The longest clips cost 1.5 times a mean row while attention is dense, and less than one later.
    split = dataclasses.replace(config, context=3, split_above=1.2)
    parts = [
        make_plan(split, MIXED, 3, 0, CostFile(quadratic=each)).epoch(0).packing.is_split.any()
        for each in (WAN, SPARSE.at(SparseLayers(1.0, 0.02)))
    ]
    assert parts == [True, False]


@given(costs=COST_FILES)
@examples(30)
def test_a_cost_file_comes_back_as_it_was_written(tmp_path_factory, costs):
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    write_cost_file(path, costs)
    assert read_cost_file(path) == costs
    assert json.loads(path.read_text())["format"] == FORMAT


def test_a_full_disk_leaves_the_cost_file_that_was_there(tmp_path, monkeypatch):
    def full(path, text):
        path.write_bytes(b"")
        raise OSError(28, "No space left on device")

    path = tmp_path / "cost.json"
    write_cost_file(path, CostFile(m_mem=50))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"cost\.json"):
        write_cost_file(path, CostFile(m_mem=60))
    assert read_cost_file(path) == CostFile(m_mem=50)


def test_fields_may_be_missing_or_have_the_name_that_they_had(tmp_path):
    for fields, expected in (
        ({"power": {"p": 1.7}}, CostFile(power=PowerCost(1.7, 1.0))),
        ({"anchor_bytes": 1105920.0}, CostFile(bytes_per_split_token=1105920.0)),  # its old name
        ({"m_mem": 50.0}, CostFile(m_mem=50)),
    ):
        path = write_json(tmp_path / "cost.json", {"format": FORMAT} | fields)
        assert read_cost_file(path) == expected
    costs = read_cost_file(RESULTS / "calibration_wan_1_3b_h200.json")
    assert costs.bytes_per_split_token == 12 * 2 * 1536 * 30


def test_compilation_is_measured_or_assumed():
    assert (CostFile().most_programs(), CostFile().first_step_seconds(2)) == (64, 46.0)
    for seconds, programs in ((0.0, 64), (10.0, 60), (400.0, 1), (700.0, 1)):
        measured = CostFile(program_seconds=seconds, start_seconds=0.0)
        assert measured.most_programs() == programs
        assert measured.first_step_seconds(2) == 2 * seconds


def test_what_is_no_cost_file_is_refused(tmp_path):
    for content, said in (
        (None, "no such cost model"),
        *((text, "is not valid") for text in (b"", b"{", b"\xff\xfe{}")),
        *((json.dumps(x).encode(), FORMAT) for x in ([], {}, {"format": FORMAT + "0"})),
        *(
            (json.dumps({"format": FORMAT} | fields).encode(), said)
            for fields, said in (
                ({"memory": 3}, "memory is 3; it must be an object of numbers"),
                ({"memory": {"base": 1.0}}, "per_token"),
                ({"throughput": 3}, "the fields are power, quadratic, sparse, memory, m_mem"),
                ({"power": {"q": 2.0}}, "q"),
                ({"anchor_bytes": -1}, "bytes_per_split_token is -1; it must be a number, 0 or"),
                *(
                    ({"m_mem": x}, f"m_mem is {x!r}; it must be a number, above 0")
                    for x in ("4096", 0, -5, True)
                ),
                ({"m_mem": 100.5}, "m_mem is 100.5; it must be a whole number"),
                ({"m_comp": 0}, "m_comp is 0; it must be a number, above 0"),
                ({"power": {"p": -1.0}}, "p is -1.0; it must be a number, above 0"),
                ({"memory": {"base": 1.0, "per_token": 0}}, "per_token is 0"),
                ({"sparse": {"c3": -1.0}}, "c3 is -1.0; it must be a number, 0 or more"),
                ({"sparse": {"c4": 1.0}}, "c3"),
                ({"start_seconds": -1}, "start_seconds is -1"),
                ({"program_seconds": "x"}, "program_seconds is 'x'"),
                ({"model": 3}, "model is 3"),
                ({"device": 3}, "device is 3"),
            )
        ),
    ):
        path = tmp_path / "cost.json"
        if content is not None:
            path.write_bytes(content)
        refused((path, said), read_cost_file, path)


def test_a_cost_file_keeps_sparse_terms_or_gets_those_of_an_h200():
    costs = CostFile(quadratic=WAN, sparse=TERMS)
    assert with_layers(costs, LAYERS).quadratic == SPARSE
    assert without_layers(SPARSE) == (WAN, TERMS)
    assert without_layers(WAN) == (WAN, None)
    assert with_layers(with_layers(costs, SparseLayers()), LAYERS).quadratic == SPARSE
    for each in (WAN, SPARSE):
        assert cost_of_fields(json.loads(json.dumps(dataclasses.asdict(each)))) == each
    model = with_layers(CostFile(quadratic=WAN), LAYERS).quadratic
    assert (model.c3, model.c4, model.c5) == dataclasses.astuple(assumed_terms(WAN))
    assert with_layers(CostFile(), LAYERS) == CostFile()


def test_layers_have_shares_and_densities():
    for name, value in (("share", 1.1), ("share", -0.1), ("density", 0.0)):
        refused([f"the {name} of sparse layers is {value}"], SparseLayers, **{name: value})


@pytest.mark.parametrize(("seq_len", "faster"), [(32_768, 2.0), (131_072, 3.4)])
def test_assumed_attention_is_as_fast_as_measured(seq_len, faster):
    """At 90 % sparsity, without the order in tiles; a step's ratio is arithmetic of it."""
    speeds = json.loads((RESULTS / "sparse_attention_h200.json").read_text())["speeds"]
    speeds = [each for each in speeds if round(each["sparsity"], 2) == 0.9]
    [speed] = [each for each in speeds if each["shape"]["tokens"] == seq_len]
    terms = assumed_terms(QuadraticCost(0.0, 0.0, 1.0))
    attention = (1 - speed["sparsity"]) * terms.c3
    assert attention == pytest.approx(1 / speed["both"], rel=0.08)
    choice = terms.c5 + (terms.c4 - 1_250) / seq_len
    assert choice == pytest.approx(speed["selection"] / speed["both"], rel=0.08)
    costs = analytic_costs(WAN_1_3B, DEVICES["h200"])
    assert costs.sparse == assumed_terms(costs.quadratic)
    dense, sparse = (
        float(with_layers(costs, layers).quadratic.sequence_cost(np.array([seq_len]))[0])
        for layers in (SparseLayers(), SparseLayers(1.0, 0.1))
    )
    assert dense / sparse == pytest.approx(faster, rel=0.2)


@given(st.floats(0, 1e11), st.floats(1e3, 1e6), st.floats(1.1, 8), st.floats(0, 0.3))
@examples(40)
def test_m_mem_is_the_maximum_that_fits_with_the_margin(base, per_token, times, margin):
    memory = MemoryModel(base, per_token)
    budget = times * (base + 1000 * per_token) / (1 - margin)
    tokens = memory.max_tokens(budget, margin)
    assert memory.bytes_of(tokens) <= budget * (1 - margin) * (1 + 1e-12)
    assert memory.bytes_of(tokens + 1) > budget * (1 - margin) * (1 - 1e-12)


def test_m_mem_includes_memory_per_sequence_and_a_full_device_is_refused():
    memory = MemoryModel(1e9, 1e5, 1e7)
    tokens = memory.max_tokens(5e9, 0.0, shortest=100)
    assert memory.bytes_of(tokens, tokens / 100) == pytest.approx(5e9, rel=1e-3)
    assert tokens < memory.max_tokens(5e9, 0.0)
    assert MemoryModel(0.0, 1e6).max_tokens(100e6) == 95
    assert MemoryModel(79e9, 1e9).max_tokens(80e9, 0.0) == 1
    full = MemoryModel(80e9, 1e6)
    refused(("80.0 GB before any token", "80.0 GB with", "more devices"), full.max_tokens, 80e9)
    for budget in (0, math.inf):
        refused(("it must be above 0",), full.max_tokens, budget)
    assert CostFile(memory=memory).sequence_tokens() == 100
    assert CostFile().sequence_tokens() == 0
