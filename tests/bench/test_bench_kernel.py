"""`alload bench kernel` and `bench sparse-attention`; times are made up on a CPU."""

import json
import math
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from alload_jax.bench import device, kernel
from alload_jax.bench import sparse_attention as bench
from alload_jax.bench.device import DeviceTime
from alload_jax.bench.pictures import draw_kernels
from alload_jax.cli import main
from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.tuning import Workload, measured_as_faster

COPY = 2e12
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FUNCTIONS = sorted({name for name, _ in kernel.TENSORS})


def colours_of(path):
    """The colours of a picture, [count, 3]."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert pixels.shape[1] > 500
    return np.unique(pixels.reshape(-1, 3), axis=0)


def test_ratios_shares_of_copy_and_their_picture(tmp_path):
    def entry(workload, implementation, us):
        moved = 2 * kernel.TENSORS["layernorm_modulate", "forward"] * 1000
        case = (workload, (1, 10, 100), "layernorm_modulate", "forward", implementation)
        return kernel.Entry(*case, moved, us, us, us, ())

    entries = [entry("a", "triton", 2.0), entry("a", "xla", 8.0), entry("b", "triton", 3.0)]
    entries += [entry("b", "xla", 6.0), entry("b", "torch", 30.0)]
    (row,) = kernel.summary(entries, COPY)
    assert row["times_xla_mean"] == pytest.approx(math.sqrt(4 * 2))
    assert (row["times_xla_least"], row["times_torch_least"]) == (2, 10)
    # 4000 bytes in 3 µs, of 2 TB/s.
    assert row["least_share_of_copy"] == pytest.approx(4000 / 3e-6 / COPY)
    draw_kernels(tmp_path / "a.png", entries, COPY, "some GPU")
    assert len(colours_of(tmp_path / "a.png")) > 50


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_run_and_rotate_over_all_sets(function, monkeypatch):
    monkeypatch.setattr(kernel, "_ROTATED_BYTES", 1)
    sets = kernel.make_arguments(Workload(2, 6, 32, "made up"))
    assert len(sets) == 2
    forward, inputs, cotangent = kernel.calls_of(function, "xla")
    calls = [inputs(arguments) for arguments in sets]
    for result, call in zip(device.rotating(forward, calls)(calls), calls, strict=True):
        jax.tree.map(np.testing.assert_array_equal, result, jax.jit(forward)(*call))
    gradients = jax.eval_shape(
        lambda *call: jax.vjp(forward, *call)[1](cotangent(sets[0])), *calls[0]
    )
    assert [g.shape for g in gradients] == [value.shape for value in calls[0]]


@pytest.fixture
def without_gpu(monkeypatch):
    """Where time is measured on a GPU, one microsecond for each call."""
    one = DeviceTime(1.0, 1.0, 1.0, ())
    monkeypatch.setattr(kernel, "_time", lambda *_: one)
    monkeypatch.setattr(device, "require_gpu", lambda: None)
    monkeypatch.setattr(device, "copy_bandwidth", lambda: COPY)
    return one


def test_kernels_are_compared_with_xla(without_gpu, tmp_path, capsys, monkeypatch):
    """And the backward through Mosaic where it runs."""
    monkeypatch.setattr(devices, "unsupported_mosaic_device", lambda: None)
    out = tmp_path / "found"
    shapes = ["--shape", "2,6,128", "--shape", "2,6,130"]
    flags = [*shapes, "--functions", *FUNCTIONS, "--out", str(out)]
    assert main(["bench", "kernel", *flags]) == 0
    stored = json.loads(out.with_suffix(".json").read_text())
    kinds = {each["implementation"] for each in stored["entries"]}
    assert kinds == {"triton", "xla", "mosaic"}
    assert "torch" not in stored["versions"]
    assert out.with_suffix(".png").stat().st_size > 0
    assert "1.00× XLA's fusion" in capsys.readouterr().out
    found = {
        (*each["shape"], each["function"], each["direction"])
        for each in stored["entries"]
        if each["implementation"] == "mosaic"
    }
    wide = [name for name in FUNCTIONS if not name.startswith("token")]
    assert found == {(2, 6, 128, name, "backward") for name in wide}


def test_the_benchmark_adds_rivals_to_the_same_json(without_gpu, program, tmp_path, monkeypatch):
    program = program("layernorm_modulate")
    monkeypatch.setattr(program, "version_of", lambda name: name != "tokamax")
    monkeypatch.setattr(program, "_torch", lambda *_: iter([("torch", without_gpu)]))
    out = tmp_path / "found"
    assert program.main(["--shape", "2,6,32", "--out", str(out)]) == 0
    stored = json.loads(out.with_suffix(".json").read_text())
    known = json.loads((RESULTS / f"{NAMES[0]}.json").read_text())
    assert stored.keys() - {"xla_flags", "commit"} == known.keys()
    assert stored["entries"][0].keys() == known["entries"][0].keys()
    assert "torch" in stored["versions"]
    cases = {(e["function"], e["implementation"]) for e in stored["entries"]}
    assert ("layernorm_modulate", "torch") in cases
    assert ("residual_layernorm_modulate", "torch") not in cases
    assert stored["summary"][0]["times_torch_mean"] == 1.0


NAMES = [f"layernorm_modulate_{part}h200" for part in ("", "small_", "layouts_")]
LAYOUTS = {"segment_layernorm_modulate": "segment", "token_layernorm_modulate": "token"}


@pytest.mark.parametrize("name", NAMES)
def test_results_bear_out_their_summary_and_the_choice_of_auto(name):
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    entries = [
        kernel.Entry(**{**each, "shape": tuple(each["shape"])}) for each in stored["entries"]
    ]
    fresh = kernel.summary(entries, stored["copy_bytes_per_second"])
    assert [dict(sorted(row.items())) for row in fresh] == [
        {key: pytest.approx(value) for key, value in sorted(row.items())}
        for row in stored["summary"]
    ]
    us = {(e.workload, e.function, e.direction, e.implementation): e.us for e in entries}
    for each in entries:
        layout, dim = LAYOUTS.get(each.function, "row"), each.shape[-1]
        chosen = measured_as_faster(stored["device"], layout, math.prod(each.shape), dim)
        assert bool(chosen) == (dim >= {"row": 256, "segment": 1152, "token": 1536}[layout])
        if each.implementation == "triton" and chosen:
            assert each.us <= us[each.workload, each.function, each.direction, "xla"]


def test_auto_knows_what_was_measured():
    for call, known in (
        (("NVIDIA A100", "row", 1 << 30, 1536), None),
        (("NVIDIA A100", "row", 256 * 1536 - 1, 1536), False),
        (("NVIDIA H200", "row", 256 * 1536, 1536), True),
        (("NVIDIA H200", "segment", 8 * 4096 * 1152 - 1, 1536), None),
        (("NVIDIA H200", "segment", 8 * 4096 * 1152, 5120), True),
        (("NVIDIA H200", "segment", 1 << 30, 5121), None),
        (("NVIDIA H100 PCIe", "token", 32760 * 1536, 1536), True),
        (("NVIDIA H200", "segment", 1 << 30, 768), None),
        (("NVIDIA H200", "segment", 256 * 1536 - 1, 768), False),
        (("NVIDIA H200", "token", 1 << 30, 1535), None),
        (("NVIDIA H200", "row", 1 << 30, 255), False),
        (("NVIDIA H200", "row", 1 << 30, 8193), None),
    ):
        assert measured_as_faster(*call) is known


SHAPE = bench.Shape(1000, heads=2)


def entry(part, us, sparsity=0.9, implementation="triton", shape=SHAPE):
    return bench.Entry(shape, implementation, "random", sparsity, part, us, us, us, ())


DENSE = [entry("forward", 10.0, 0.0, "cudnn"), entry("backward", 30.0, 0.0, "cudnn")]


@pytest.mark.parametrize(
    ("popularity", "sparsity"), [("random", 0.0), ("zipf", 0.99), ("random", 0.5), ("zipf", 0.5)]
)
def test_lists_name_each_block_once_and_popular_ones_more_often(popularity, sparsity):
    shape = bench.Shape(4000, heads=3)
    lists = bench.make_lists(shape, sparsity, popularity)
    blocks, most = 63, max(1, round(63 * (1 - sparsity)))
    assert lists.indices.shape == (1, 3, blocks, most)
    assert (np.asarray(lists.counts) == most).all()
    assert lists.key_tokens[0].tolist() == [64] * 62 + [32]
    for named in np.asarray(lists.indices).reshape(-1, most):
        assert len(set(named.tolist())) == most
    if sparsity == 0.5:
        named = np.asarray(lists.indices)[0].reshape(3, -1)
        counts = np.stack([np.bincount(head, minlength=blocks) for head in named])
        assert (counts.max(axis=1) > 55).all() == (popularity == "zipf")


def test_speeds_are_ratios_to_dense_attention_which_is_as_fast_at_some_sparsity():
    entries = [*DENSE, entry("forward", 2.0), entry("backward", 6.0)]
    entries.append(entry("selection", 0.8, implementation="xla"))
    assert bench.speeds(entries)[0].selection == pytest.approx(0.1)
    entries.append(entry("selection", 0.4, implementation="triton"))
    (found,) = bench.speeds(entries)
    assert (found.forward, found.backward, found.both) == (5, 5, 5)
    assert found.selection == pytest.approx(0.05)
    # Two products of 10 % of 1000² pairs, 2 heads, 128 wide.
    assert entries[2].flops_per_second == pytest.approx(2 * 2 * 1e5 * 2 * 128 / 2e-6)
    (without,) = bench.speeds(entries[:4])
    assert math.isnan(without.selection)
    entries = [*DENSE]
    for sparsity, us in ((0.2, 50.0), (0.4, 30.0), (0.8, 10.0)):
        entries += [entry("forward", us / 4, sparsity), entry("backward", us * 3 / 4, sparsity)]
    assert bench.break_even(bench.speeds(entries), SHAPE) == pytest.approx(0.3)
    assert bench.break_even(bench.speeds(entries[:4]), SHAPE) is None


@pytest.fixture
def on_a_pretended_gpu(monkeypatch):
    """The command's every part but the device's times and what needs a GPU."""
    time = DeviceTime(100.0, 90.0, 110.0, (("kernel", 100.0),))
    monkeypatch.setattr(device, "device_time", lambda program, sets: time)
    shapes_of = lambda function, sets: [jax.eval_shape(function, *each) for each in sets]  # noqa: E731
    monkeypatch.setattr(device, "rotating", shapes_of)
    monkeypatch.setattr(device, "require_gpu", lambda: None)
    attend = bench.block_sparse_attention

    def reference(*arrays, implementation):
        assert implementation in bench.KERNELS
        return attend(*arrays, implementation="xla")

    monkeypatch.setattr(bench, "block_sparse_attention", reference)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, implementation: q)


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json_and_a_picture(
    tmp_path, capsys, on_a_pretended_gpu
):
    out = tmp_path / "found"
    flags = ["--tokens", "256", "--heads", "1", "--sparsities", "0.5", "0.75", "--out", str(out)]
    assert main(["bench", "sparse-attention", *flags]) == 0
    printed = capsys.readouterr().out
    rows = [line.replace(" ", "") for line in printed.splitlines() if line.startswith("|")]
    assert rows[2].startswith("|256|random|50%|mosaic|1.00×|1.00×|1.00×|")
    assert rows[3].startswith("|256|random|50%|triton|1.00×|1.00×|1.00×|")
    assert "do not show where dense is as fast" in printed
    content = json.loads(out.with_suffix(".json").read_text())
    assert [each["sparsity"] for each in content["speeds"]] == [0.5, 0.5, 0.75, 0.75] * 2
    assert {each["part"] for each in content["entries"]} == {"forward", "backward", "selection"}
    assert content["versions"]["jax"]
    # A line in a colour of its own.
    assert (colours_of(out.with_suffix(".png")) == (0x1F, 0x6F, 0xEB)).all(axis=1).any()


def test_selection_runs(monkeypatch):
    ran = []
    monkeypatch.setattr(bench, "call_time", lambda function, sets: ran.append(function(*sets[0])))
    bench._selection(SHAPE, bench.make_arguments(SHAPE), 0.5, "xla")
    lists, inverted = ran[0]
    assert lists.indices.shape == (1, 2, 16, 8)
    assert inverted.queries.shape == (1, 2, 128)


def test_measured_kernels_are_drawn_from_their_file(tmp_path, monkeypatch):
    drawn = {}

    def draw(path, entries, copy, device):
        drawn[path.name] = (
            [(e.workload, e.direction, e.implementation, e.us) for e in entries],
            copy,
        )

    monkeypatch.setattr("alload_jax.bench.pictures.draw_kernels", draw)
    case = {"direction": "forward", "bytes_moved": 100, "us": 2.0, "us_low": 1.0, "us_high": 3.0}
    cases = [
        case | {"kernel": kernel, "width": 1536, "implementation": "xla"}
        for kernel in ("norm, plain", "norm, packed", "gelu")
    ]
    cases.append(cases[0] | {"pace": [1, 2, 3]})
    (tmp_path / "x.json").write_text(
        json.dumps({"cases": cases, "copy_bytes_per_second": COPY, "device": "GPU"})
    )
    program = runpy.run_path(str(RESULTS.parent / "kernels.py"))
    assert program["main"](["--out", str(tmp_path / "x.json"), "--draw", str(tmp_path)]) == 0
    rows = [(f"{kind} 1,536", "forward", "xla", 2.0) for kind in ("plain", "packed", "width")]
    assert drawn == {"norm.png": (rows[:2], COPY), "gelu.png": (rows[2:], COPY)}
