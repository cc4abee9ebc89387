"""Costs of a family that these tests register, and of HunyuanVideo, by arithmetic."""

import dataclasses
import json
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from planning_cases import refused, write_json

from alload_jax import cli
from alload_jax.errors import run_command
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.families import abstract_model, parameter_count
from alload_jax.models.hunyuan_video.costs import HUNYUAN_VIDEO_1_5
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
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
    refused(("model family 'mamba' is unknown", "wan"), from_fields, {"family": "mamba"})
    with pytest.raises(ValueError, match="'wan' exists already"):
        register_architecture("wan", JointArchitecture)
    fields = {"family": "hunyuan_video", "dim": 16, "num_heads": 2, "num_layers": 1}
    refused(["model.ffn_dim is None"], from_fields, fields)


# ---------------------------------------------------------------- HunyuanVideo

CLASSES = HunyuanVideoConfig(dim=16, ffn_dim=24, num_heads=2, num_layers=3)
TEXT = dataclasses.replace(CLASSES, text=TextConfig(6, 9), refiner_layers=3, in_channels=4)
FULL = dataclasses.replace(
    TEXT, glyphs=TextConfig(5, 7), glyph_hidden=12, image=ImageConfig(4), out_channels=2
)
PUBLISHED = HunyuanVideoConfig(
    dim=2048,
    ffn_dim=8192,
    num_heads=16,
    num_layers=54,
    in_channels=65,
    out_channels=32,
    patch_size=(1, 1, 1),
    text=TextConfig(3584, 1000),
    glyphs=TextConfig(1472, 256),
    image=ImageConfig(1152),
)


@pytest.mark.parametrize("config", [CLASSES, TEXT, FULL, PUBLISHED])
def test_parameters_of_hunyuan_video_are_those_of_the_model(config):
    found = from_fields(config.architecture())
    assert found.parameters() == parameter_count(config)
    assert from_fields(found.fields()) == found
    if config is PUBLISHED:
        assert found == architecture_named("hunyuan-video-1.5") == HUNYUAN_VIDEO_1_5
        assert found.parameters() == 8_326_608_160


def test_flops_are_those_of_the_kernels_that_each_token_meets():
    """A token of either stream meets its stream's kernels but the modulation's, once a layer."""
    params = abstract_model(FULL).params["blocks"]
    met = {
        stream: sum(
            leaf.size
            for path, leaf in jax.tree_util.tree_leaves_with_path(params[stream])
            if "kernel" in jax.tree_util.keystr(path)
            and "modulation" not in jax.tree_util.keystr(path)
        )
        for stream in ("video", "condition")
    }
    flops = from_fields(FULL.architecture()).flops()
    assert 2 * met["video"] == 2 * met["condition"] == flops.matmul_per_token
    assert flops.attention_per_pair == 4 * FULL.num_layers * FULL.dim


def test_the_refiner_and_the_modulation_are_little_of_a_picture():
    flops = HUNYUAN_VIDEO_1_5.flops()
    picture = 45 * 80 + 300  # 720p, with a text
    assert flops.of(picture) < 1.03 * dataclasses.replace(
        flops, matmul_per_sequence=0.0, attention_per_sequence=0.0
    ).of(picture)


def test_a_gpu_takes_the_time_of_the_flops():
    costs, roof = analytic_costs(HUNYUAN_VIDEO_1_5, H200, "full", shards=8), 989e12
    lengths = np.array([4_000, 112_000])
    least = [3 * HUNYUAN_VIDEO_1_5.forward_flops(int(length)) / roof for length in lengths]
    ratio = costs.quadratic.sequence_cost(lengths) / least
    assert ((ratio > 1) & (ratio < 4)).all()
    assert costs.m_mem > 10_000
