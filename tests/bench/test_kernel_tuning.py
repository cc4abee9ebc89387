"""The search for divisions of rows, and the files that keep what it finds."""

import json
import math
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.bench.kernel_tuning import Best, Timed, candidates, faster_range, tuned
from alload_jax.cli import main
from alload_jax.errors import InputError
from pallas_kernels.layernorm_modulate.triton import tuned_files, tuning
from pallas_kernels.layernorm_modulate.triton.division import Division, Pass, Range
from pallas_kernels.layernorm_modulate.triton.tuned_files import Tuned

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DEVICE = "NVIDIA A100-SXM4-80GB"
PASSES = get_args(Pass)
DIVISIONS = st.builds(
    Division,
    st.sampled_from([128, 256, 512, 1024, 2048]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 32),
    st.booleans(),
    st.booleans(),
)
TUNED = st.builds(
    Tuned,
    st.fixed_dictionaries(
        {kernel: st.dictionaries(st.integers(1, 9000), DIVISIONS, max_size=3) for kernel in PASSES}
    ),
    st.none()
    | st.builds(
        Range, st.integers(0, 1 << 30), st.tuples(st.integers(1, 99), st.integers(99, 9999))
    ),
)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        tuned_files.read.cache_clear()
        yield
    tuned_files.read.cache_clear()


@given(TUNED)
def test_a_file_holds_what_was_measured(measured):
    tuned_files.write(DEVICE, measured, {"command": "alload bench tune"})
    assert tuned_files.read(DEVICE) == measured


@given(TUNED, st.sampled_from(PASSES), st.integers(1, 8192))
def test_a_measured_width_goes_before_the_table(measured, kernel, dim):
    tuned_files.write(DEVICE, measured, {})
    known = tuning.divisions(kernel, DEVICE)
    for width in known:
        expected = measured.divisions[kernel].get(width) or tuning.MEASURED[kernel][width]
        assert tuning.nearest(known, width) == expected
    width = min(known, key=lambda each: abs(math.log(each / dim)))
    assert tuning.nearest(known, dim) == known[width]


@given(TUNED, st.integers(1, 9000), st.integers(1, 1 << 31))
def test_auto_takes_the_kernels_where_the_file_says_so(measured, dim, elements):
    tuned_files.write(DEVICE, measured, {})
    found = tuning.faster_than_reference(DEVICE, "row", elements, dim)
    faster = measured.faster
    assert found == (
        faster is not None
        and faster.widths[0] <= dim <= faster.widths[1]
        and elements >= faster.least_elements
    )
    # Only that layout was measured.
    assert not tuning.faster_than_reference(DEVICE, "segment", elements, dim)


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"])
def test_an_h100_takes_what_its_chip_takes(kind):
    for layout in ("row", "segment", "token"):
        for dim in (1024, 1536, 5120, 8192):
            call = (layout, 1 << 30, dim)
            expected = tuning.faster_than_reference("NVIDIA H200", *call)
            assert tuning.faster_than_reference(kind, *call) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        json.dumps({"format": "layernorm-modulate-tuning-1", "device": "another"}),
        json.dumps(
            {
                "format": "layernorm-modulate-tuning-1",
                "device": DEVICE,
                "faster": None,
                "divisions": {"forward": {"64": {"max_tile": 100, "num_warps": 1, "per_core": 1}}},
            }
        ),
    ],
)
def test_a_damaged_file_is_named(text):
    path = tuned_files.write(DEVICE, Tuned({}, None), {})
    path.write_text(text)
    tuned_files.read.cache_clear()
    with pytest.raises(ValueError, match=r"a100.*\.json: not a result of .*; delete it"):
        tuned_files.read(DEVICE)
    path.unlink()


@given(st.sampled_from(PASSES), st.integers(65, 8192))
def test_candidates_can_run_and_differ(kernel, dim):
    found = list(candidates(kernel, dim))
    assert len(set(found)) == len(found) > 0
    for each in found:
        assert each.max_tile // 2 < dim
        assert each.max_tile & (each.max_tile - 1) == 0


@given(
    st.dictionaries(
        st.integers(1, 9000), st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), max_size=12
    )
)
def test_the_range_has_no_width_that_was_slower(ratios):
    found = faster_range(ratios)
    if found is None:
        assert all(min(each) <= 1 for each in ratios.values())
        return
    inside = [dim for dim in ratios if found.widths[0] <= dim <= found.widths[1]]
    assert inside
    assert all(min(ratios[dim]) > 1 for dim in inside)


@given(TUNED, DIVISIONS, st.sampled_from(PASSES), st.integers(1, 9000))
def test_a_search_replaces_only_its_widths(before, division, kernel, dim):
    timed = Timed(kernel, dim, division, 1.0, 1.0)
    after = tuned([Best(timed, timed)], before, None)
    expected = {each: dict(by_dim) for each, by_dim in before.divisions.items()}
    expected[kernel][dim] = division
    assert after.divisions == expected


def test_the_table_holds_what_the_committed_search_found():
    stored = json.loads((RESULTS / "kernel_tuning_h200.json").read_text())
    for used, best in stored["widths"]:
        fields = {name: best[name] for name in Division.__dataclass_fields__}
        assert tuning.MEASURED[best["kernel"]][best["dim"]] == Division(**fields)
        assert best["us"] <= used["us"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dims", "0"], "--dims 0: it must be at least 1"),
        (["--check", "0"], "--check 0: it must be at least 1"),
        (["--seconds", "0"], "--seconds 0.0: it must be above 0"),
        (["--out", "/no/such/tune.json"], "not a file in an existing folder"),
        ([], "the backend is 'cpu'; kernels are measured on a GPU"),
    ],
)
def test_wrong_flags_are_one_line(flags, words):
    with pytest.raises(InputError, match=words):
        main(["bench", "tune", *flags])
