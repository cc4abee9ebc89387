"""Costs of models of which some layers have sparse attention."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, of_lengths, refusal

from alload_jax.models.wan.costs import WAN_1_3B
from alload_jax.planning.analytic import analytic_costs
from alload_jax.planning.cost import (
    CostFile,
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
from alload_jax.planning.fit import (
    CostFilter,
    Point,
    SparsePoint,
    fit_run,
    fit_sparse,
    predicted_sparse,
)
from alload_jax.planning.metrics import SimulationSettings, plan_metrics, simulate
from alload_jax.planning.settings import PlanningConfig

WAN = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)
TERMS = SparseTerms(1.4e-9, 1.5e-6, 6e-12)
LAYERS = SparseLayers(25 / 30, 0.1)
MIXED = of_lengths(*[1560] * 60, *[16_380] * 20, *[32_760] * 15, *[75_600] * 9)

COEFFICIENT = st.floats(0, 1e3)
QUADRATICS = st.builds(QuadraticCost, *[COEFFICIENT] * 4)
TERMS_OF = st.builds(SparseTerms, *[COEFFICIENT] * 3)
LAYERS_OF = st.builds(
    SparseLayers, st.floats(0, 1), st.floats(0.001, 1), st.integers(0, 40_000), st.just(64)
)
LENGTHS = st.lists(st.integers(1, 100_000), min_size=1, max_size=9).map(np.array)


def sparse_cost(quadratic=WAN, terms=TERMS, layers=LAYERS):
    return SparseCost(**vars(quadratic), **vars(terms), layers=layers)


# ---------------------------------------------------------------- what a sequence costs


@given(QUADRATICS, TERMS_OF, LAYERS_OF, LENGTHS)
@examples(60)
def test_dense_layers_cost_exactly_what_the_quadratic_model_says(quadratic, terms, layers, lengths):
    for same in (
        dataclasses.replace(layers, share=0.0),
        dataclasses.replace(layers, min_tokens=100_001),
    ):
        model = sparse_cost(quadratic, terms, same)
        for cost in (
            lambda model: model.sequence_cost(lengths),
            lambda model: marginal_cost(model, lengths),
            lambda model: bucketed_cost(model, lengths % 7, lengths),
        ):
            np.testing.assert_array_equal(cost(model), cost(quadratic))


@given(
    st.lists(st.just(1.0) | st.floats(0.01, 0.99), min_size=1, max_size=6),
    st.integers(1, 100_000),
    TERMS_OF,
)
@examples(60)
def test_a_sequence_costs_the_sum_over_its_layers(densities, seq_len, terms):
    """Each layer alone, dense or sparse, with at least one block of keys for each query."""
    sparse = [density for density in densities if density < 1]
    # All sparse layers attend to the mean, which matters where one block is the least.
    mean = sum(sparse) / len(sparse) if sparse else 1.0
    layers = SparseLayers(len(sparse) / len(densities), mean, 1000)
    found = sparse_cost(QuadraticCost(2.0, 3.0, 5.0, 7.0), terms, layers).sequence_cost(
        np.array([seq_len])
    )
    expected = 7.0 + 3.0 * seq_len
    for density in densities:
        if density == 1 or seq_len < 1000:
            attention = 5.0 * seq_len**2
        else:
            keys = min(seq_len, max(64, mean * seq_len))
            attention = terms.c3 * seq_len * keys + terms.c4 * seq_len + terms.c5 * seq_len**2
        expected += attention / len(densities)
    assert found == pytest.approx(expected, rel=1e-9)


# ---------------------------------------------------------------- plans by it


@pytest.mark.parametrize(("policy", "context"), [("equal_tokens", 1), ("balanced", 2)])
def test_terms_times_coefficients_are_the_predicted_cost(policy, context):
    config = PlanningConfig(policy, m_mem=80_000, context=context)
    model = sparse_cost()
    epoch = make_plan(config, MIXED, 4, 0, CostFile(quadratic=model)).epoch(0)
    terms = micro_batch_terms(epoch, MIXED.seq_len, model)
    assert terms.shape[1] == 7
    cost = micro_batch_costs(epoch, MIXED.seq_len, model)
    np.testing.assert_allclose(terms @ np.array(model.coefficients), cost, rtol=1e-9)


def test_balance_splitting_and_simulation_follow_the_sparse_layers():
    model = sparse_cost()
    config = PlanningConfig("balanced", m_mem=80_000, row_tokens=80_000, max_segments=60)
    dense, sparse = (
        make_plan(config, MIXED, 3, 0, CostFile(quadratic=each)) for each in (WAN, model)
    )
    seq_len = MIXED.seq_len
    idle = [plan_metrics(plan.epoch(0), seq_len, model, 80_000).idle for plan in (dense, sparse)]
    assert idle[1] < idle[0]
    assert dense.identity() != sparse.identity()
    json.dumps(sparse.identity())
    metrics = plan_metrics(sparse.epoch(0), seq_len, model, 80_000)
    found = simulate(sparse.epoch(0), seq_len, model, SimulationSettings())
    assert found.seconds == pytest.approx(metrics.cost)
    # The longest clips cost 1.5 times a mean row while attention is dense, and less than one later.
    split = dataclasses.replace(config, context=3, split_above=1.2)
    parts = [
        make_plan(split, MIXED, 3, 0, CostFile(quadratic=each)).epoch(0).packing.is_split.any()
        for each in (WAN, sparse_cost(layers=SparseLayers(1.0, 0.02)))
    ]
    assert parts == [True, False]


# ---------------------------------------------------------------- files


def test_a_cost_file_keeps_sparse_terms_or_gets_those_of_an_h200(tmp_path):
    path = tmp_path / "cost.json"
    write_cost_file(path, CostFile(quadratic=WAN, sparse=TERMS))
    costs = read_cost_file(path)
    assert costs == CostFile(quadratic=WAN, sparse=TERMS)
    model = with_layers(costs, LAYERS).quadratic
    assert model == sparse_cost()
    assert without_layers(model) == (WAN, TERMS)
    assert with_layers(with_layers(costs, SparseLayers()), LAYERS).quadratic == model
    for each in (WAN, model):
        assert cost_of_fields(json.loads(json.dumps(dataclasses.asdict(each)))) == each
    write_cost_file(path, CostFile(quadratic=WAN))
    assert "sparse" not in json.loads(path.read_text())
    model = with_layers(read_cost_file(path), LAYERS).quadratic
    assert (model.c3, model.c4, model.c5) == dataclasses.astuple(assumed_terms(WAN))
    assert with_layers(CostFile(), LAYERS) == CostFile()


GOOD = SparsePoint(Point(1, 20_000, 1.0), SparseLayers(1.0, 0.1))
DENSE = SparsePoint(Point(1, 20_000, 1.0), SparseLayers())
SHORT = SparsePoint(Point(1, 2_000, 1.0), SparseLayers(1.0, 0.1))


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: SparseLayers(share=1.1), "the share of sparse layers is 1.1"),
        (lambda: SparseLayers(share=-0.1), "the share of sparse layers is -0.1"),
        (lambda: SparseLayers(density=0.0), "the density of sparse layers is 0.0"),
        (lambda: fit_sparse([GOOD, GOOD, DENSE], WAN), "dense attention in all layers"),
        (lambda: fit_sparse([GOOD, GOOD, SHORT], WAN), "dense attention in all layers"),
        (lambda: fit_sparse([GOOD], WAN), "measure more"),
    ],
)
def test_impossible_layers_and_points_are_refused(action, words):
    assert words in refusal(action)


@pytest.mark.parametrize("fields", [{"c3": -1.0}, {"c4": 1.0}, {"c3": 1.0, "c9": 1.0}, 3])
def test_wrong_sparse_terms_are_refused(tmp_path, fields):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"format": "alload-cost-model-1", "sparse": fields}))
    assert str(path) in refusal(read_cost_file, path)


@pytest.mark.parametrize("seq_len", [32_768, 131_072])
def test_assumed_attention_is_as_fast_as_measured(seq_len):
    """At 90 % sparsity, without the order in tiles."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "sparse_attention_h200.json"
    [speed] = [
        each
        for each in json.loads(path.read_text())["speeds"]
        if each["shape"]["tokens"] == seq_len and round(each["sparsity"], 2) == 0.9
    ]
    terms = assumed_terms(QuadraticCost(0.0, 0.0, 1.0))
    attention = (1 - speed["sparsity"]) * terms.c3
    assert attention == pytest.approx(1 / speed["both"], rel=0.08)
    choice = terms.c5 + (terms.c4 - 1_250) / seq_len
    assert choice == pytest.approx(speed["selection"] / speed["both"], rel=0.08)


