"""The analytic cost model: its counts, and its accuracy on measurements of an H200."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from planning_cases import refused, write_json

from alload_jax.config import read_config
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.cudnn import launched_tokens
from alload_jax.models.families import abstract_model, parameter_count
from alload_jax.models.hunyuan_video.costs import HUNYUAN_VIDEO_1_5, HUNYUAN_VIDEO_13B
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.transformer_13b import HunyuanVideo13bConfig
from alload_jax.models.wan.costs import WAN_1_3B as WAN
from alload_jax.models.wan.costs import WAN_14B, WanArchitecture
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.analytic import (
    ALL_TRAINED,
    STATE_BYTES,
    WORKSPACE_BYTES,
    Trained,
    analytic_costs,
    bytes_per_split_token,
    state_bytes,
    step_cost,
    step_memory,
)
from alload_jax.planning.architecture import (
    ForwardFlops,
    architecture_named,
    from_fields,
    model_names,
    register_architecture,
)
from alload_jax.planning.cost import FORMAT, bucketed_cost, read_cost_file
from alload_jax.planning.devices import DEVICES, device_named

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = DEVICES["h200"]
TOLERANCE = 0.15


def cases_of(name):
    return json.loads((RESULTS / name).read_text())["cases"]


def seconds_of(model, device, remat, rows, seq_len):
    [found] = bucketed_cost(step_cost(model, device, remat), np.array([rows]), np.array([seq_len]))
    return found


def measured_steps():
    """(model, device, remat, rows, tokens of a row, seconds) of Wan 1.3B's steps."""
    for name in ("diffusers_step_h200.json", "diffusers_step_others_h200.json"):
        for case in cases_of(name):
            if case["name"].startswith("alload") and "seconds" in case:
                remat = case["settings"]["model"]["remat"]
                yield WAN, "h200", remat, 1, case["tokens"], case["seconds"]
    for device in ("h200", "h100"):
        content = json.loads((RESULTS / f"step_bars_{device}.json").read_text())
        model = dataclasses.replace(WAN, num_layers=content["model"]["num_layers"])
        for case in content["cases"]:
            if not case["remat"].startswith("offload"):
                shape = (case["rows"], math.prod(case["latents"]) // 4)
                yield model, device, case["remat"], *shape, case["seconds"]


def test_predicted_seconds_match_measurements_of_images_and_clips():
    steps = list(measured_steps())
    assert {(step[2], step[3]) for step in steps} >= {
        *(("full", 1), ("attention", 1), ("matmuls_and_attention", 1))
    }
    shapes = {(device, rows, seq_len) for _, device, _, rows, seq_len, _ in steps}
    for device in ("h200", "h100"):
        assert shapes >= {(device, 42, 1560), (device, 8, 4096), (device, 1, 32_760)}
    for model, device, remat, rows, seq_len, seconds in steps:
        found = seconds_of(model, DEVICES[device], remat, rows, seq_len)
        assert found == pytest.approx(seconds, rel=TOLERANCE), (device, remat, rows, seq_len)


def test_predictions_match_measurements_of_joint_attention():
    """Steps of HunyuanVideo 1.5."""
    cases = [
        case for path in RESULTS.glob("hunyuan_video_step_*h200.json") for case in cases_of(path)
    ]
    cases = [case for case in cases if case["name"].startswith("alload")]
    fields = [case["settings"]["model"] for case in cases]
    assert {each["remat"] for each in fields} == {"full", "attention", "none"}
    for case, each in zip(cases, fields, strict=True):
        model = dataclasses.replace(HUNYUAN_VIDEO_1_5, num_layers=each["num_layers"])
        seq_len, remat = case["tokens"] + case["tokens_beside"], each["remat"]
        found = seconds_of(model, H200, remat, 1, seq_len)
        assert found == pytest.approx(case["seconds"], rel=TOLERANCE)
        predicted = step_memory(model, H200, remat).bytes_of(seq_len)
        if remat == "none":
            # Measured when autodiff of XLA's norms and GELU kept more than the kernels do.
            assert predicted < case["peak_bytes"]
        else:
            assert predicted == pytest.approx(case["peak_bytes"], rel=TOLERANCE)


def test_predicted_memory_matches_measurements():
    single = Trained(bytes_each=18, accumulates=False)  # gradients of matrices have 16 bits
    cases = []  # (remat, rows, tokens, bytes, how many times as much is predicted at most)
    for case in cases_of("step_bars_h200.json"):
        tokens = case["rows"] * math.prod(case["latents"]) // 4
        # Without a loop XLA keeps less of what `none` could.
        most = 1.14 if case["remat"] == "none" else 1.05
        cases.append((case["remat"], case["rows"], tokens, case["bytes"], most))
    [auto] = cases_of("step_auto_h200.json")
    cases.append((auto["policies"][0], 1, auto["tokens"], auto["peak_bytes"], 1.05))
    for case in cases_of("step_same_1560_h200.json"):
        cases.append(("attention", 42, 42 * 1560, case["peak_bytes"], 1.05))
    for remat, rows, tokens, bytes_, most in cases:
        found = step_memory(WAN, H200, remat, trained=single).bytes_of(tokens, rows)
        assert 0.99 * bytes_ < found - WORKSPACE_BYTES < most * bytes_, (remat, rows, tokens)
    # 10 layers, 81,920 tokens in 8 slots of short and long samples, which take a work space.
    [packed, _] = cases_of("step_mixed_resolution_h200.json")
    model = dataclasses.replace(WAN, num_layers=10)
    found = step_memory(model, H200, "attention", trained=single).bytes_of(81_920, 8)
    lengths = ((0, 8), (7950, 5), (18000, 3), (27030, 2), (33390, 1), (75600, 0))
    beyond = launched_tokens(1, 81_920, lengths) - 81_920
    found += 4 * WAN.dim * beyond - WORKSPACE_BYTES
    assert packed["peak_bytes"] < found < 1.05 * packed["peak_bytes"]


@pytest.mark.parametrize("gpu", ["24gb", "80gb"])
def test_runs_of_adapters_take_the_predicted_memory_and_fit_where_it_says_so(gpu):
    content = json.loads((RESULTS / f"memory_{gpu}_h200.json").read_text())
    for case in content["cases"]:
        name, given = case["config"], case["flags"]
        flags = dict(zip(given[::2], given[1::2], strict=True))
        architecture = WAN_14B if "14b" in name else WAN
        dim, ffn = architecture.dim, architecture.ffn_dim
        count = 32 * architecture.num_layers * (8 * 2 * dim + 2 * (dim + ffn))
        dtype = flags.get("--parameters.frozen_dtype", "bfloat16")
        trained = Trained(count, dtype, STATE_BYTES - 4)  # without a moving average
        remat = flags.get("--model.remat", "full")
        found = step_memory(architecture, H200, remat, trained=trained)
        longest = found.max_tokens(case["memory_gb"] * 1e9, 1 - content["share_for_jax"])
        assert case["fits"]
        assert case["tokens"] <= longest
        # Those of 81 frames are not at the edge: the next clip has 1560 tokens more.
        assert (longest < case["tokens"] + 1560) == (case["frames"] != 81)
        assert 1 < found.bytes_of(case["tokens"]) / case["peak_bytes"] < 1.08, case


def test_shards_share_the_state_and_replicas_all_of_it_but_the_weights():
    """As arrays of ZeRO: each replica holds float32 weights, and frozen ones, whole."""
    whole, shared = (step_memory(WAN, H200, "full", shards) for shards in (1, 8))
    assert shared.base - WORKSPACE_BYTES == (whole.base - WORKSPACE_BYTES) / 8
    assert shared.per_token == whole.per_token
    lora, total = Trained(1_000_000, "bfloat16"), WAN.parameters()
    of_lora = 4 * 1_000_000 + 2 * (total - 1_000_000)
    for trained, count, kept in ((ALL_TRAINED, total, 4 * total), (lora, 1_000_000, of_lora)):
        given = step_memory(WAN, H200, "full", 2, trained, replicas=8)
        expected = (kept + 20 * count / 8) / 2
        assert given.base - WORKSPACE_BYTES == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("dtype", "bytes_"), [("float32", 4), ("bfloat16", 2), ("float8", 1)])
