import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from alload_jax.bench import device, kernel
from alload_jax.bench.harness import provenance
from alload_jax.bench.pictures import draw_kernels
from alload_jax.cli import main
from alload_jax.errors import InputError
from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.tuning import Workload, measured_as_faster

COPY = 2e12
SMALL = Workload(2, 6, 32, "made up")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


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


def test_the_picture_is_a_picture(tmp_path):
    draw_kernels(tmp_path / "a.png", ENTRIES, COPY, "some GPU")
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
    for result, call in zip(device.rotating(forward, calls)(calls), calls, strict=True):
        jax.tree.map(np.testing.assert_array_equal, result, jax.jit(forward)(*call))
    gradients = jax.vjp(forward, *calls[0])[1](cotangent(sets[0]))
    assert [g.shape for g in gradients] == [value.shape for value in calls[0]]


@pytest.fixture
def without_gpu(monkeypatch):
    """Where time is measured on a GPU, one microsecond for each call."""
    one = device.DeviceTime(1.0, 1.0, 1.0, ())
    monkeypatch.setattr(kernel, "_time", lambda *_: one)
    monkeypatch.setattr(device, "require_gpu", lambda: None)
    monkeypatch.setattr(device, "copy_bandwidth", lambda: COPY)
    return one


SMALL_FLAGS = ["--shape", "2,6,32", "--out"]


def test_kernels_are_compared_with_xla(without_gpu, tmp_path, capsys):
    out = tmp_path / "found"
    assert main(["bench", "kernel", *SMALL_FLAGS, str(out)]) == 0
    stored = json.loads(out.with_suffix(".json").read_text())
    assert {each["implementation"] for each in stored["entries"]} == {"triton", "xla"}
    assert "torch" not in stored["versions"]
    assert out.with_suffix(".png").stat().st_size > 0
    assert "1.00× XLA's fusion" in capsys.readouterr().out


def test_the_backward_through_mosaic_is_measured_where_it_runs(without_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "unsupported_mosaic_device", lambda: None)
    out, functions = tmp_path / "found", sorted({name for name, _ in kernel.TENSORS})
    shapes = ["--shape", "2,6,128", "--shape", "2,6,130"]
    flags = [*shapes, "--functions", *functions, "--out", str(out)]
    assert main(["bench", "kernel", *flags]) == 0
    entries = json.loads(out.with_suffix(".json").read_text())["entries"]
    found = {
        (*each["shape"], each["function"], each["direction"])
        for each in entries
        if each["implementation"] == "mosaic"
    }
    kinds = [name for name in functions if not name.startswith("token")]
    assert found == {(2, 6, 128, name, "backward") for name in kinds}


def test_the_benchmark_adds_rivals_to_the_same_json(without_gpu, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("layernorm_modulate")
    monkeypatch.setattr(program, "_importable", lambda name: name != "tokamax")
    monkeypatch.setattr(program, "_torch", lambda *_: iter([("torch", without_gpu)]))
    out = tmp_path / "found"
    assert program.main([*SMALL_FLAGS, str(out)]) == 0
    stored = json.loads(out.with_suffix(".json").read_text())
    known = json.loads((RESULTS / f"{NAMES[0]}.json").read_text())
    assert stored.keys() - {"xla_flags", "commit"} == known.keys()
    assert stored["entries"][0].keys() == known["entries"][0].keys()
    assert "torch" in stored["versions"]
    cases = {(e["function"], e["implementation"]) for e in stored["entries"]}
    assert ("layernorm_modulate", "torch") in cases
    assert ("residual_layernorm_modulate", "torch") not in cases
    assert stored["summary"][0]["times_torch_mean"] == 1.0


def test_without_a_gpu_it_says_so():
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
def test_wrong_flags_are_one_line(flags, words):
    with pytest.raises(InputError, match=words) as raised:
        main(["bench", "kernel", *flags])
    assert "\n" not in str(raised.value)


def test_help_needs_no_jax():
    script = "import sys; from alload_jax import cli\ntry: cli.main(['bench', '--help'])\n"
    script += "except SystemExit: pass\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_surroundings_are_json():
    assert json.loads(json.dumps(provenance(["jax"])))["versions"]["jax"] == jax.__version__


NAMES = [f"layernorm_modulate_{part}h200" for part in ("", "small_", "layouts_")]
LAYOUTS = {"segment_layernorm_modulate": "segment", "token_layernorm_modulate": "token"}


@pytest.mark.parametrize("name", NAMES)
def test_committed_results_bear_out_their_summary(name):
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
def test_auto_never_chooses_what_was_measured_as_slower(name):
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    us = {
        (each["workload"], each["function"], each["direction"], each["implementation"]): each
        for each in stored["entries"]
    }
    for (*case, implementation), each in us.items():
        elements, dim = math.prod(each["shape"]), each["shape"][-1]
        layout = LAYOUTS.get(case[1], "row")
        chosen = measured_as_faster(stored["device"], layout, elements, dim)
        assert chosen == (dim >= {"row": 256, "segment": 1152, "token": 1536}[layout])
        if implementation == "triton" and chosen:
            assert each["us"] <= us[*case, "xla"]["us"]


@pytest.mark.parametrize(
    ("call", "known"),
    [
        (("NVIDIA A100", "row", 1 << 30, 1536), None),
        (("NVIDIA A100", "row", 1 << 10, 1536), False),
        (("NVIDIA H200", "segment", 1 << 20, 1536), False),
        (("NVIDIA H200", "segment", 1 << 30, 8192), None),
        (("NVIDIA H200", "token", 1 << 30, 1152), False),
        (("NVIDIA H200", "row", 1 << 10, 1536), False),
        (("NVIDIA H200", "row", 1 << 30, 128), False),
        (("NVIDIA H200", "row", 1 << 30, 16384), None),
    ],
)
def test_auto_knows_what_was_measured(call, known):
    assert measured_as_faster(*call) is known
