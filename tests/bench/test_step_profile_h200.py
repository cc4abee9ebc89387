"""`alload bench step --profile` of an H200's step: 30 layers, 32,760 tokens, remat attention.

`step_profile_h200/` holds what `--keep-trace` wrote, shortened: the kernels of one step, in
microseconds, with their instructions and copied bytes, and the programs without layouts, schedules
and sources.
"""

import lzma
import re
from collections import Counter
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from alload_jax.bench.step_profile import attribution, hlo
from alload_jax.bench.step_profile.attribution import COPIES, ELSE, PRODUCTS
from alload_jax.bench.step_profile.hlo import read_program
from alload_jax.bench.step_profile.measure import attributed
from alload_jax.models.common import parts
from alload_jax.planning.architecture import from_fields

TOKENS = 32760
MODEL = {
    "dim": 1536,
    "num_heads": 12,
    "ffn_dim": 8960,
    "num_layers": 30,
    "in_channels": 16,
    "text": {"dim": 4096, "length": 512},
}


def read(name):
    return lzma.open(Path(__file__).parent / "step_profile_h200" / name, "rt").read()


@pytest.fixture(scope="module")
def trace():
    return ProfileData.from_text_proto(read("trace.txtpb.xz"))


@pytest.fixture(scope="module")
def profile(trace):
    return attributed(trace, read("accumulate.hlo.txt.xz"), read("update.hlo.txt.xz"))


def seconds(profile, wanted):
    return sum(each["seconds"] for each in profile["operations"] if wanted(each))


def test_the_parts_add_up_and_hardly_anything_has_no_name(profile):
    whole = seconds(profile, lambda each: True) + profile["idle_seconds"]
    assert whole == pytest.approx(profile["traced_seconds"])
    assert seconds(profile, lambda each: each["part"] == ELSE) < 1e-3 * whole


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (r"cudnn", set(attribution.ATTENTION.values())),
        (r"^nvjet|cublas", {PRODUCTS}),
        (r"^layernorm_modulate", {attribution.PARTS[parts.NORM]}),
        (r"^MemcpyD2D", {COPIES}),
    ],
)
def test_parts_agree_with_what_kernels_are_called(profile, kernels, expected):
    """The names of libraries' kernels say what they do, without any program."""
    named = [each for each in profile["operations"] if re.search(kernels, each["kernel"])]
    spent = Counter()
    for each in named:
        spent[each["part"]] += each["seconds"]
    found = sum(spent[part] for part in expected)
    # The head has a norm of its own, and the optimizer and bookkeeping copy, too.
    outside = {ELSE, attribution.OPTIMIZER, attribution.PARTS[parts.HEAD]}
    assert set(spent) <= expected | outside
    assert found > 0.7 * sum(spent.values())


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
    kept = Counter(
        each["tensor"]
        for each in profile["operations"]
        if each["detail"] == "kept tensors into the scan's stacks"
    )
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


def test_flops_are_those_of_the_architecture(profile):
    forward, backward = Counter(), Counter()
    passes = {"forward": forward, "backward": backward}
    blocks = {
        each["instruction"]: each
        for each in profile["operations"]
        if f"/{parts.BLOCKS}/" in each["op_name"] and each["detail"] in passes
    }
    for each in blocks.values():
        passes[each["detail"]][each["part"]] += MODEL["num_layers"] * each["flops"]
    expected = from_fields(MODEL).forward_flops(TOKENS)
    assert sum(forward.values()) == pytest.approx(expected, rel=1e-3)
    products = expected - forward["self-attention"] - forward["cross-attention"]
    assert backward[PRODUCTS] == pytest.approx(2 * products, rel=1e-3)
