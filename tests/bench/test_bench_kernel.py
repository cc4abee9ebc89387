import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from alload_jax.bench import device_time, kernel
from alload_jax.bench.picture import write_picture
from alload_jax.bench.provenance import provenance
from alload_jax.cli import main
from alload_jax.errors import InputError
from pallas_kernels.layernorm_modulate.tuning import kernel_is_faster
from pallas_kernels.layernorm_modulate.workloads import Workload

COPY = 2e12
SMALL = Workload(2, 6, 32, "made up")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def entry(workload, implementation, us, function="layernorm_modulate", direction="forward"):
    moved = 2 * kernel.TENSORS[function, direction] * 1000
    return kernel.Entry(
        workload, (1, 10, 100), function, direction, implementation, us, us, us, moved, ()
    )


ENTRIES = [
    *(entry("a", "triton", 2.0), entry("a", "xla", 8.0)),
    *(entry("b", "triton", 3.0), entry("b", "xla", 6.0), entry("b", "torch", 30.0)),
]


def test_ratios_and_shares_of_copy():
    (row,) = kernel.summary(ENTRIES, COPY)
    assert row["times_xla_mean"] == pytest.approx(math.sqrt(4 * 2))
    assert (row["times_xla_least"], row["times_torch_least"]) == (2, 10)
    # 4000 bytes in 3 µs, of 2 TB/s.
    assert row["least_share_of_copy"] == pytest.approx(4000 / 3e-6 / COPY)


def test_the_picture_is_a_png(tmp_path):
    write_picture(tmp_path / "a.png", ENTRIES, COPY, "some GPU")
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
    assert pixels.shape[1] > 500
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50


@pytest.mark.parametrize("function", sorted({name for name, _ in kernel.TENSORS}))
def test_calls_run_and_rotate_over_all_sets(function, monkeypatch):
    monkeypatch.setattr(kernel, "_ROTATED_BYTES", 1)
    sets = kernel.make_arguments(SMALL)
    assert len(sets) == 2
    forward, inputs, cotangent = kernel._FUNCTIONS[function]("xla")
    calls = [inputs(arguments) for arguments in sets]
    for result, call in zip(device_time.rotating(forward, calls)(calls), calls, strict=True):
        jax.tree.map(np.testing.assert_array_equal, result, jax.jit(forward)(*call))
    gradients = jax.vjp(forward, *calls[0])[1](cotangent(sets[0]))
    assert [g.shape for g in gradients] == [value.shape for value in calls[0]]


def test_a_missing_gpu_is_reported():
    with pytest.raises(InputError, match=r"backend is 'cpu'.*cuda12 or cuda13"):
        main(["bench", "kernel"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workloads", "wan"], "--workloads wan is unknown; there are wan-1.3b-480p"),
        (["--functions", "norm"], "--functions norm is unknown; there are layernorm_modulate"),
        (["--shape", "1,2"], "'1,2' is not three whole numbers such as 1,4096,1536"),
        (["--shape", "1,0,8"], "'1,0,8' is not three whole numbers"),
        (
            ["--out", "/no/such/folder/x"],
            "/no/such/folder/x.json: not a file in an existing folder",
        ),
        (["--shapes"], "--shapes is unknown; did you mean --shape"),
    ],
)
def test_invalid_flags_are_reported_in_one_line(flags, words):
    with pytest.raises(InputError, match=words) as raised:
        main(["bench", "kernel", *flags])
    assert "\n" not in str(raised.value)


def test_help_needs_no_jax():
    script = "import sys; from alload_jax import cli\ntry: cli.main(['bench', '--help'])\n"
    script += "except SystemExit: pass\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_provenance_is_json():
    assert json.loads(json.dumps(provenance(["jax"])))["versions"]["jax"] == jax.__version__


NAMES = [f"layernorm_modulate_{part}h200" for part in ("", "small_", "layouts_")]
LAYOUTS = {"segment_layernorm_modulate": "segment", "token_layernorm_modulate": "token"}


@pytest.mark.parametrize("name", NAMES)
def test_committed_results_match_their_summary(name):
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    entries = [
        kernel.Entry(**{**each, "shape": tuple(each["shape"])}) for each in stored["entries"]
    ]
    fresh = kernel.summary(entries, stored["copy_bytes_per_second"])
    assert [dict(sorted(row.items())) for row in fresh] == [
        {key: pytest.approx(value) for key, value in sorted(row.items())}
        for row in stored["summary"]
    ]


@pytest.mark.parametrize("name", NAMES)
def test_auto_never_chooses_the_slower_implementation(name):
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    us = {
        (each["workload"], each["function"], each["direction"], each["implementation"]): each
        for each in stored["entries"]
    }
    for (*case, implementation), each in us.items():
        elements, dim = math.prod(each["shape"]), each["shape"][-1]
        layout = LAYOUTS.get(case[1], "row")
        chosen = kernel_is_faster(stored["device"], layout, elements, dim)
        assert chosen == (dim >= {"row": 256, "segment": 1152, "token": 1536}[layout])
        if implementation == "triton" and chosen:
            assert each["us"] <= us[*case, "xla"]["us"]


@pytest.mark.parametrize(
    "call",
    [
        ("NVIDIA A100", "row", 1 << 30, 1536),
        ("NVIDIA H200", "segment", 1 << 20, 1536),
        ("NVIDIA H200", "segment", 1 << 30, 8192),
        ("NVIDIA H200", "token", 1 << 30, 1152),
        ("NVIDIA H200", "row", 1 << 10, 1536),
        ("NVIDIA H200", "row", 1 << 30, 128),
        ("NVIDIA H200", "row", 1 << 30, 16384),
    ],
)
def test_auto_chooses_xla_without_measurements(call):
    assert not kernel_is_faster(*call)