@pytest.mark.parametrize(("seq_len", "faster"), [(32_760, 2.0), (131_072, 3.4)])
def test_steps_with_sparse_attention_are_predicted_to_be_faster(seq_len, faster):
    """All layers of Wan 1.3B at 90 % sparsity; the figures are arithmetic of the kernels' speed."""
    costs = analytic_costs(WAN_1_3B, DEVICES["h200"])
    assert costs.sparse == assumed_terms(costs.quadratic)
    dense, sparse = (
        float(with_layers(costs, layers).quadratic.sequence_cost(np.array([seq_len]))[0])
        for layers in (SparseLayers(), SparseLayers(1.0, 0.1))
    )
    assert dense / sparse == pytest.approx(faster, rel=0.2)


# ---------------------------------------------------------------- fits


@given(
    st.tuples(st.floats(0.5e-9, 5e-9), st.floats(0, 2e-5), st.floats(0, 2e-10)),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.005]),
)
@examples(20)
def test_sparse_terms_are_recovered(coefficients, seed, noise):
    model = sparse_cost(WAN, SparseTerms(*coefficients))
    random = np.random.default_rng(seed)
    points = []
    for density in (0.1, 0.3):
        for seq_len in (16_384, 32_768, 65_536, 80_000):
            layers = SparseLayers(1.0, density)
            exact = SparsePoint(Point(1, seq_len, 1.0), layers)
            seconds = float(predicted_sparse(model, [exact])[0])
            seconds *= float(np.exp(noise * random.standard_normal()))
            points.append(SparsePoint(Point(1, seq_len, seconds), layers))
    found = fit_sparse(points, WAN)
    if not noise:
        np.testing.assert_allclose(found.model.coefficients, model.coefficients, 1e-5, 1e-15)
    assert found.goodness.mape < 0.01
    # What the fit is for: other densities and lengths, and some layers dense.
    other = [
        SparsePoint(Point(2, 50_000, 1.0), SparseLayers(0.8, density)) for density in (0.05, 0.5)
    ]
    np.testing.assert_allclose(
        predicted_sparse(found.model, other), predicted_sparse(model, other), rtol=0.03
    )


