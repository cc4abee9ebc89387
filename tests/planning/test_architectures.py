"""A family that these tests register can be planned for like Wan's."""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import pytest
from planning_cases import refusal, write_json

from alload_jax import cli
from alload_jax.errors import run_command
from alload_jax.models.wan.costs import WAN_1_3B, WanArchitecture
from alload_jax.planning.analytic import (
    WORKSPACE_BYTES,
    analytic_costs,
    bytes_per_split_token,
    step_cost,
)
from alload_jax.planning.architecture import (
    ActivationCounts,
    Architecture,
    ForwardFlops,
    architecture_named,
    from_fields,
    model_names,
    register_architecture,
)
from alload_jax.planning.cost import FORMAT, read_cost_file
from alload_jax.planning.devices import DEVICES

H200 = DEVICES["h200"]


@dataclass(frozen=True)
class JointArchitecture(Architecture):
    """Only joint attention over latents and text, whose costs are easy to count."""

    width: int
    depth: int
    text: int = 7

    @classmethod
    def from_fields(cls, fields):
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})

    def fields(self):
        return {"family": "joint"} | dataclasses.asdict(self)

    def parameters(self):
        return 4 * self.depth * self.width**2

    def flops(self):
        products, pairs = 8.0 * self.depth * self.width**2, 4.0 * self.depth * self.width
        return ForwardFlops(
            matmul_per_token=products,
            matmul_per_sequence=products * self.text,
            attention_per_pair=pairs,
            attention_per_token=2 * pairs * self.text,
            attention_per_sequence=pairs * self.text**2,
        )

    def activations(self):
        return ActivationCounts(10.0, 20.0, 5.0, 4.0 * self.width * self.depth)

    def kept_activations(self, remat):
        return self.depth * self.width * (1.0 if remat == "full" else 8.0)

    def kernels(self):
        return 9 * self.depth


TINY = JointArchitecture(64, 3)
register_architecture("joint", JointArchitecture, named={"joint-tiny": TINY})


def test_joint_attention_is_that_of_all_tokens():
    products, seq_len = 8 * 3 * 64**2, 11
    assert TINY.forward_flops(seq_len) == products * (11 + 7) + 4 * 3 * 64 * (11 + 7) ** 2
    assert TINY.step_flops(np.array([11, 11])) == 6 * TINY.forward_flops(11)


def test_it_is_found_by_name_and_by_fields():
    assert model_names()[:2] == ("wan2.1-1.3b", "wan2.1-14b")
    assert architecture_named("joint-tiny") is TINY
    assert from_fields(json.loads(json.dumps(TINY.fields()))) == TINY
    assert isinstance(from_fields(WAN_1_3B.fields()), WanArchitecture)
    assert "family" not in WAN_1_3B.fields()


def test_its_costs_are_its_counts():
    cost = step_cost(TINY, dataclasses.replace(H200, attention_share=0.5), "none")
    assert cost.c2 == pytest.approx(3.5 * 4 * 3 * 64 / (H200.peak_flops * 0.5))
    costs = analytic_costs(TINY, H200, "full")
    assert costs.memory.base == 24 * TINY.parameters() + WORKSPACE_BYTES
    assert costs.memory.per_token == 2 * (3 * 64 + 5)
    assert costs.bytes_per_split_token == 3 * 2 * 4 * 64 * 3
    assert bytes_per_split_token(TINY, "none") == costs.bytes_per_split_token * 2 / 3


def test_the_command_plans_for_it(capsys):
    flags = ["--workload", "wan-480p", "--size", "200", "--ranks", "2", "--model", "joint-tiny"]
    assert run_command(cli.main, ["plan", *flags, "--json", "--policy", "balanced"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["samples"] == 200
    assert "joint-tiny" in found["plan"]["cost_model_source"]


def test_a_cost_model_of_another_family_is_recognised(tmp_path):
    costs = analytic_costs(TINY, H200)
    assert costs.unlike({"dim": 8}) == "family joint (here wan)"
    assert costs.unlike(TINY.fields()) == ""
    wan = write_json(tmp_path / "cost.json", {"format": FORMAT, "model": {"dim": 8}})
    assert read_cost_file(wan).unlike({"dim": 8}) == ""
    assert read_cost_file(wan).unlike({"dim": 8, "family": "joint"}) == "family wan (here joint)"


def test_families_that_are_unknown_or_taken_are_refused():
    message = refusal(from_fields, {"family": "mamba"})
    assert "model family 'mamba' is unknown" in message
    assert "wan" in message
    with pytest.raises(ValueError, match="'wan' exists already"):
        register_architecture("wan", JointArchitecture)
