"""`alload bench step`: what it measures here, and how it refuses."""

import importlib
import json
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from alload_jax.bench.step_process import Settings
from alload_jax.bench.workload_step import Measured, draw_samples, representative, summary
from alload_jax.cli import main
from alload_jax.commands import bench_step
from alload_jax.errors import InputError
from alload_jax.models.families import parameter_count
from alload_jax.models.wan.costs import WanArchitecture
from alload_jax.planning.factory import make_plan
from alload_jax.planning.remat import RematPolicy
from alload_jax.planning.settings import PlanningConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_tiny_step_is_measured_and_written(tmp_path, capsys):
    out = tmp_path / "step.json"
    flags = ["--model", "tiny", "--latents", "1", "4", "4", "--steps", "1", "--remat", "full"]
    assert main(["bench", "step", *flags, "--out", str(out)]) == 0
    [case] = json.loads(out.read_text())["cases"]
    assert case["seconds"] > 0
    assert case["tokens"] == 4
    assert case["settings"]["model"]["remat"] == "full"
    assert "| alload, keep full" in capsys.readouterr().out


def test_what_auto_keeps_is_told(tmp_path, capsys):
    out = tmp_path / "step.json"
    flags = ["--model", "tiny", "--latents", "1", "4", "4", "--steps", "1", "--remat", "auto"]
    assert main(["bench", "step", *flags, "--memory-budget", "2", "--out", str(out)]) == 0
    assert "auto keeps none" in capsys.readouterr().out
    [case] = json.loads(out.read_text())["cases"]
    assert case["policies"] == ["none"]


def test_a_budget_in_which_nothing_fits_ends_no_other_case(tmp_path, capsys):
    out = tmp_path / "step.json"
    flags = ["--model", "tiny", "--latents", "1", "4", "4", "--steps", "1"]
    flags += ["--remat", "auto", "full", "--memory-budget", "0.1"]
    assert main(["bench", "step", *flags, "--out", str(out)]) == 0
    first, second = json.loads(out.read_text())["cases"]
    assert "auto finds nothing that fits" in first["error"]
    assert second["seconds"] > 0


def test_policies_are_those_of_the_model():
    assert set(bench_step._POLICIES) == set(get_args(RematPolicy))


@pytest.fixture
def diffusers_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("diffusers_step")


@pytest.mark.parametrize(
    ("model", "parameters", "variants"),
    [("1.3b", 1_418_996_800, 5), ("hunyuan-video-1.5", 8_326_608_160, 6)],
)
def test_the_measured_model_is_the_published_one(
    diffusers_step, tmp_path, model, parameters, variants
):
    options = diffusers_step.parse(["--model", model, "--out", str(tmp_path / "step.json")])
    _, _, ours = next(bench_step.cases(options))
    assert parameter_count(Settings(**ours).config()) == parameters
    torch = [settings for _, _, settings in diffusers_step.torch_cases(options)]
    assert len(torch) == variants
    assert all(t["latents"] == ours["latents"] and t["batch"] == ours["batch"] for t in torch)


def test_pytorchs_steps_are_measured_by_a_script_beside_ours(
    diffusers_step, tmp_path, monkeypatch, capsys
):
    script = tmp_path / "torch_step.py"
    script.write_text(
        "import json, sys\n"
        "settings = json.loads(sys.argv[1])\n"
        "print(json.dumps({'seconds': 2, 'tokens': 4, 'tokens_beside': 0, 'settings': settings}))\n"
    )
    monkeypatch.setattr(diffusers_step, "TORCH_STEP", script)
    monkeypatch.setattr(diffusers_step.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench_step, "cases", lambda options: [("ours", script, {})])
    out = tmp_path / "step.json"
    flags = ["--model", "tiny", "--torch-cases", "1", "4", "--out", str(out)]
    assert diffusers_step.main(flags) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [case["name"] for case in cases] == [
        "ours",
        "diffusers, bf16_copy, cudnn, compiled whole, checkpointing full",
        "diffusers, bf16_copy, cudnn, compiled blocks, checkpointing none",
    ]
    model = cases[1]["settings"]["model"]
    assert (model["num_attention_heads"], model["attention_head_dim"]) == (2, 16)
    assert "| diffusers, bf16_copy" in capsys.readouterr().out


def test_a_pytorch_case_that_is_unknown_is_refused(diffusers_step):
    with pytest.raises(InputError, match="--torch-cases 5 is unknown; there are 0 to 4"):
        diffusers_step.parse(["--torch-cases", "5"])


