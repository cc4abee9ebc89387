"""Settings of plans, the choice of a policy, and policies that these tests register."""

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_cases import examples, of_lengths, refused, write_json

from alload_jax import cli
from alload_jax.config import read_config
from alload_jax.errors import run_command
from alload_jax.planning.cost import FORMAT, CostFile, PowerCost, QuadraticCost
from alload_jax.planning.factory import RunLength, choose_policy, make_plan, make_policy
from alload_jax.planning.metrics import plan_metrics, programs_of
from alload_jax.planning.policies import PORTFOLIO, find_policy, policy_names, register_policy
from alload_jax.planning.policies.bucketed import Bucketed, DualConstraint, EqualTokens, Fixed
from alload_jax.planning.policies.policy import makespan
from alload_jax.planning.settings import PlanningConfig, case_name, policy_config

QUADRATIC = {"c0": 1e-3, "c1": 1e-6, "c2": 1e-11}


@pytest.fixture
def cost_file(tmp_path):
    def write(**fields):
        return str(write_json(tmp_path / "cost.json", {"format": FORMAT} | fields))

    return write


def test_settings_that_make_no_sense_are_refused():
    for fields, said in (
        ({"policy": "fixed"}, ["planning.policy is fixed", "planning.rows"]),
        ({"policy": "equal_tokens", "m_mem": None}, ["planning.m_mem", "planning.cost_model"]),
        ({"policy": "dual_constraint", "m_mem": None}, ["planning.m_mem", "planning.cost_model"]),
        ({"m_comp": 100.0}, ["m_comp is 100.0, whose unit depends on the policy"]),
    ):
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
    split = PlanningConfig("balanced", m_mem=20, context=4, link_bandwidth=1e9)
    quadratic = QuadraticCost(**QUADRATIC)
    for sent, expected in ((8e6, 8e6 * 3 / 4 / 1e9), (None, 0.0)):
        found = CostFile(quadratic=quadratic, bytes_per_split_token=sent)
        plan = make_plan(split, of_lengths(30, *[4] * 9), 4, 0, found).epoch(0)
        assert plan.packing.seconds_per_split_token == pytest.approx(expected)
    assert split.seconds_per_split_token(CostFile(bytes_per_split_token=8e6)) == 0
    # One without M_mem does not stand in for it, nor does one that is not there.
    dual["cost_model"] = cost_file(quadratic=QUADRATIC)
    refused((dual["cost_model"], "planning.m_mem"), make_policy, PlanningConfig(**dual))
    dual["cost_model"] = str(tmp_path / "none.json")
    refused((dual["cost_model"],), make_policy, PlanningConfig(**dual))


def test_the_best_known_cost_model_predicts(cost_file):
    for fields, more, expected in (
        ({}, {}, PowerCost(2.0)),
        ({}, {"p": 1.5}, PowerCost(1.5)),
        ({"power": {"p": 1.7, "a": 3.0}}, {}, PowerCost(1.7, 3.0)),
        ({"power": {"p": 1.7, "a": 3.0}}, {"p": 1.5}, PowerCost(1.5)),
        ({"power": {"p": 1.7}, "quadratic": QUADRATIC}, {}, QuadraticCost(**QUADRATIC)),
        ({"quadratic": QUADRATIC}, {"p": 1.5}, QuadraticCost(**QUADRATIC)),
    ):
        path = cost_file(**fields) if fields else None
        config = PlanningConfig(policy="dual_constraint", m_mem=10, cost_model=path, **more)
        assert config.predictor() == expected


