"""`alload bench sparse-attention`: lists, figures and flags; times are made up on a CPU."""

import json
import math

import jax
import numpy as np
import pytest
from PIL import Image

from alload_jax.bench import device
from alload_jax.bench import sparse_attention as bench
from alload_jax.bench.device import DeviceTime
from alload_jax.bench.pictures import draw_sparse_attention
from alload_jax.cli import main
from alload_jax.errors import InputError

SHAPE = bench.Shape(1000, heads=2)


def entry(part, us, sparsity=0.9, implementation="triton", shape=SHAPE):
    return bench.Entry(shape, implementation, "random", sparsity, part, us, us, us, ())


DENSE = [entry("forward", 10.0, 0.0, "cudnn"), entry("backward", 30.0, 0.0, "cudnn")]


@pytest.mark.parametrize("popularity", ["random", "zipf"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
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


def test_speeds_are_ratios_to_dense_attention():
    entries = [*DENSE, entry("forward", 2.0), entry("backward", 6.0)]
    entries.append(entry("selection", 0.4, implementation="xla"))
    (found,) = bench.speeds(entries)
    assert (found.forward, found.backward, found.both) == (5, 5, 5)
    assert found.selection == pytest.approx(0.05)
    # Two products of 10 % of 1000² pairs, 2 heads, 128 wide.
    assert entries[2].flops_per_second == pytest.approx(2 * 2 * 1e5 * 2 * 128 / 2e-6)
    (without,) = bench.speeds(entries[:4])
    assert math.isnan(without.selection)


def test_the_sparsity_at_which_dense_attention_is_as_fast():
    times = {0.2: 50.0, 0.4: 30.0, 0.8: 10.0}
    entries = [*DENSE]
    for sparsity, us in times.items():
        entries += [entry("forward", us / 4, sparsity), entry("backward", us * 3 / 4, sparsity)]
    assert bench.break_even(bench.speeds(entries), SHAPE) == pytest.approx(0.3)
    assert bench.break_even(bench.speeds(entries[:4]), SHAPE) is None


@pytest.fixture
def on_a_pretended_gpu(monkeypatch):
    """The command's every part but the device's times and what needs a GPU."""
    time = DeviceTime(100.0, 90.0, 110.0, (("kernel", 100.0),))
    monkeypatch.setattr(device, "device_time", lambda program, sets: time)
    monkeypatch.setattr("alload_jax.bench.device.require_gpu", lambda: None)
    attend = bench.block_sparse_attention

    def reference(*arrays, implementation):
        assert implementation in bench.KERNELS
        return attend(*arrays, implementation="xla")

    monkeypatch.setattr(bench, "block_sparse_attention", reference)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, implementation: q)


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
    assert [each["sparsity"] for each in content["speeds"]] == [0.5] * 2 + [0.75] * 2 + [
        0.5
    ] * 2 + [0.75] * 2
    assert {each["part"] for each in content["entries"]} == {"forward", "backward", "selection"}
    assert content["versions"]["jax"]
    assert Image.open(out.with_suffix(".png")).width > 500


def test_selection_runs(monkeypatch):
    ran = []
    monkeypatch.setattr(bench, "call_time", lambda function, sets: ran.append(function(*sets[0])))
    bench._selection(SHAPE, bench.make_arguments(SHAPE), 0.5)
    lists, inverted = ran[0]
    assert lists.indices.shape == (1, 2, 16, 8)
    assert inverted.queries.shape == (1, 2, 128)


def test_the_picture_has_a_line_for_each_length(tmp_path):
    speed = bench.Speed(SHAPE, "triton", "random", 0.5, 2.0, 2.0, 2.0, 0.1)
    others = [speed._replace(sparsity=s, both=1 / (1 - s)) for s in (0.7, 0.9)]
    longer = [s._replace(shape=bench.Shape(2000)) for s in (speed, *others)]
    draw_sparse_attention(tmp_path / "a.png", [speed, *others, *longer], "some GPU")
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).reshape(-1, 3)
    for colour in ((0x1F, 0x6F, 0xEB), (0xF0, 0x88, 0x3E)):
        assert (pixels == colour).all(axis=1).any()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--sparsities", "1"), "--sparsities 1.0: it must be at least 0 and below 1"),
        (("--tokens", "0"), "--tokens is 0; it must be at least 1"),
        (("--out", "/nowhere/x"), "--out /nowhere/x.json: not a file in an existing folder"),
    ],
)
def test_invalid_flags_are_named(flags, reason):
    with pytest.raises(InputError, match=reason):
        main(["bench", "sparse-attention", *flags])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"the backend is 'cpu'; kernels are measured on a GPU"):
        main(["bench", "sparse-attention", "--out", str(tmp_path / "x")])