def test_flops_are_those_of_the_compiled_forward():
    """XLA's own count of a forward without softmax: the formula holds matrix products alone."""
    dim, text, seq_len = 32, 512, 64
    model = WanArchitecture(dim, 64, 2, 3, text_length=text)

    def forward(x, context):
        for _ in range(4):  # query, key, value, out
            x = x @ jax.numpy.ones((dim, dim))
        for _ in range(2):  # query and out of cross-attention
            x = x @ jax.numpy.ones((dim, dim))
        x = (x @ x.T) @ x
        for _ in range(2):
            context = context @ jax.numpy.ones((dim, dim))
        x = (x @ context.T) @ context
        return x @ jax.numpy.ones((dim, 64)) @ jax.numpy.ones((64, dim))

    shapes = [jax.ShapeDtypeStruct((rows, dim), "float32") for rows in (seq_len, text)]
    counted = jax.jit(forward).lower(*shapes).cost_analysis()["flops"]
    formula = model.step_flops(np.asarray([seq_len])) / 3 / 3
    assert counted == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--remat", "most"], "invalid choice: 'most'"),
        (["--out", "/no/such/step.json"], "not a file in an existing folder"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--layers", "0"], "--layers is 0; it must be at least 1"),
        (["--remat", "auto", "--memory-budget", "0"], "--memory-budget 0.0: it must be above 0"),
        (["--memory-budget", "40"], "--memory-budget is for --remat auto"),
        (["--latentz", "1", "1", "1"], "--latentz is unknown; did you mean --latents"),
        (["--profil"], "--profil is unknown; did you mean --profile"),
    ],
)
def test_wrong_flags_are_one_line(flags, words):
    with pytest.raises(InputError, match=words) as raised:
        main(["bench", "step", *flags])
    assert "\n" not in str(raised.value)


SMALL = ["--model", "tiny", "--same", "1", "32", "32", "--samples", "9", "--m-mem", "12"]


@pytest.mark.slow
def test_policies_are_measured_on_the_same_samples(tmp_path, capsys):
    out = tmp_path / "step.json"
    flags = ["--policies", "balanced", "equal_tokens", "--steps", "2", "--out", str(out)]
    assert main(["bench", "step", *SMALL, *flags]) == 0
    content = json.loads(out.read_text())
    assert [case["policy"] for case in content["cases"]] == ["balanced", "equal_tokens"]
    assert content["tokens"] == 9 * 4
    for case in content["cases"]:
        timed = case["measured"]
        assert case["programs"] == len(timed) == 1
        assert sum(each["steps"] for each in timed) == case["steps"]
        assert case["tokens_per_second"] == pytest.approx(36 / case["seconds"])
    assert "| balanced" in capsys.readouterr().out


def test_timed_steps_stand_for_all_others_by_what_they_cost():
    lengths = [[30, 2], [20, 5], [8, 8], [10, 10], [1], [9, 9], [3], [5, 5], [7], [2, 2]]
    cost = [sum(length**2 for length in row) for row in lengths]
    chosen = representative(list(range(10)), np.asarray(cost, float), 5)
    assert len(chosen) == 5
    ranks = np.argsort(np.argsort(cost))[chosen]
    assert sorted(ranks // 2) == [0, 1, 2, 3, 4]
    assert representative([4, 7], np.arange(10.0), 5) == [4, 7]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workload", "nobody"], "invalid choice"),
        ([*SMALL, "--workload", "wan-480p"], "both given"),
        ([*SMALL, "--m-mem", "0"], "at least 1"),
        ([*SMALL, "--cost-model", "/no/cost.json"], "no such file"),
    ],
)
def test_what_cannot_be_measured_by_policy_is_refused(flags, words, tmp_path):
    with pytest.raises(InputError, match=words):
        main(["bench", "step", *flags, "--out", str(tmp_path / "step.json")])


def test_seconds_of_steps_lie_on_the_line_through_the_timed_ones():
    squares = np.asarray([1.0, 2.0, 3.0, 10.0])
    timed = Measured("rows", [2.0 + 0.5 * square for square in (1.0, 3.0)], [1.0, 3.0])
    assert timed.mean_seconds(squares) == pytest.approx(2.0 + 0.5 * squares.mean())


def test_steps_of_equal_cost_take_their_mean():
    assert Measured("rows", [1.0, 3.0], [4.0, 4.0]).mean_seconds(np.full(9, 4.0)) == 2.0
    assert Measured("rows", [1.5], [7.0]).mean_seconds(np.full(3, 7.0)) == 1.5


def test_an_epoch_counts_its_samples_and_their_time():
    samples = draw_samples(None, (1, 128, 128), 100, False)
    plan = make_plan(PlanningConfig(policy="balanced", m_mem=7 * 64), samples, 1, 0)
    epoch, architecture = plan.epoch(0), WanArchitecture(64, 2, 128, 2)
    timed = Measured("rows", [2.0], [1.0])
    found = summary(plan, samples, [(np.ones(epoch.steps), timed)], architecture)
    assert found["seconds"] == 2.0 * epoch.steps
    assert found["samples_per_second"] == pytest.approx(100 / found["seconds"])
    assert found["tokens_per_second"] == pytest.approx(6400 / found["seconds"])
    assert found["flops"] == pytest.approx(100 * architecture.step_flops(np.asarray([64])))
    assert 0 <= found["padding"] < 1