def test_without_a_unit_of_cost_or_packed_rows_auto_is_as_fast_as_equal_tokens():
    auto = PlanningConfig(m_mem=131_072, p=2.0)
    for ranks, lengths in ((1, [32_760]), (8, [256, 1024])):
        samples = of_lengths(np.repeat(lengths, 400))
        chosen = choose_policy(auto, lambda _, s=samples: s, ranks, CostFile(), packs=False).config
        times = []
        for config in (chosen, dataclasses.replace(auto, policy="equal_tokens")):
            epoch = make_plan(config, samples, ranks, seed=0).epoch(0)
            times.append(makespan(epoch, PowerCost(2.0)))
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
        time = makespan(epoch, costs.quadratic)
        time *= costs.packed_ratio or 1 if find_policy(policy).packed else 1
        first_step = costs.first_step_seconds(programs_of(epoch))
        found[case_name(config)] = length.seconds(time, epoch.steps, first_step)
    return found


@given(
    st.lists(st.integers(200, 60_000), min_size=1, max_size=6),
    st.integers(1, 150),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
    st.sampled_from([RunLength(1.0), RunLength(100.0), RunLength(None, 50)]),
    st.sampled_from([None, 1.5]),
)
@example([300, 5000, 30_000], 200, 8, True, RunLength(1.0), None)  # packed rows are faster here
@example([300, 5000, 30_000], 200, 8, True, RunLength(1.0), 3.0)  # and not where they take longer
@examples(6)
def test_no_policy_is_predicted_much_faster_than_that_of_auto(
    kinds, count, ranks, packs, length, ratio
):
    lengths = np.random.default_rng(0).choice(kinds, count)
    samples = of_lengths(*lengths.tolist())
    costs = CostFile(quadratic=QuadraticCost(0.05, 2e-5, 1.2e-9, 1e-3), packed_ratio=ratio)
    auto = PlanningConfig(m_mem=131_072)
    chosen, reason = choose_policy(
        auto, lambda _: samples, ranks, costs, packs=packs, length=length
    )
    seconds = portfolio_seconds(samples, ranks, costs, packs, length)
    assert seconds[case_name(chosen)] <= 1.02 * min(seconds.values()) * (1 + 1e-9)
    assert case_name(chosen) in reason
    assert "\n" not in reason


def test_auto_keeps_a_given_mode_of_ranks_and_refuses_one_that_nothing_can_run():
    samples, costs = of_lengths(100, 200, 300), CostFile()
    given = PlanningConfig(m_mem=1000, ranks_mode="independent")
    chosen = choose_policy(given, lambda _: samples, 4, costs, packs=False).config
    assert chosen.ranks_mode == "independent"
    split = PlanningConfig(m_mem=1000, context=4), lambda _: samples, 4, costs
    reason = choose_policy(*split, packs=True).reason
    assert reason == "planning.policy auto takes balanced (split, c = 4)"  # and compares no other
    for ranks, independent in ((1, True), (4, False)):
        options = {"packs": False, "independent": independent}
        said = ["ranks_mode is independent, but one rank", "leave it out"]
        refused(said, choose_policy, given, lambda _: samples, ranks, costs, **options)
    said = ["m_mem is 100 tokens, shorter than sample 0 (1000 tokens)"]
    long = PlanningConfig(m_mem=100)
    refused(said, choose_policy, long, lambda _: of_lengths(1000), 2, costs, packs=True)
    with pytest.raises(ValueError, match="choose_policy"):
        make_policy(given)
    follows = PlanningConfig(m_mem=1000, recalibrate="window")
    given = follows, lambda _: samples, 2, costs
    assert choose_policy(*given, packs=True).config.policy == "balanced"
    refused(["window, which needs packed rows"], choose_policy, *given, packs=False)


COST = QuadraticCost(1.0, 1e-3, 1e-6)
LENGTHS = [50] * 40 + [200] * 20 + [900] * 5


@dataclass(frozen=True)
class HalfFullConfig(PlanningConfig):
    """The settings of `HalfFull`.

    Attributes:
      share: of memory.
    """

    share: float = 0.5