def rows_of(true, count=240, noise=0.01):
    """Steps of a run whose layers switch one after another."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        layers = SparseLayers(min(1.0, number / count), 0.5 - 0.4 * number / count)
        lengths = random.choice([1560, 16_380, 32_760, 75_600], int(random.integers(1, 4)))
        seq_len, unit = np.sort(lengths), SparseCost(0.0, 0.0, 1.0, layers=layers)
        attention = [
            float(unit.with_coefficients(each).sequence_cost(seq_len).sum())
            for each in np.eye(7)[3:].tolist()
        ]
        terms = [1.0, float(len(seq_len)), float(seq_len.sum()), *attention]
        seconds = float(np.dot(terms, true.coefficients))
        seconds *= float(np.exp(noise * random.standard_normal()))
        rows.append({"cost_terms": terms, "step_seconds": seconds, "input_wait_seconds": 0.0})
    return rows


def fitted_to(rows, model):
    """A filter that met the rows, and the largest drift on the way."""
    costs, largest = CostFilter(model), 0.0
    for row in rows:
        costs.add(tuple(row["cost_terms"]), row["step_seconds"])
        largest = max(largest, abs(costs.drift(model)))
    return costs, largest


def assert_predicts(model, rows, rtol):
    predicted = [np.dot(row["cost_terms"], model.coefficients) for row in rows]
    np.testing.assert_allclose(predicted, [row["step_seconds"] for row in rows], rtol=rtol)


def test_layers_that_switch_are_no_drift():
    model = sparse_cost()
    costs, largest = fitted_to(rows_of(model), model)
    assert largest < 0.03
    assert_predicts(costs.fitted(), rows_of(model, noise=0.0), 0.01)
    assert costs.fitted().layers == model.layers


def test_the_filter_scales_sparse_terms():
    model = sparse_cost()
    rows = rows_of(dataclasses.replace(model, c3=1.6 * model.c3))
    found = fitted_to(rows, model)[0].fitted()
    assert_predicts(found, rows[-40:], 0.06)
    assert found.c3 > 1.2 * model.c3


@pytest.mark.parametrize("planned_by", [None, sparse_cost()])
def test_runs_with_sparse_layers_are_fitted(planned_by):
    model = sparse_cost()
    found = fit_run(rows_of(model, noise=0.0), planned_by)
    assert found.mape < 0.01
    assert isinstance(found.model, SparseCost)
    assert found.model.c3 == pytest.approx(model.c3, rel=0.05)
    dense = [row | {"cost_terms": row["cost_terms"][:4]} for row in rows_of(model)]
    assert "0 steps can be fitted" in refusal(fit_run, dense, model)
