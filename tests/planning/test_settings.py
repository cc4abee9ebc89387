import dataclasses
import pkgutil
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, of_lengths, refusal, refused, write_json

import alload_jax.planning
from alload_jax.errors import InputError
from alload_jax.planning.cost import FORMAT, CostFile, PowerCost, QuadraticCost, bucketed_cost
from alload_jax.planning.factory import RunLength, choose_policy, make_plan, make_policy
from alload_jax.planning.metrics import programs_of
from alload_jax.planning.policies import PORTFOLIO, find_policy
from alload_jax.planning.policies.bucketed import DualConstraint, EqualTokens, Fixed
from alload_jax.planning.policies.search import makespan
from alload_jax.planning.settings import PlanningConfig, case_name, policy_config

QUADRATIC = {"c0": 1e-3, "c1": 1e-6, "c2": 1e-11}


@pytest.fixture
def cost_file(tmp_path):
    def write(**fields):
        return str(write_json(tmp_path / "cost.json", {"format": FORMAT} | fields))

    return write


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({name: 0}, [f"planning.{name} is 0", "at least 1"]) for name in ("m_mem", "ranks")),
        ({"micro_batches_per_step": -7}, ["planning.micro_batches_per_step is -7", "at least 1"]),
        ({"p": 0.0}, ["planning.p is 0.0", "above 0"]),
        ({"policy": "dual_constraint", "m_comp": -1.5}, ["m_comp is -1.5", "above 0"]),
        ({"p": float("nan")}, ["planning.p is nan", "above 0"]),
        ({"policy": "fixed"}, ["planning.policy is fixed", "planning.rows"]),
        ({"policy": "equal_tokens", "m_mem": None}, ["planning.m_mem", "planning.cost_model"]),
        ({"policy": "dual_constraint", "m_mem": None}, ["planning.m_mem", "planning.cost_model"]),
        ({"m_comp": 100.0}, ["m_comp is 100.0, whose unit depends on the policy"]),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, said):
    refused(said, PlanningConfig, **{"m_mem": 10} | fields)
    for m_comp in ("auto", "longest"):
        assert PlanningConfig(m_mem=20, m_comp=m_comp).m_comp == m_comp


def test_a_policy_has_the_bounds_of_the_config_and_else_those_of_the_cost_model(
    cost_file, tmp_path
):
    fields = {"power": {"p": 1.7, "a": 2.0}, "m_mem": 50, "m_comp": 900.0}
    dual = {"policy": "dual_constraint", "cost_model": cost_file(**fields)}
    rows = {"4": 3}
    for options, expected in (
        ({"policy": "fixed", "rows": rows}, Fixed(rows, None)),
        ({"policy": "fixed", "rows": 1, "m_mem": 20}, Fixed(1, 20)),
        ({"policy": "equal_tokens", "m_mem": 20}, EqualTokens(20)),
        ({"policy": "dual_constraint", "m_mem": 20}, DualConstraint(20, None, 2.0)),
        (dual, DualConstraint(50, 900.0, 1.7)),
        (dual | {"policy": "equal_tokens"}, EqualTokens(50)),
        (dual | {"policy": "fixed", "rows": 1}, Fixed(1, 50)),
        (dual | {"m_mem": 60, "m_comp": 70.0, "p": 1.2}, DualConstraint(60, 70.0, 1.2)),
    ):
        assert make_policy(PlanningConfig(**options)) == expected
    costs = PlanningConfig(**dual).costs()
    assert costs == CostFile(PowerCost(1.7, 2.0), m_mem=50, m_comp=900.0)
    # One without M_mem does not stand in for it, nor does one that is not there.
    dual["cost_model"] = cost_file(quadratic=QUADRATIC)
    refused((dual["cost_model"], "planning.m_mem"), make_policy, PlanningConfig(**dual))
    dual["cost_model"] = str(tmp_path / "none.json")
    refused((dual["cost_model"],), make_policy, PlanningConfig(**dual))


@pytest.mark.parametrize(
    ("fields", "given", "expected"),
    [
        ({}, {}, PowerCost(2.0)),
        ({}, {"p": 1.5}, PowerCost(1.5)),
        ({"power": {"p": 1.7, "a": 3.0}}, {}, PowerCost(1.7, 3.0)),
        ({"power": {"p": 1.7, "a": 3.0}}, {"p": 1.5}, PowerCost(1.5)),
        ({"power": {"p": 1.7}, "quadratic": QUADRATIC}, {}, QuadraticCost(**QUADRATIC)),
        ({"quadratic": QUADRATIC}, {"p": 1.5}, QuadraticCost(**QUADRATIC)),
    ],
)
def test_the_best_known_cost_model_predicts(cost_file, fields, given, expected):
    path = cost_file(**fields) if fields else None
    config = PlanningConfig(policy="dual_constraint", m_mem=10, cost_model=path, **given)
    assert config.predictor() == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"m_mem": "4096"}, "m_mem"),
        ({"m_mem": 100.5}, "m_mem"),
        ({"m_mem": -5}, "m_mem"),
        ({"m_comp": -1.0}, "m_comp"),
        ({"power": {"p": "2"}}, "p"),
        ({"power": {"p": -1.0}}, "p"),
        ({"quadratic": {"c0": "x", "c1": 1.0, "c2": 1.0}}, "c0"),
    ],
)
def test_values_of_a_cost_model_that_cannot_be_used_are_refused(cost_file, fields, named):
    def plan_and_predict():
        path = cost_file(**{"m_mem": 50} | fields)
        config = PlanningConfig(policy="dual_constraint", cost_model=path)
        make_plan(config, of_lengths(10, 20), 2, seed=0)
        bucketed_cost(config.predictor(), np.array([1]), np.array([10]))

    assert re.search(rf"\b{named}\b", refusal(plan_and_predict))