@register_policy
@dataclass(frozen=True)
class HalfFull(Bucketed):
    """As many rows as fill a share of memory, or as M_comp allows."""

    name: ClassVar[str] = "half_full"
    config: ClassVar[type] = HalfFullConfig
    has_m_comp: ClassVar[bool] = True
    has_options: ClassVar[bool] = True

    m_mem: int
    share: float
    m_comp: float | None = None

    @classmethod
    def from_config(cls, config: HalfFullConfig, costs):
        share = (config.options or {}).get("share", config.share)
        return cls(config.required_m_mem(costs), share, config.m_comp_value)

    def rows_per_bucket(self, buckets):
        most = self.share * self.m_mem / buckets.seq_len
        if self.m_comp:
            most = np.minimum(most, self.m_comp / self.m_comp_measure(buckets.seq_len))
        return np.maximum(1, most).astype(np.int64)

    def m_comp_measure(self, seq_len):
        return np.asarray(seq_len, np.float64)


def plan_of(policy, **fields):
    config = PlanningConfig(policy, m_mem=1000, ranks=4, **fields)
    return make_plan(config, of_lengths(*LENGTHS), 1, 0, CostFile(quadratic=COST))


def test_its_micro_batches_hold_every_sample_once_as_it_says():
    plan = plan_of("half_full", micro_batches_per_step=2)
    for epoch in (0, 1):
        found = plan_metrics(plan.epoch(epoch), COST, 1000)
        assert (found.samples, found.dropped, found.duplicated) == (len(LENGTHS), 0, 0)
    parts = plan.step(0).micro_batches
    assert all(part.row_plan is None for part in parts)
    assert max(part.rows for part in parts) <= 10


def test_options_and_m_comp_reach_the_policy_and_others_are_refused():
    assert plan_of("half_full").policy.share == 0.5
    assert plan_of("half_full", options={"share": 1.0}).policy.share == 1.0
    assert plan_of("half_full", m_comp="longest").policy.m_comp == 900
    assert plan_of("half_full", m_comp="auto").policy.m_comp >= 50
    config = PlanningConfig("first_fit", m_mem=1000, options={"share": 1.0})
    refused(["policy first_fit has no options"], make_policy, config)
    refused(["half_full splits no sample"], plan_of, "half_full", context=2)
    refused(["planning.m_mem is not given"], PlanningConfig, "half_full")
    follow = ["of half_full does not follow", "sorted or balanced"]
    refused(follow, plan_of, "half_full", recalibrate="epoch")


def test_settings_of_its_own_are_keys_and_flags(capsys, tmp_path):
    file = tmp_path / "config.yaml"
    text = (
        "run: {{folder: r}}\ndata: {{folder: d}}\nplanning: {{policy: half_full, m_mem: 66816{}}}\n"
    )
    file.write_text(text.format(", share: 0.25"))
    planning = read_config(["--config", str(file)]).planning
    assert planning == HalfFullConfig("half_full", m_mem=66816, share=0.25)
    command = ["plan", "--workload", "wan-480p", "--size", "40", "--ranks", "4", "--json"]
    command += ["--config", str(file), "--p", "2"]
    for flags, share in ([], 0.25), (["--share", "0.75"], 0.75):
        assert run_command(cli.main, [*command, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["share"] == share
    assert run_command(cli.main, [*command, "--policy", "equal_tokens"]) == 0
    assert "share" not in json.loads(capsys.readouterr().out)["plan"]
    for wrong, named in ((", share: half", "planning.share"), (", chare: 1", "planning.share?")):
        file.write_text(text.format(wrong))
        refused([named], read_config, ["--config", str(file)])


def test_names_are_taken_once_and_unknown_ones_list_them():
    ours = ("fixed", "equal_tokens", "sorted", "dual_constraint", "first_fit", "balanced")
    assert policy_names()[:6] == ours
    assert "half_full" in policy_names()
    with pytest.raises(ValueError, match="'half_full' exists already"):
        register_policy(type("Other", (HalfFull,), {}))
    assert find_policy("half_full") is HalfFull
    for unknown in (lambda: find_policy("half"), lambda: PlanningConfig("half", m_mem=10)):
        refused(("'half'", "balanced", "half_full"), unknown)