def test_a_frozen_parameter_takes_its_own_bytes_and_no_update_or_gradient(dtype, bytes_):
    lora, total = Trained(1_000_000, dtype), WAN.parameters()
    expected = 24 * 1_000_000 + bytes_ * (total - 1_000_000)
    assert state_bytes(total, lora) == expected
    costs = analytic_costs(WAN, H200, shards=2, trained=lora)
    assert costs.memory.base == expected / 2 + WORKSPACE_BYTES
    assert costs.memory.per_token == analytic_costs(WAN, H200).memory.per_token + 2 * WAN.dim
    assert costs.m_mem > analytic_costs(WAN, H200, shards=2).m_mem
    full = step_cost(WAN, H200, "none")
    half = step_cost(WAN, H200, "none", Trained(total // 2))
    assert half.c0 == pytest.approx(full.c0 - 26 * total / H200.bandwidth)
    assert half.c_sequence == pytest.approx(full.c_sequence * 2.5 / 3)
    assert half.c2 == full.c2
    assert step_cost(WAN, H200, "none", Trained(total)) == full


CLASSES = HunyuanVideoConfig(dim=16, ffn_dim=24, num_heads=2, num_layers=3)
TEXT_ONLY = dataclasses.replace(CLASSES, text=TextConfig(6, 9), refiner_layers=3, in_channels=4)
FULL = dataclasses.replace(
    TEXT_ONLY, glyphs=TextConfig(5, 7), glyph_hidden=12, image=ImageConfig(4), out_channels=2
)
PUBLISHED = HunyuanVideoConfig(
    dim=2048, ffn_dim=8192, num_heads=16, num_layers=54, in_channels=65, out_channels=32,
    patch_size=(1, 1, 1), text=TextConfig(3584, 1000), glyphs=TextConfig(1472, 256),
    image=ImageConfig(1152),
)  # fmt: skip
SINGLE = HunyuanVideo13bConfig(
    dim=16, ffn_dim=24, num_heads=2, text=TextConfig(6, 9), pooled_dim=5, embedded_guidance=1.0
)
MODELS = [
    WanConfig(dim=48, ffn_dim=100, num_heads=3, num_layers=2, in_channels=5, num_classes=7),
    WanConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=3, text=TextConfig(24, 9)),
    WanConfig(dim=32, num_heads=2, patch_size=(2, 1, 4), qk_norm=False, cross_norm=False),
    WanConfig(dim=32, num_heads=2, in_channels=6, out_channels=3, freq_dim=64),
    WanConfig(dim=32, num_heads=2, position_embedding=True),
    WanConfig(dim=32, num_heads=2, text=TextConfig(24, 9), image=ImageConfig(20, 30)),
    *(CLASSES, TEXT_ONLY, FULL, PUBLISHED),
    HunyuanVideo13bConfig(dim=16, num_heads=2, num_layers=3),
    SINGLE,
]


@pytest.mark.parametrize("config", MODELS)
def test_parameters_are_those_of_the_model(config):
    found = from_fields(json.loads(json.dumps(config.architecture())))
    assert found.parameters() == parameter_count(config)
    assert from_fields(json.loads(json.dumps(found.fields()))) == found
    if config is PUBLISHED:
        assert found == architecture_named("hunyuan-video-1.5") == HUNYUAN_VIDEO_1_5


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("wan2.1-1.3b", "wan2_1_t2v_1_3b"),
        ("wan2.1-14b", "wan2_1_t2v_14b"),
        ("hunyuan-video-1.5", "hunyuan_video_1_5"),
        ("hunyuan-video-13b", "hunyuan_video_13b"),
    ],
)
def test_a_named_model_is_that_of_its_example(name, example):
    model = read_config(["--config", example]).model
    assert from_fields(model.architecture()) == architecture_named(name)


