import dataclasses
import pkgutil
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, of_lengths, refusal, write_json

import alload_jax.planning
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


@pytest.mark.parametrize("name", ["micro_batches_per_step", "m_mem", "ranks"])
@pytest.mark.parametrize("value", [0, -7])
def test_counts_below_one_are_refused(name, value):
    message = refusal(PlanningConfig, **{"m_mem": 10, name: value})
    assert f"planning.{name} is {value}" in message
    assert "at least 1" in message


@pytest.mark.parametrize("name", ["m_comp", "p"])
@pytest.mark.parametrize("value", [0.0, -1.5, float("nan")])
def test_bounds_that_are_not_above_zero_are_refused(name, value):
    message = refusal(PlanningConfig, **{"m_mem": 10, name: value})
    assert f"planning.{name} is {value}" in message
    assert "above 0" in message


def test_fixed_without_rows_is_refused():
    message = refusal(PlanningConfig, policy="fixed", m_mem=10)
    assert "planning.policy is fixed" in message
    assert "planning.rows" in message


@pytest.mark.parametrize("policy", ["equal_tokens", "dual_constraint"])
def test_policies_without_memory_bound_are_refused(policy):
    message = refusal(PlanningConfig, policy=policy)
    for part in (policy, "planning.m_mem", "planning.cost_model"):
        assert part in message


@pytest.mark.parametrize("policy", ["equal_tokens", "dual_constraint"])
def test_a_cost_model_without_m_mem_does_not_stand_in_for_it(cost_file, policy):
    path = cost_file(quadratic=QUADRATIC)
    config = PlanningConfig(policy=policy, cost_model=path)
    message = refusal(make_policy, config)
    assert path in message
    assert "planning.m_mem" in message


def test_policies_are_made_with_the_configs_bounds():
    assert make_policy(PlanningConfig("fixed", rows=3)) == Fixed(3, None)
    assert make_policy(PlanningConfig("fixed", rows={"4": 3}, m_mem=20)) == Fixed({"4": 3}, 20)
    assert make_policy(PlanningConfig("equal_tokens", m_mem=20)) == EqualTokens(20)
    assert make_policy(PlanningConfig(policy="dual_constraint", m_mem=20)) == DualConstraint(
        20, None, 2.0
    )
    assert make_policy(
        PlanningConfig(policy="dual_constraint", m_mem=20, m_comp=9.0, p=1.5)
    ) == DualConstraint(20, 9.0, 1.5)


def test_the_cost_model_gives_what_the_config_leaves_open(cost_file):
    path = cost_file(power={"p": 1.7, "a": 2.0}, m_mem=50, m_comp=900.0)
    config = PlanningConfig(policy="dual_constraint", cost_model=path)
    assert make_policy(config) == DualConstraint(50, 900.0, 1.7)
    assert config.costs() == CostFile(PowerCost(1.7, 2.0), m_mem=50, m_comp=900.0)
    assert make_policy(PlanningConfig("equal_tokens", cost_model=path)) == EqualTokens(50)
    assert make_policy(PlanningConfig("fixed", rows=1, cost_model=path)) == Fixed(1, 50)


def test_the_configs_bounds_win_over_the_cost_models(cost_file):
    path = cost_file(power={"p": 1.7}, m_mem=50, m_comp=900.0)
    config = PlanningConfig(policy="dual_constraint", cost_model=path, m_mem=60, m_comp=70.0, p=1.2)
    assert make_policy(config) == DualConstraint(60, 70.0, 1.2)


def test_a_plan_is_the_same_whoever_gave_its_bounds(cost_file):
    path = cost_file(power={"p": 1.7, "a": 3.0}, quadratic=QUADRATIC, m_mem=50, m_comp=900.0)
    samples = of_lengths(10, 20, 10, 50)
    by_file = make_plan(
        PlanningConfig(policy="dual_constraint", cost_model=path), samples, 2, seed=1
    )
    config = PlanningConfig(policy="dual_constraint", m_mem=50, m_comp=900.0, p=1.7)
    assert by_file.fingerprint() == make_plan(config, samples, 2, seed=1).fingerprint()


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


def test_a_missing_cost_model_is_refused_by_path(tmp_path):
    path = str(tmp_path / "cost.json")
    assert path in refusal(make_policy, PlanningConfig(policy="dual_constraint", cost_model=path))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"m_mem": "4096"}, "m_mem"),
        ({"m_mem": 100.5}, "m_mem"),
        ({"m_mem": -5}, "m_mem"),
        ({"m_comp": "1e9"}, "m_comp"),
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


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("lengths", [[32_760], [256], [256, 1024, 32_760]], ids=str)
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
    st.integers(1, 300),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
    st.sampled_from([RunLength(1.0), RunLength(100.0), RunLength(None, 50)]),
)
@examples(25)
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


def test_auto_keeps_a_given_mode_of_ranks_and_is_not_made():
    samples, costs = of_lengths(100, 200, 300), CostFile()
    given = PlanningConfig(m_mem=1000, ranks_mode="independent")
    chosen = choose_policy(given, lambda _: samples, 4, costs, packs=False).config
    assert chosen.ranks_mode == "independent"
    with pytest.raises(ValueError, match="choose_policy"):
        make_policy(given)


def test_a_number_for_m_comp_needs_a_policy_whose_unit_it_has():
    with pytest.raises(ValueError, match=r"m_comp is 100.0, whose unit depends on the policy"):
        PlanningConfig(m_mem=20, m_comp=100.0)
    for m_comp in ("auto", "longest"):
        assert PlanningConfig(m_mem=20, m_comp=m_comp).m_comp == m_comp
