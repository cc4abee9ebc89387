"""`alload bench epoch`: figures of the files of a run, and whole runs on two CPU devices."""

import json
import os
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from alload_jax.bench import pictures
from alload_jax.bench.pictures import draw_epoch
from alload_jax.bench.random_data import write_random_store
from alload_jax.cli import main
from alload_jax.commands import bench_epoch
from alload_jax.config import read_config
from alload_jax.data.condition import conditions_for, form_for
from alload_jax.data.manifest import read_manifest
from alload_jax.errors import InputError
from alload_jax.models.families import config_from_fields
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.samples import Samples
from alload_jax.run import epoch
from alload_jax.run.epoch import WARM_UP, figures_of

ROOT = Path(__file__).parents[2]
CONFIG = """
run: {folder: unused, steps: 3, compilation_cache: compiled}
data: {folder: unused, loader: {processes: 0}}
planning: {m_mem: 520}
model: {dim: 32, ffn_dim: 64, num_heads: 2, num_layers: 1, in_channels: 4, text: {dim: 16}}
checkpoint: {every: 1}
sampling: {prompts: [{prompt: x, frames: 1, height: 64, width: 64}]}
"""
CASES = """
equal-tokens: {planning: {policy: equal_tokens, ranks_mode: synchronous}}
sorted: {planning: {policy: sorted, ranks_mode: independent}}
few: {planning: {policy: sorted, ranks_mode: independent, m_mem: 99999}}
"""