def test_published_models_have_their_counts_and_devices_two_names():
    assert HUNYUAN_VIDEO_1_5.parameters() == 8_326_608_160
    assert HUNYUAN_VIDEO_13B.parameters() == 12_821_012_544
    assert architecture_named("hunyuan-video-13b") == HUNYUAN_VIDEO_13B
    assert WAN.parameters() == 1_418_996_800
    assert WAN_14B.parameters() == pytest.approx(14.3e9, rel=0.01)
    for name in ("h200", "NVIDIA H200", " nvidia h200"):
        assert device_named(name) == H200
    for device in DEVICES.values():
        costs = analytic_costs(dataclasses.replace(WAN, num_layers=2), device, "full")
        assert min(costs.m_mem, *dataclasses.astuple(costs.quadratic)[:3]) > 0
        assert (1 < costs.power.p < 2, costs.origin) == (True, "analytic")


def test_flops_are_the_formula_and_those_of_the_kernels_that_each_token_meets():
    shape = WanArchitecture(dim=6, ffn_dim=10, num_heads=3, num_layers=4, text_length=7)
    d, f, t, s = 6, 10, 7, 11
    block = 12 * s * d**2 + 4 * s * d * f + 4 * s**2 * d + 4 * t * d**2 + 4 * s * t * d
    assert shape.forward_flops(s) == 4 * block
    # A token meets its stream's kernels, a sample the modulations, its text those of the refiner.
    for config, layers in ((FULL, 3), (SINGLE, 4 + 4)):
        flops, text = from_fields(config.architecture()).flops(), config.text.length
        leaves = flatten_dict(abstract_model(config).params, sep="/")
        sizes = {path: 2 * leaf.size for path, leaf in leaves.items() if path.endswith("kernel")}

        def met(pattern, sizes=sizes):
            return sum(size for path, size in sizes.items() if re.match(pattern, path))

        for stream in ("video", "condition"):
            each = met(rf"(blocks/{stream}|single_blocks)/(?!modulation)")
            assert each == flops.matmul_per_token
        refined = text * met("condition_embedding/text/blocks/(?!gates)")
        assert flops.matmul_per_sequence == refined + met(".*blocks/.*modulation")
        assert flops.attention_per_pair == 4 * layers * config.dim
        assert flops.attention_per_sequence == 4 * config.refiner_layers * config.dim * text**2
        written = met("(blocks/video|single_blocks)/feed_forward/out")
        assert flops.feed_forward_output == written
    # The refiner and the modulation are little of a picture of 720p, with a text.
    flops, picture = HUNYUAN_VIDEO_1_5.flops(), 45 * 80 + 300
    bare = dataclasses.replace(flops, matmul_per_sequence=0.0, attention_per_sequence=0.0)
    assert flops.of(picture) < 1.03 * bare.of(picture)
    costs, lengths = analytic_costs(HUNYUAN_VIDEO_1_5, H200, "full", shards=8), [4_000, 112_000]
    least = [3 * HUNYUAN_VIDEO_1_5.forward_flops(length) / 989e12 for length in lengths]
    ratio = costs.quadratic.sequence_cost(np.array(lengths)) / least
    assert ((ratio > 1) & (ratio < 4)).all()