def test_planning_needs_no_jax():
    modules = [
        module.name
        for module in pkgutil.walk_packages(
            alload_jax.planning.__path__, prefix="alload_jax.planning."
        )
    ]
    assert "alload_jax.planning.policies.bucketed" in modules
    code = f"import sys, {', '.join(modules)}; print([m for m in sys.modules if m[:3] == 'jax'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ranks", "calibrated", "lengths"),
    [
        (1, False, [32_760]),
        (8, True, [256]),
        (1, True, [256, 1024, 32_760]),
        (8, False, [256, 1024]),
    ],
)
def test_without_packed_rows_auto_is_not_predicted_slower_than_equal_tokens(
    cost_file, ranks, calibrated, lengths
):
    samples, cost = of_lengths(np.repeat(lengths, 400)), QuadraticCost(**QUADRATIC)
    given = {"cost_model": cost_file(quadratic=QUADRATIC)} if calibrated else {"p": 2.0}
    auto = PlanningConfig(m_mem=131_072, **given)
    chosen = choose_policy(auto, lambda _: samples, ranks, auto.costs(), packs=False).config
    times = []
    for config in (chosen, dataclasses.replace(auto, policy="equal_tokens")):
        plan = make_plan(config, samples, ranks, seed=0)
        times.append(makespan(plan.epoch(0), samples.seq_len, cost))
    assert times[0] <= 1.02 * times[1]


def portfolio_seconds(samples, ranks, costs, packs, length):
    """Predicted seconds of the run by policy, each planned by itself."""
    found = {}
    for name in PORTFOLIO:
        policy, _, mode = name.partition(":")
        if (find_policy(policy).packed and not packs) or (mode == "independent" and ranks == 1):
            continue
        config = policy_config(PlanningConfig("balanced", m_mem=131_072), name)
        epoch = make_plan(config, samples, ranks, 0, costs).epoch(0)
        time = makespan(epoch, samples.seq_len, costs.quadratic)
        first_step = costs.first_step_seconds(programs_of(epoch))
        found[case_name(config)] = length.seconds(time, epoch.steps, first_step)
    return found


@given(
    st.lists(st.integers(200, 60_000), min_size=1, max_size=6),
    st.integers(1, 150),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
    st.sampled_from([RunLength(1.0), RunLength(100.0), RunLength(None, 50)]),
)
@examples(8)
def test_no_policy_is_predicted_much_faster_than_that_of_auto(kinds, count, ranks, packs, length):
    lengths = np.random.default_rng(0).choice(kinds, count)
    samples = of_lengths(*lengths.tolist())
    costs = CostFile(quadratic=QuadraticCost(0.05, 2e-5, 1.2e-9, 1e-3))
    auto = PlanningConfig(m_mem=131_072)
    chosen, reason = choose_policy(
        auto, lambda _: samples, ranks, costs, packs=packs, length=length
    )
    seconds = portfolio_seconds(samples, ranks, costs, packs, length)
    assert seconds[case_name(chosen)] <= 1.02 * min(seconds.values()) * (1 + 1e-9)
    assert case_name(chosen) in reason
    assert "\n" not in reason


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_mode_of_ranks_that_no_policy_can_run_is_refused(ranks):
    samples, costs = of_lengths(100, 200, 300), CostFile()
    given = PlanningConfig(m_mem=1000, ranks_mode="independent")
    devices = {"packs": False, "independent": False}
    with pytest.raises(InputError, match=r"ranks_mode is independent, but one rank.*leave it out"):
        choose_policy(given, lambda _: samples, ranks, costs, **devices)


def test_auto_keeps_a_given_mode_of_ranks_and_is_not_made():
    samples, costs = of_lengths(100, 200, 300), CostFile()
    given = PlanningConfig(m_mem=1000, ranks_mode="independent")
    chosen = choose_policy(given, lambda _: samples, 4, costs, packs=False).config
    assert chosen.ranks_mode == "independent"
    with pytest.raises(ValueError, match="choose_policy"):
        make_policy(given)
