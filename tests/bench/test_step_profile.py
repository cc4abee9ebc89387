"""`alload bench step --profile`: programs, their parts, division of time, rows, pictures."""

import itertools
import json
import lzma
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.profiler import ProfileData

from alload_jax.bench.pictures import draw_profile
from alload_jax.bench.step_profile import attribution, hlo, roofs, summary
from alload_jax.bench.step_profile.attribution import (
    COMMUNICATION,
    COPIES,
    ELSE,
    IDLE,
    OPTIMIZER,
    ORDER,
    PRODUCTS,
    UNKNOWN,
    attributions,
    pass_of,
)
from alload_jax.bench.step_profile.hlo import read_program
from alload_jax.bench.step_profile.measure import attributed, attribution_of
from alload_jax.bench.trace import Operation, Span, divide
from alload_jax.cli import main
from alload_jax.models.common import parts
from alload_jax.models.families import config_from_fields
from alload_jax.planning.architecture import from_fields
from alload_jax.training.trial_step import Step, training_spec

# ---------------------------------------------------------------- division of time

TIME = 30
spans = st.lists(
    st.tuples(st.integers(-5, TIME + 5), st.integers(0, 20), st.booleans()), max_size=12
).map(
    lambda drawn: [
        Span(begin, begin + length, Operation("p", str(n), "ncclAllReduce" if comm else "gemm"))
        for n, (begin, length, comm) in enumerate(drawn)
    ]
)


@given(spans)
def test_every_instant_belongs_to_what_runs_in_it(drawn):
    """Against an oracle that looks at each unit of time by itself."""
    expected, expected_idle = [0.0] * len(drawn), 0.0
    for instant in range(TIME):
        running = [n for n, each in enumerate(drawn) if each.begin <= instant < each.end]
        computing = [n for n in running if drawn[n].operation.kernel == "gemm"]
        for n in (owners := computing or running):
            expected[n] += 1 / len(owners)
        expected_idle += not running
    owned, idle = divide(drawn, 0, TIME)
    np.testing.assert_allclose(owned, expected, atol=1e-9)
    assert idle == pytest.approx(expected_idle)
    assert sum(owned) + idle == pytest.approx(TIME)


# ---------------------------------------------------------------- programs of GPUs

STACK = "jit(accumulate)/jvp(objective)/blocks/while/body"
BACKWARD = "jit(accumulate)/transpose(jvp(objective))/blocks/while/body/checkpoint"
GPU_PROGRAM = (Path(__file__).parent / "step_profile_gpu.hlo.txt").read_text()
"""What XLA writes for a GPU, shortened to one instruction of each kind."""
HIDDEN, WIDTH, TOKENS, ELEMENT = 512, 1536, 4096, 2


@pytest.fixture(scope="module")
def gpu_parts():
    return attributions(read_program(GPU_PROGRAM))


def test_parts_of_a_gpu_program(gpu_parts):
    found = {name: (each.part, each.detail) for name, each in gpu_parts.items()}
    assert found == {
        "kept": ("copies", "zeros and broadcasts"),
        "gemm.1": (PRODUCTS, "forward"),
        "loop_fusion.2": ("activation", "forward"),
        "dus_fusion": ("copies", "kept tensors into the scan's stacks"),
        "fmha": ("self-attention", "forward"),
        "bare": ("self-attention", "backward"),
        "bias_gradient": ("biases", "backward"),
        "all-reduce-start.1": (COMMUNICATION, ""),
        "result": ("copies", "layout"),
        # A product that reads a layer's slice of stacked kernels is known by its own name, too.
        "fusion.2": (PRODUCTS, "backward"),
    } | {name: found[name] for name in ("q", "custom-call.7")}
    assert gpu_parts["custom-call.7"] == gpu_parts["fusion.2"]
    assert gpu_parts["loop_fusion.2"].also == ("biases",)