@pytest.fixture
def flags(tmp_path):
    """The command's files, and its words without the data."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "cases.yaml").write_text(CASES)
    files = {name: str(tmp_path / f"{name}.yaml") for name in ("config", "cases")}
    words = [word for name, file in files.items() for word in (f"--{name}", file)]
    return ["bench", "epoch", *words, "--out", str(tmp_path / "out.json")]


def run_files(folder, seconds, tokens, samples, losses, costs):
    columns = zip(seconds, tokens, samples, losses, costs, strict=True)
    names = ("step_seconds", "tokens", "samples", "loss", "predicted_cost")
    same = {"epoch": 0, "padding": 0.25, "imbalance": 0.1}
    rows = [dict(zip(names, row, strict=True)) | same for row in columns]
    rows.insert(2, {"step": 2, "validation/loss": 9.0})
    rows.append(rows[-1] | {"epoch": 1, "tokens": 9999})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(("steps", "seconds", "last"), [(10, 99, 11), (40, 4.5, 9), (40, 8.5, 12)])
def test_a_run_ends_after_its_first_epoch_or_enough_steps_and_seconds(
    monkeypatch, steps, seconds, last
):
    watch, run = epoch._Watch(seconds, found := {}), SimpleNamespace(done=0)
    monkeypatch.setattr(epoch.time, "monotonic", lambda: run.done)  # a step takes a second
    with suppress(epoch._EnoughError):
        while True:
            step = SimpleNamespace(batches=(), epoch=run.done // steps)
            run.done += 1
            watch.on_step_end(run, step, {})
    assert (run.done, found["whole_epoch"]) == (last, seconds == 99)


def test_figures_scale_the_seconds_of_all_steps_but_the_first_to_the_epoch(tmp_path):
    rng, late = np.random.default_rng(0), slice(WARM_UP, None)
    seconds, losses, costs = rng.uniform(1, 2, (3, 23)).tolist()
    tokens, samples = rng.integers(50, 99, 23).tolist(), rng.integers(1, 9, 23).tolist()
    run_files(tmp_path, seconds, tokens, samples, losses, costs)
    found = figures_of(tmp_path, ready=10.0)
    counted = sum(seconds[late])
    time = counted * sum(costs) / sum(costs[late])
    speeds = [sum(tokens[n : n + 4]) / sum(seconds[n : n + 4]) for n in range(WARM_UP, 23, 4)]
    expected = {
        "first_step_seconds": 10 + seconds[0],
        "seconds": time,
        "counted_seconds": counted,
        "steps": 20,
        "padding": 0.25,
        "imbalance": 0.1,
        "variation": statistics.pstdev(seconds[late]) / statistics.mean(seconds[late]),
        "with_tokens": statistics.correlation(seconds[late], tokens[late]),
        "with_cost": statistics.correlation(seconds[late], costs[late]),
    }
    for name, counts in (("tokens", tokens), ("samples", samples)):
        expected |= {name: sum(counts), f"{name}_per_second": sum(counts) / time}
    expected["spread"] = (max(speeds) - min(speeds)) * counted / sum(tokens[late])
    expected["loss"] = np.dot(losses[-4:], samples[-4:]) / sum(samples[-4:])
    assert found == pytest.approx(expected)
    run_files(tmp_path, range(1, 9), *([1.0] * 8 for _ in range(4)))
    assert figures_of(tmp_path, 0.0)["with_cost"] is None
    run_files(tmp_path, *([1.0] * 7 for _ in range(5)))
    with pytest.raises(InputError, match=r"only 7 steps, and 8 are needed"):
        figures_of(tmp_path, 0.0)


def test_cases_are_checked_before_anything_is_written(flags, tmp_path):
    for case, reason in (
        *(("{planning: {polcy: x}}", "polcy"), ("sorted", "give sections of a config")),
        ("{data: {folder: x}}", "data is alike in all cases"),
    ):
        (tmp_path / "cases.yaml").write_text(f"first: {case}")
        with pytest.raises(InputError, match=reason):
            main([*flags, "--data", str(tmp_path / "data"), "--workload", "mixed-resolution"])
        assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"family": "wan", "in_channels": 36, "out_channels": 16, "image": {"dim": 8}},
        {"family": "hunyuan_video", "in_channels": 33, "glyphs": {"dim": 6}, "image": {"dim": 8}},
        {"family": "hunyuan_video_13b", "in_channels": 16, "pooled_dim": 8},
    ],
)
def test_random_data_has_all_that_a_family_takes(tmp_path, fields):
    model = config_from_fields({"text": {"dim": 16, "length": 12}} | fields)
    write_random_store(tmp_path / "data", Samples(np.full((3, 3), 16), np.full(3, 4)), model)
    data = read_manifest(tmp_path / "data")
    conditions_for(model, data)  # refuses other data
    assert (len(data), data.form) == (3, form_for(model))


def test_a_case_may_add_nothing_to_the_config(flags, tmp_path, monkeypatch):
    (tmp_path / "cases.yaml").write_text("plain: {}\nsorted: {planning: {policy: sorted}}")
    policies = []

    def measured(_, given):
        policies.append(read_config(given["argv"]).planning.policy)
        raise InputError("not measured")

    monkeypatch.setattr(bench_epoch, "measured", measured)
    monkeypatch.setattr(bench_epoch, "_require_data", lambda *_: None)
    main([*flags, "--data", "none"])
    assert policies == ["auto", "sorted"]


@pytest.mark.slow
def test_whole_runs_are_measured_and_leave_only_the_data(flags, tmp_path):
    words = ["--data", str(tmp_path / "data"), "--workload", "mixed-resolution", "--one-aspect"]
    words += ["--samples", "600", "--longest", "300", "--seconds", "60"]
    xla_flags = os.environ["XLA_FLAGS"].replace("count=8", "count=2")
    variables = {"XLA_FLAGS": xla_flags, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "alload_jax.cli", *flags, *words]
    both = [*command, "--only", "equal-tokens", "sorted"]
    subprocess.run(both, env=os.environ | variables, check=True, cwd=tmp_path)
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["equal-tokens", "sorted"]
    data = read_manifest(tmp_path / "data")
    tokens = data.samples((1, 2, 2)).seq_len
    for case in cases:
        assert case["devices"] == 2
        assert case["whole_epoch"]
        assert case["tokens"] == tokens.sum()
        assert 1 <= case["programs"] <= len(np.unique(tokens))
        assert case["first_step_seconds"] > 1
    assert {path.name for path in tmp_path.iterdir()} >= {"data", "out.json"}
    assert not (tmp_path / "compiled").exists()  # a case finds no programs of another
    assert not [path for path in tmp_path.rglob("*") if "checkpoint" in path.name]
    # An existing folder is taken as it is.
    stamp = (tmp_path / "data" / "manifest.parquet").stat().st_mtime_ns
    again = [*command, "--only", "few"]
    assert subprocess.run(again, env=os.environ | variables, cwd=tmp_path).returncode == 1
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert "and 8 are needed" in case["error"]
    assert (tmp_path / "data" / "manifest.parquet").stat().st_mtime_ns == stamp


def test_data_have_the_sizes_of_a_manifest(tmp_path):
    model = WanConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=1, in_channels=4)
    lines = "frames,height,width,weight\n1,64,64,\n5,64,96,3\n5,96,96,2\n"
    (tmp_path / "sizes.csv").write_text(lines)
    usual = {"workload": str(tmp_path / "sizes.csv"), "samples": None, "one_aspect": False}
    given = SimpleNamespace(data=tmp_path / "data", longest=50, **usual)
    bench_epoch._require_data(given, model)
    found = read_manifest(given.data).samples((1, 2, 2))
    assert found.shape.tolist() == [[1, 64, 64], [5, 64, 96]]
    assert found.weight.tolist() == [1, 3]
    for changes, words in (
        ({"longest": 5}, "--longest 5: the shortest sample has 16 tokens"),
        ({"samples": 7}, "--samples and --one-aspect need a named workload"),
        ({"one_aspect": True}, "--samples and --one-aspect need a named workload"),
    ):
        given = SimpleNamespace(data=tmp_path / "more", **usual | {"longest": None} | changes)
        with pytest.raises(InputError, match=words):
            bench_epoch._require_data(given, model)
    (tmp_path / "tokens.csv").write_text("seq_len\n16\n")
    usual["workload"] = str(tmp_path / "tokens.csv")
    given = SimpleNamespace(data=tmp_path / "more", **usual)
    with pytest.raises(InputError, match=r"tokens\.csv: has no frames, height and width"):
        bench_epoch._require_data(given, model)
    assert not given.data.exists()
    given.workload = "wan-480"
    with pytest.raises(InputError, match=r"wan-480: no such manifest"):
        bench_epoch._require_data(given, model)


def test_the_picture_shows_each_measured_case_the_fastest_on_top(tmp_path, monkeypatch):
    drawn = {}

    def save(figure, path, **_):
        (axis,) = figure.axes
        drawn["names"] = [label.get_text() for label in axis.get_yticklabels()]
        drawn["values"] = [text.get_text() for text in axis.texts]

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    case = {"devices": 2, "device": "GPU", "tokens": 3000, "first_step_seconds": 5, "seconds": 10}
    cases = [
        case | {"case": "fast-one", "tokens_per_second": 300.0},
        {"case": "broken", "error": "no memory"},
        case | {"case": "slow", "tokens_per_second": 250.0, "seconds": 12},
    ]
    draw_epoch(tmp_path / "a.png", {"cases": cases})
    assert drawn["names"] == ["slow", "fast one"]
    assert drawn["values"] == ["250", "300", "176", "200"]  # 3,000 / 17 and 3,000 / 15
    with pytest.raises(ValueError, match="no case was measured"):
        draw_epoch(tmp_path / "a.png", {"cases": cases[1:2]})
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "failed.json").write_text(json.dumps({"cases": cases[1:2]}))
    for file in ("other.json", "failed.json", "none.json"):
        with pytest.raises(InputError, match=r"has no case of `alload bench epoch`; name another"):
            pictures.main([str(tmp_path / file), str(tmp_path / "a.png")])
