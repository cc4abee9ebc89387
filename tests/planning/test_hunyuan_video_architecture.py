"""Costs of HunyuanVideo by arithmetic, against the model itself and against counting by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.families import abstract_model, parameter_count
from alload_jax.models.hunyuan_video.costs import HUNYUAN_VIDEO_1_5
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.planning.analytic import analytic_costs
from alload_jax.planning.architecture import architecture_named, from_fields
from alload_jax.planning.devices import DEVICES

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
def test_parameters_are_those_of_the_model(config):
    found = from_fields(config.architecture())
    assert found.parameters() == parameter_count(config)
    assert from_fields(found.fields()) == found


def test_the_published_model_is_known_by_name():
    assert architecture_named("hunyuan-video-1.5") == HUNYUAN_VIDEO_1_5
    assert HUNYUAN_VIDEO_1_5.parameters() == 8_326_608_160
    assert from_fields(PUBLISHED.architecture()) == HUNYUAN_VIDEO_1_5


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
    costs, h200 = analytic_costs(HUNYUAN_VIDEO_1_5, DEVICES["h200"], "full", shards=8), 989e12
    lengths = np.array([4_000, 112_000])
    roof = [3 * HUNYUAN_VIDEO_1_5.forward_flops(int(length)) / h200 for length in lengths]
    ratio = costs.quadratic.sequence_cost(lengths) / roof
    assert ((ratio > 1) & (ratio < 4)).all()
    assert costs.m_mem > 10_000


def test_a_missing_field_is_one_line():
    with pytest.raises(InputError, match=r"model\.ffn_dim is None"):
        from_fields({"family": "hunyuan_video", "dim": 16, "num_heads": 2, "num_layers": 1})