def test_work_of_a_gpu_program(gpu_parts):
    """By formulas: 2·M·N·K; two products of attention forward and five backward."""
    hidden = TOKENS * HIDDEN * ELEMENT
    assert gpu_parts["gemm.1"].flops == 2 * TOKENS * HIDDEN * WIDTH
    assert gpu_parts["fusion.2"].flops == 2 * 64 * 32 * 16
    assert gpu_parts["fmha"].flops == 2 * 2 * 12 * TOKENS**2 * 128
    assert gpu_parts["bare"].flops == 5 * 2 * 12 * TOKENS**2 * 128
    assert gpu_parts["loop_fusion.2"].bytes == 2 * hidden + HIDDEN * ELEMENT
    # The stack is updated in place: one layer is read and written, and the layer's number read.
    assert gpu_parts["dus_fusion"].bytes == 2 * hidden + 4
    assert gpu_parts["result"].bytes == 2 * 30 * hidden


def test_kernels_that_no_program_has_are_everything_else(gpu_parts):
    known = {"jit_accumulate": gpu_parts}
    assert attribution_of(Operation("", "", "Memset"), known) == UNKNOWN
    assert attribution_of(Operation("jit_accumulate", "fusion.99", "k"), known).part == ELSE
    collective = Operation("jit_accumulate", "gemm.1", "ncclDevKernel_AllReduce")
    assert attribution_of(collective, known).part == COMMUNICATION


def test_names_without_a_scope_are_those_of_the_program():
    text = GPU_PROGRAM.replace("jit_accumulate", "jit_update").replace(STACK, "jit(update)")
    found = attributions(read_program(text), OPTIMIZER)
    assert found["result"].part == found["kept"].part == OPTIMIZER
    assert found["gemm.1"].part == PRODUCTS
    assert pass_of(f"{BACKWARD}/rematted_computation/add") == "recomputed"
    with pytest.raises(ValueError, match="must begin with 'HloModule'"):
        read_program("module @jit_f {")


# ---------------------------------------------------------------- programs of our models

WAN = {"dim": 32, "ffn_dim": 96, "num_heads": 2, "num_layers": 1, "in_channels": 4}
WAN |= {"text": {"dim": 16, "length": 8}}
HUNYUAN_VIDEO = WAN | {"family": "hunyuan_video", "refiner_layers": 1, "patch_size": [1, 1, 1]}
ROWS, LATENTS = 2, (2, 8, 8)


def compiled_program(fields, remat):
    model = config_from_fields(fields | {"remat": remat, "dtype": "float32"})
    step = Step(training_spec(model))
    return read_program(step.compile((ROWS, *LATENTS)).as_text())


@pytest.fixture(scope="module")
def wan():
    return attributions(compiled_program(WAN, "full"))


@pytest.mark.slow
def test_every_part_of_a_block_is_found_in_its_passes(wan):
    found = {(each.part, each.detail) for each in wan.values()}
    everywhere = ("self-attention", "cross-attention", PRODUCTS, "norms with modulation")
    everywhere += ("q/k RMSNorm, rotary embedding", "activation")
    assert not {*itertools.product(everywhere, ("forward", "recomputed", "backward"))} - found
    assert {("embeddings and head", "forward"), ("gradient accumulation", "")} <= found
    assert {part for part, _ in found} <= set(ORDER)


