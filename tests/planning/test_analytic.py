"""The analytic cost model: its counts, and its accuracy on measurements of an H200."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from planning_cases import refusal

from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.cudnn import launched_tokens
from alload_jax.models.families import parameter_count
from alload_jax.models.hunyuan_video.costs import HUNYUAN_VIDEO_1_5
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
from alload_jax.planning.architecture import architecture_named, from_fields
from alload_jax.planning.cost import bucketed_cost, read_cost_file, write_cost_file
from alload_jax.planning.devices import DEVICES, device_named

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = DEVICES["h200"]
REMAT = (
    *("full", "attention", "feed_forward_and_attention", "matmuls_and_attention"),
    *("norms_matmuls_and_attention", "none"),
)
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
        *(("full", 1), ("attention", 1), ("matmuls_and_attention", 1)),
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


def measured_memory():
    """(remat, rows, tokens, bytes, how many times as much is predicted at most) on an H200."""
    bars = cases_of("step_bars_h200.json")
    for case in bars:
        # Without a loop XLA keeps less of what `none` could.
        most = 1.14 if case["remat"] == "none" else 1.05
        tokens = case["rows"] * math.prod(case["latents"]) // 4
        yield case["remat"], case["rows"], tokens, case["bytes"], most
    [auto] = cases_of("step_auto_h200.json")
    yield auto["policies"][0], 1, auto["tokens"], auto["peak_bytes"], 1.05
    for case in cases_of("step_same_1560_h200.json"):
        yield "attention", 42, 42 * 1560, case["peak_bytes"], 1.05


def test_packed_rows_of_short_and_long_samples_take_a_work_space():
    """10 layers, 81,920 tokens in 8 slots of up to 75,600."""
    [packed, _] = cases_of("step_mixed_resolution_h200.json")
    model = dataclasses.replace(WAN, num_layers=10)
    single = Trained(bytes_each=18, accumulates=False)
    found = step_memory(model, H200, "attention", trained=single).bytes_of(81_920, 8)
    lengths = ((0, 8), (7950, 5), (18000, 3), (27030, 2), (33390, 1), (75600, 0))
    beyond = launched_tokens(1, 81_920, lengths) - 81_920
    found += 4 * WAN.dim * beyond - WORKSPACE_BYTES
    assert packed["peak_bytes"] < found < 1.05 * packed["peak_bytes"]


def test_predicted_memory_matches_measurements():
    single = Trained(bytes_each=18, accumulates=False)  # gradients of matrices have 16 bits
    for remat, rows, tokens, bytes_, most in measured_memory():
        found = step_memory(WAN, H200, remat, trained=single).bytes_of(tokens, rows)
        assert 0.99 * bytes_ < found - WORKSPACE_BYTES < most * bytes_, (remat, rows, tokens)


def memory_cases():
    cases = json.loads((RESULTS / "memory_measured_h200.json").read_text())
    return cases["share_for_jax"], cases["cases"]


def memory_of(case):
    """The memory model of a measured run of train.py, and bytes that JAX could use."""
    name, flags = case["config"], dict(zip(case["flags"][::2], case["flags"][1::2], strict=True))
    architecture = WAN_14B if "14b" in name else WAN
    trained = ALL_TRAINED
    if "lora" in name:
        dim, ffn = architecture.dim, architecture.ffn_dim
        count = 32 * architecture.num_layers * (8 * 2 * dim + 2 * (dim + ffn))
        dtype = flags.get("--parameters.frozen_dtype", "bfloat16")
        trained = Trained(count, dtype, STATE_BYTES - 4)  # without a moving average
    remat = flags.get("--model.remat", "full")
    found = step_memory(architecture, H200, remat, trained=trained)
    return found, case["memory_gb"] * 1e9


def test_predicted_memory_of_adapters_matches_measured_runs():
    measured = [case for case in memory_cases()[1] if case["fits"]]
    assert {case["config"] for case in measured if case["memory_gb"] == 24} >= {
        "wan2_1_t2v_1_3b_lora",
        "wan2_1_t2v_14b_lora",
    }
    for case in measured:  # when a step took a little more
        found, _ = memory_of(case)
        assert 0.9 < found.bytes_of(case["tokens"]) / case["peak_bytes"] < 1, case


def test_clips_that_are_predicted_to_fit_did():
    share, cases = memory_cases()
    assert {case["fits"] for case in cases} == {True, False}
    for case in cases:
        found, memory = memory_of(case)
        fits = found.max_tokens(memory * share, 0.05) >= case["tokens"]
        assert fits == case["fits"], case


MODELS = [
    WanConfig(dim=48, ffn_dim=100, num_heads=3, num_layers=2, in_channels=5, num_classes=7),
    WanConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=3, text=TextConfig(24, 9)),
    WanConfig(dim=32, num_heads=2, patch_size=(2, 1, 4), qk_norm=False, cross_norm=False),
    WanConfig(dim=32, num_heads=2, in_channels=6, out_channels=3, freq_dim=64),
    WanConfig(dim=32, num_heads=2, text=TextConfig(24, 9), image=ImageConfig(20, 30)),
]


@pytest.mark.parametrize("config", MODELS)
def test_parameters_are_those_of_the_model(config):
    found = from_fields(json.loads(json.dumps(config.architecture())))
    assert found.parameters() == parameter_count(config)
    assert from_fields(json.loads(json.dumps(found.fields()))) == found


def test_wan_models_have_the_published_parameter_counts_and_devices_two_names():
    assert WAN.parameters() == 1_418_996_800
    assert WAN_14B.parameters() == pytest.approx(14.3e9, rel=0.01)
    for name in ("h200", "NVIDIA H200", "nvidia h200"):
        assert device_named(name) == H200
    for device in DEVICES.values():
        costs = analytic_costs(dataclasses.replace(WAN, num_layers=2), device, "full")
        assert min(costs.m_mem, *dataclasses.astuple(costs.quadratic)[:3]) > 0


def test_forward_flops_are_the_formula():
    shape = WanArchitecture(dim=6, ffn_dim=10, num_heads=3, num_layers=4, text_length=7)
    d, f, t, s = 6, 10, 7, 11
    block = 12 * s * d**2 + 4 * s * d * f + 4 * s**2 * d + 4 * t * d**2 + 4 * s * t * d
    assert shape.forward_flops(s) == 4 * block


def test_recomputation_costs_time_and_kept_activations_cost_memory():
    seconds = [seconds_of(WAN, H200, remat, 1, 32_760) for remat in REMAT]
    per_token = [step_memory(WAN, H200, remat).per_token for remat in REMAT]
    assert seconds == sorted(seconds, reverse=True)
    assert per_token == sorted(per_token)
    sent = [bytes_per_split_token(WAN, remat) for remat in ("none", "attention")]
    assert sent[0] == pytest.approx(sent[1] * 8 / 12)  # nothing is sent again


def test_a_file_contains_everything_that_planning_needs(tmp_path):
    costs = analytic_costs(WAN, H200)
    write_cost_file(tmp_path / "cost.json", costs)
    found = read_cost_file(tmp_path / "cost.json")
    assert found == costs
    assert found.origin == "analytic"
    assert found.device == "NVIDIA H200"
    assert from_fields(found.model) == WAN
    assert found.bytes_per_split_token == 12 * 2 * 1536 * 30
    assert 1 < found.power.p < 2


def test_shards_share_the_state():
    whole, shared = (step_memory(WAN, H200, "full", shards) for shards in (1, 8))
    assert shared.base - WORKSPACE_BYTES == (whole.base - WORKSPACE_BYTES) / 8
    assert shared.per_token == whole.per_token


def test_replicas_share_all_of_the_state_but_the_weights():
    """As arrays of ZeRO: each replica holds float32 weights, and frozen ones, whole."""
    lora = Trained(1_000_000, "bfloat16")
    total = WAN.parameters()
    for trained, count, whole in (
        (ALL_TRAINED, total, 4 * total),
        (lora, 1_000_000, 4 * 1_000_000 + 2 * (total - 1_000_000)),
    ):
        given = step_memory(WAN, H200, "full", 2, trained, replicas=8)
        expected = (whole + 20 * count / 8) / 2
        assert given.base - WORKSPACE_BYTES == pytest.approx(expected, abs=1)
        assert given.per_token == step_memory(WAN, H200, "full", 2, trained).per_token


@pytest.mark.parametrize(("dtype", "bytes_"), [("float32", 4), ("bfloat16", 2)])
def test_a_frozen_parameter_takes_its_own_bytes_and_no_more(dtype, bytes_):
    lora = Trained(1_000_000, dtype)
    frozen = WAN.parameters() - 1_000_000
    expected = 24 * 1_000_000 + bytes_ * frozen
    assert state_bytes(WAN.parameters(), lora) == expected
    costs = analytic_costs(WAN, H200, shards=2, trained=lora)
    assert costs.memory.base == expected / 2 + WORKSPACE_BYTES
    adapters = 2 * WAN.dim
    assert costs.memory.per_token == analytic_costs(WAN, H200).memory.per_token + adapters
    assert costs.m_mem > analytic_costs(WAN, H200, shards=2).m_mem


def test_frozen_parameters_need_neither_update_nor_gradient():
    full = step_cost(WAN, H200, "none")
    half = step_cost(WAN, H200, "none", Trained(WAN.parameters() // 2))
    assert half.c0 == pytest.approx(full.c0 - 26 * WAN.parameters() / H200.bandwidth)
    assert half.c_sequence == pytest.approx(full.c_sequence * 2.5 / 3)
    assert half.c2 == full.c2
    assert step_cost(WAN, H200, "none", Trained(WAN.parameters())) == full


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: device_named("tpu"), "choose one of h200 (NVIDIA H200)"),
        (lambda: architecture_named("wan3"), "choose one of wan2.1-1.3b"),
        (
            lambda: analytic_costs(WAN, H200, "most"),
            "choose one of full, offload, offload_attention, offload_feed_forward_and_attention, ",
        ),
        (lambda: analytic_costs(WAN_14B, H200), "shard it over more devices"),
        (lambda: analytic_costs(WAN, H200, shards=0), "give at least 1"),
        (lambda: analytic_costs(WAN, H200, trained=Trained(0)), "from 1 to 1418996800"),
        (lambda: state_bytes(10, Trained(11)), "11 parameters are to be trained"),
        (lambda: Trained(3, "int8"), "choose one of float32, bfloat16"),
        (lambda: from_fields({"dim": 8}), "model.ffn_dim is None"),
    ],
)
def test_refusals_are_one_line(action, words):
    assert words in refusal(action)