def test_a_condition_takes_its_values_and_those_of_each_layer_of_the_refiner():
    def values(**changes):
        return from_fields(dataclasses.replace(FULL, **changes).architecture()).condition_values()

    layer = values() - values(refiner_layers=2)
    assert values(refiner_layers=1) - layer == 6 * 9 + 5 * 7 == values(glyphs=None) - 3 * layer + 35
    assert values(dim=32) - values() == 3 * layer > 0


def test_costs_are_those_of_the_counts():
    counts = ForwardFlops(1.0, 20.0, 300.0, 4000.0, 5e4)
    assert counts.of(10) == 1 * 10 + 20 + 300 * 100 + 4000 * 10 + 5e4
    assert WAN.step_flops(np.array([11, 11])) == 6 * WAN.forward_flops(11)
    cost = step_cost(WAN, dataclasses.replace(H200, attention_share=0.5), "none")
    assert cost.c2 == pytest.approx(3.5 * 4 * 30 * 1536 / (H200.peak_flops * 0.5))
    products, rate = 3 * WAN.flops().matmul_per_sequence, H200.peak_flops * H200.matmul_share
    assert cost.c_sequence == pytest.approx(products / rate)
    assert bytes_per_split_token(WAN, "full") == 12 * 2 * 1536 * 30
    assert bytes_per_split_token(WAN, "none") == 8 * 2 * 1536 * 30  # nothing is sent again


def test_families_are_told_from_each_other(tmp_path):
    assert model_names()[:2] == ("wan2.1-1.3b", "wan2.1-14b")
    assert isinstance(from_fields(WAN.fields()), WanArchitecture)
    assert "family" not in WAN.fields()
    costs = analytic_costs(HUNYUAN_VIDEO_1_5, H200, shards=8)
    assert costs.unlike({"depth": 8}) == "family hunyuan_video (here wan)"
    assert costs.unlike(HUNYUAN_VIDEO_1_5.fields(), "NVIDIA H200") == ""
    assert costs.unlike({"family": "hunyuan_video"}, "cpu") == "device NVIDIA H200 (here cpu)"
    wan = write_json(tmp_path / "cost.json", {"format": FORMAT, "model": {"dim": 8}})
    assert read_cost_file(wan).unlike({"dim": 8}, "cpu") == ""
    assert read_cost_file(wan).unlike({"dim": 8, "family": "joint"}) == "family wan (here joint)"
    assert read_cost_file(wan).unlike({"dim": 8, "matmul": "dtype"}) == ""
    assert "matmul dtype" in read_cost_file(wan).unlike({"dim": 8, "matmul": "float8"})


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: device_named("tpu"), "choose one of h200 (NVIDIA H200)"),
        (lambda: architecture_named("wan3"), "choose one of wan2.1-1.3b"),
        (lambda: analytic_costs(WAN, H200, "most"), "choose one of full, offload, offload_att"),
        (lambda: analytic_costs(WAN_14B, H200), "shard it over more devices"),
        (lambda: analytic_costs(WAN, H200, shards=0), "give at least 1"),
        (lambda: analytic_costs(WAN, H200, trained=Trained(0)), "from 1 to 1418996800"),
        (lambda: state_bytes(10, Trained(11)), "11 parameters are to be trained"),
        (lambda: Trained(3, "int8"), "choose one of float32, bfloat16"),
        *(
            (lambda n=n: from_fields({"dim": 8, "ffn_dim": n}), f"model.ffn_dim is {n!r}")
            for n in (None, 0, True)
        ),
        (lambda: from_fields({"family": "mamba"}), "model family 'mamba' is unknown"),
        (lambda: from_fields({"family": "hunyuan_video", "dim": 16}), "model.ffn_dim is N"),
    ],
)
def test_refusals_are_one_line(action, words):
    refused([words], action)
    assert state_bytes(10, Trained(1)) == 24 + 36
    with pytest.raises(ValueError, match="'wan' exists already"):
        register_architecture("wan", WanArchitecture)