@pytest.mark.slow
def test_flops_of_the_passes_are_those_of_the_architecture(wan):
    counted = Counter()
    for each in wan.values():
        if f"/{parts.BLOCKS}/" in each.op_name:
            counted[each.detail] += each.flops
    tokens = LATENTS[0] * (LATENTS[1] // 2) * (LATENTS[2] // 2)
    forward = ROWS * from_fields(WAN).forward_flops(tokens)
    assert counted["forward"] == pytest.approx(forward)
    assert counted["backward"] == pytest.approx(2 * forward)
    assert 0 < counted["recomputed"] <= forward


@pytest.mark.slow
def test_parts_of_joint_attention_without_rematerialisation():
    found = attributions(compiled_program(HUNYUAN_VIDEO, "none"))
    details = {(each.part, each.detail) for each in found.values()}
    assert {("joint attention", "forward"), ("joint attention", "backward")} <= details
    assert not any(detail == "recomputed" for _, detail in details)
    assert {"q/k RMSNorm, rotary embedding", "norms with modulation"} <= {p for p, _ in details}


# ---------------------------------------------------------------- rows

RATES = {"matmul_flops_per_second": 1e12, "copy_bytes_per_second": 1e9, "attention": []}
operations = st.lists(
    st.fixed_dictionaries(
        {
            "program": st.sampled_from(["p", "q"]),
            "instruction": st.sampled_from(["a", "b", "c"]),
            "kernel": st.sampled_from(["k", "l"]),
            "part": st.sampled_from([PRODUCTS, "copies", "activation", ELSE, COMMUNICATION]),
            "detail": st.sampled_from(["forward", "backward", ""]),
            "calls": st.integers(1, 9),
            "seconds": st.floats(1e-6, 1e-2),
            "running": st.floats(1e-6, 1e-2),
            "flops": st.sampled_from([0.0, 1e6]),
            "bytes": st.sampled_from([0.0, 1e3]),
            "attention": st.none(),
        }
    ),
    max_size=12,
)


@given(operations, st.floats(0, 1e-2), st.sampled_from([RATES, None]))
def test_rows_add_up_to_the_traced_step(drawn, idle, rates):
    traced = idle + sum(each["seconds"] for each in drawn) or 1.0
    idle = traced - sum(each["seconds"] for each in drawn)
    profile = {"operations": drawn, "idle_seconds": idle, "traced_seconds": traced}
    found = summary.rows(profile, rates)
    totals = summary.totals(found)
    for added in (found, totals):
        assert sum(row.seconds for row in added) == pytest.approx(traced)
        assert sum(row.share for row in added) == pytest.approx(1)
        assert sum(row.calls for row in added) == sum(each["calls"] for each in drawn)
        assert added[-1].part == IDLE
    roofs = (sum(row.roof_seconds or 0.0 for row in added) for added in (found, totals))
    assert next(roofs) == pytest.approx(next(roofs))


def operation(instruction, **fields):
    base = {"program": "p", "instruction": instruction, "kernel": instruction, "part": PRODUCTS}
    base |= {"detail": "forward", "calls": 2.0, "seconds": 1.0, "flops": 0.0, "bytes": 0.0}
    fields = {"seconds": base["seconds"], "attention": None} | fields
    return base | {"running": fields["seconds"]} | fields


CALL = {"rows": 1, "queries": 8, "keys": 8, "heads": 2, "head_dim": 4}
ALONE = CALL | {"forward_seconds": 0.25, "backward_seconds": 0.5}


def test_roofs_are_the_slower_of_products_and_bytes():
    def rows_of(*operations):
        seconds = sum(each["seconds"] for each in operations)
        profile = {"operations": operations, "idle_seconds": 0.0, "traced_seconds": seconds}
        return summary.rows(profile, RATES)

    row, _ = rows_of(
        operation("a", flops=5e11, bytes=1e6),
        operation("b", flops=1e6, bytes=5e8),
        # A second kernel of the same instruction does not double its work.
        operation("b", kernel="reduction", flops=1e6, bytes=5e8),
    )
    assert row.roof_seconds == pytest.approx(2 * 0.5 + 2 * 0.5)
    assert row.of_roof == pytest.approx(2 / 3)
    # Rates are of the time in which kernels run, not of their part of it.
    row, _ = rows_of(operation("a", bytes=5e8, seconds=0.5, running=2.0))
    assert (row.seconds, row.share) == (0.5, 1)
    assert row.of_roof == pytest.approx(0.5)
    # Few FLOPs among many bytes, as of gradient accumulation, do not make a rate of FLOPs.
    mixed = operation("a", bytes=1e9, flops=1e3), operation("b", part="activation", flops=1e12)
    for found in (rows_of(*mixed), summary.totals(rows_of(*mixed))):
        bounds = {row.part: row.bound for row in found}
        assert bounds == {PRODUCTS: "bytes", "activation": "flops", IDLE: ""}


@given(operations)
def test_records_hold_all_the_time(drawn):
    kept = summary.records(drawn)
    everything = kept["operations"] + kept["shorter"]
    for name in ("seconds", "calls"):
        held = sum(each[name] for each in everything)
        assert held == pytest.approx(sum(each[name] for each in drawn))
    assert all(each["seconds"] >= summary.SHORTEST for each in kept["operations"])
    assert len(kept["operations"]) + sum(e["operations"] for e in kept["shorter"]) == len(drawn)


def test_the_roof_of_a_step_has_no_recomputation():
    done = [
        operation("forward", flops=1e12),
        operation("again", detail="recomputed", flops=1e12),
        operation("backward", detail="backward", flops=2e12),
        *(
            operation(name, part="self-attention", attention=CALL | {"backward": backward})
            for name, backward in (("first", False), ("second", False), ("third", True))
        ),
    ]
    profile = {"operations": done, "optimizer_bytes": 3e9}
    assert summary.attention_shapes(done) == [CALL]
    roof = summary.step_roof(profile, RATES | {"attention": [ALONE]})
    parts = {"products": 2 + 4, "attention": 2 * 0.75, "optimizer": 3}
    assert roof == pytest.approx(parts | {"seconds": 10.5})


def test_rates_are_measured_by_wall_clock():
    product = jax.jit(jnp.matmul)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert product[0, 0] == 64
    assert 1e6 < roofs.matmul_rate(128) < 1e14


# ---------------------------------------------------------------- picture and command


@settings(max_examples=2, deadline=None)
@given(operations)
def test_a_picture_is_drawn_of_any_profile(tmp_path_factory, drawn):
    traced = 1e-3 + sum(each["seconds"] for each in drawn)
    profile = {"operations": drawn, "idle_seconds": 1e-3, "traced_seconds": traced}
    rows = [row._asdict() for row in summary.rows(profile, RATES)]
    case = {"rows": rows, "seconds": traced, "traced_seconds": traced, "roof": None}
    path = tmp_path_factory.mktemp("profile") / "step.png"
    draw_profile(path, case, "1×2×8×8 latents")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_step_is_profiled_on_a_cpu(in_process, tmp_path):
    out, kept = tmp_path / "step.json", tmp_path / "kept"
    flags = ["--model", "tiny", "--latents", "1", "4", "4", "--steps", "1", "--remat", "full"]
    flags += ["--profile", "--keep-trace", str(kept), "--out", str(out)]
    assert main(["bench", "step", *flags]) == 0
    [case] = json.loads(out.read_text())["cases"]
    assert sum(row["seconds"] for row in case["rows"]) == pytest.approx(case["traced_seconds"])
    named = sum(row["seconds"] for row in case["rows"] if row["part"] not in (ELSE, IDLE))
    unnamed = sum(row["seconds"] for row in case["rows"] if row["part"] == ELSE)
    assert named > 5 * unnamed
    assert case["roofs"] is None
    assert (tmp_path / "step_full.png").is_file()
    names = {path.name for path in (kept / "full").iterdir()}
    assert names == {"accumulate.hlo.txt.gz", "trace.xplane.pb.gz", "update.hlo.txt.gz"}


def test_scopes_of_the_models_have_parts():
    places = {*attribution.ATTENTION, parts.FEED_FORWARD, parts.ATTENTION}
    constants = {name: value for name, value in vars(parts).items() if name.isupper()}
    scopes = [name for name in constants if not name.endswith(("_OUTPUT", "_LISTS"))]  # kept values
    names = {constants[name] for name in scopes if isinstance(constants[name], str)}
    assert names == places | set(attribution.PARTS) - {attribution.GRADIENT_SUMS}


# ---------------------------------------------------------------- a step of an H200


def read(name):
    """What `--keep-trace` wrote of one step, shortened to kernels and programs."""
    return lzma.open(Path(__file__).parent / "step_profile_h200" / name, "rt").read()


@pytest.fixture(scope="module")
def trace():
    return ProfileData.from_text_proto(read("trace.txtpb.xz"))


@pytest.fixture(scope="module")
def profile(trace):
    return attributed(trace, read("accumulate.hlo.txt.xz"), read("update.hlo.txt.xz"))


def test_the_parts_add_up_and_hardly_anything_has_no_name(profile):
    operations = profile["operations"]
    whole = sum(each["seconds"] for each in operations) + profile["idle_seconds"]
    assert whole == pytest.approx(profile["traced_seconds"])
    unnamed = sum(each["seconds"] for each in operations if each["part"] == ELSE)
    assert unnamed < 1e-3 * whole


def test_parts_agree_with_what_kernels_are_called(profile):
    """The names of libraries' kernels say what they do, without any program."""
    # The head has a norm of its own, and the optimizer and bookkeeping copy, too.
    outside = {ELSE, attribution.OPTIMIZER, attribution.PARTS[parts.HEAD]}
    for kernels, expected in {
        r"cudnn": set(attribution.ATTENTION.values()),
        r"^nvjet|cublas": {PRODUCTS},
        r"^layernorm_modulate": {attribution.PARTS[parts.NORM]},
        r"^MemcpyD2D": {COPIES},
    }.items():
        spent = Counter()
        for each in profile["operations"]:
            if re.search(kernels, each["kernel"]):
                spent[each["part"]] += each["seconds"]
        assert set(spent) <= expected | outside
        assert sum(spent[part] for part in expected) > 0.7 * sum(spent.values())


def test_asynchronous_copies_have_the_bytes_that_the_profiler_saw(trace, profile):
    sizes = {}
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if size := re.search(r"size:(\d+)", str(stats.get("memcpy_details", ""))):
                    sizes[stats.get("hlo_module"), stats.get("hlo_op")] = int(size[1])
    checked = Counter()
    for each in profile["operations"]:
        kind = hlo.kind_by_name(each["instruction"])
        if kind and each["kernel"] == "MemcpyD2D":
            number = 4  # bytes of the number of the layer, which the kernel reads as well
            copied = 2 * sizes[each["program"], each["instruction"]]
            assert each["bytes"] in (copied, copied + number)
            checked[kind] += 1
    assert checked == {"into the scan's stacks": 7, "out of the scan's stacks": 7}


def test_tensors_that_are_kept_are_named(profile):
    detail = "kept tensors into the scan's stacks"
    kept = Counter(each["tensor"] for each in profile["operations"] if each["detail"] == detail)
    core = "attention_core/dot_product_attention_fwd"
    assert kept == {
        "bf16[1,1,32760,1536]": 1,
        f"bf16[1,1,32760,12,128] of self_attention/{core}": 1,
        f"bf16[1,1,32760,12,128] of cross_attention/{core}": 1,
        f"f32[1,1,12,32760] of self_attention/{core}": 1,
        f"f32[1,1,12,32760] of cross_attention/{core}": 1,
    }


def test_copies_whose_numbers_do_not_fit_keep_their_kind_only():
    program = read_program(read("accumulate.hlo.txt.xz"))
    assert hlo.wrapping_starts(program, ["loop_dynamic_slice_fusion.7"]) == {}
    found = attribution.unknown("loop_dynamic_update_slice_fusion.99")
    assert (found.part, found.detail) == (COPIES, "into the scan's stacks")
    assert attribution.unknown("loop_add_fusion.99") == attribution.UNKNOWN
