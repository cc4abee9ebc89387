"""Policies that these tests register plan and are evaluated like ours."""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from planning_cases import of_lengths, refusal, refused

from alload_jax import cli
from alload_jax.config import read_config
from alload_jax.errors import run_command
from alload_jax.planning.cost import CostFile, QuadraticCost
from alload_jax.planning.epoch import RowShape
from alload_jax.planning.factory import make_plan, make_policy
from alload_jax.planning.metrics import plan_metrics, step_metrics
from alload_jax.planning.policies import find_policy, policy_names, register_policy
from alload_jax.planning.policies.bucketed import Bucketed
from alload_jax.planning.policies.packed import PackedEpochBuilder, whole_samples
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.settings import PlanningConfig

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


@register_policy
@dataclass(frozen=True)
class OneEach(Policy):
    """One sample in each packed row."""

    name: ClassVar[str] = "one_each"
    packed: ClassVar[bool] = True

    m_mem: int

    @classmethod
    def from_config(cls, config, costs):
        return cls(config.required_m_mem(costs))

    def plan_epoch(self, samples, topology, rng):
        epoch = PackedEpochBuilder(
            RowShape(self.m_mem, segments=1, longest_whole=self.m_mem), topology
        )
        step, rank = np.divmod(np.arange(len(samples)), topology.ranks)
        order = rng.permutation(len(samples))
        epoch.add(whole_samples(order, samples.seq_len, step, rank, int(step[-1]) + 1))
        return epoch.finish()


def plan_of(policy, **fields):
    config = PlanningConfig(policy, m_mem=1000, ranks=4, **fields)
    return make_plan(config, of_lengths(*LENGTHS), 1, 0, CostFile(quadratic=COST))


@pytest.mark.parametrize("policy", ["half_full", "one_each"])
def test_every_sample_is_placed_once_in_every_epoch(policy):
    plan = plan_of(policy, micro_batches_per_step=2)
    for epoch in (0, 1):
        found = plan_metrics(plan.epoch(epoch), plan.samples.seq_len, COST, 1000)
        assert (found.samples, found.dropped, found.duplicated) == (len(LENGTHS), 0, 0)
    assert step_metrics(plan.step(0), plan, COST).tokens > 0
    assert plan.identity()["policy"] == type(plan.policy).__name__


def test_packed_and_bucketed_micro_batches_are_what_the_policy_says():
    packed, bucketed = plan_of("one_each").step(0), plan_of("half_full").step(0)
    assert {part.seq_len for part in packed.micro_batches} == {1000}
    assert all(part.row_plan.offsets == (0,) for part in packed.micro_batches)
    assert all(part.row_plan is None for part in bucketed.micro_batches)
    assert max(part.rows for part in bucketed.micro_batches) <= 10


def test_options_and_m_comp_reach_the_policy():
    assert plan_of("half_full").policy.share == 0.5
    assert plan_of("half_full", options={"share": 1.0}).policy.share == 1.0
    assert plan_of("half_full", m_comp="longest").policy.m_comp == 900
    assert plan_of("half_full", m_comp="auto").policy.m_comp >= 50


def test_settings_of_its_own_are_keys_and_flags(capsys, tmp_path):
    file = tmp_path / "config.yaml"
    text = (
        "run: {{folder: r}}\ndata: {{folder: d}}\nplanning: {{policy: half_full, m_mem: 66816{}}}\n"
    )
    file.write_text(text.format(", share: 0.25"))
    planning = read_config(["--config", str(file)]).planning
    assert planning == HalfFullConfig("half_full", m_mem=66816, share=0.25)
    command = ["plan", "--workload", "wan-480p", "--size", "40", "--ranks", "4", "--json"]
    command += ["--config", str(file)]
    for flags, share in ([], 0.25), (["--share", "0.75"], 0.75):
        assert run_command(cli.main, [*command, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["share"] == share
    assert run_command(cli.main, [*command, "--policy", "equal_tokens"]) == 0
    assert "share" not in json.loads(capsys.readouterr().out)["plan"]
    for wrong, named in ((", share: half", "planning.share"), (", chare: 1", "planning.share?")):
        file.write_text(text.format(wrong))
        assert named in refusal(read_config, ["--config", str(file)])


def test_unsupported_settings_of_a_policy_are_refused():
    config = PlanningConfig("one_each", m_mem=1000, options={"share": 1.0})
    assert "policy one_each has no options" in refusal(make_policy, config)
    assert "one_each splits no sample" in refusal(plan_of, "one_each", context=2)
    assert "one_each has no M_comp" in refusal(plan_of, "one_each", m_comp="auto")
    assert "planning.m_mem is not given" in refusal(PlanningConfig, "one_each")


def test_names_are_taken_once_and_unknown_ones_list_them():
    ours = ("fixed", "equal_tokens", "sorted", "dual_constraint", "first_fit", "balanced")
    assert policy_names()[:6] == ours
    assert {"half_full", "one_each"} <= set(policy_names())

    class Other(HalfFull):
        """Another policy with the same name."""

    with pytest.raises(ValueError, match="'half_full' exists already"):
        register_policy(Other)
    assert find_policy("half_full") is HalfFull
    for unknown in (lambda: find_policy("half"), lambda: PlanningConfig("half", m_mem=10)):
        refused(("'half'", "balanced", "half_full"), unknown)


def test_the_command_compares_it_with_ours(capsys, tmp_path):
    flags = ["--workload", "wan-480p", "--size", "40", "--ranks", "4", "--m-mem", "66816"]
    policies = ["half_full:independent", "one_each", "dual_constraint", "balanced"]
    page = tmp_path / "page.html"
    command = ["plan", *flags, "--json", "--compare", *policies, "--report", str(page)]
    assert run_command(cli.main, [*command, "--context", "2", "--m-comp", "auto"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    names = ["half_full (independent)", "one_each", "dual_constraint (synchronous)"]
    assert [case["name"] for case in cases] == [*names, "balanced (split, c = 2)"]
    assert {case["metrics"]["samples"] for case in cases} == {40}
    assert cases[0]["plan"]["m_comp"] > 0
    assert cases[1]["metrics"]["steps"] == 40 // 4
    assert cases[1]["plan"]["policy"] == "OneEach"
    assert "half_full (independent)" in page.read_text()
    assert run_command(cli.main, ["plan", *flags, "--compare", "one_each:independent"]) == 2
    assert "one shape on all ranks; give one_each" in capsys.readouterr().err
