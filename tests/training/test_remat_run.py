"""Runs whose layers keep what memory holds: `model.remat: auto`."""

import json

import pytest
import yaml
from training_runs import Runs

from alload_jax.errors import run_command
from alload_jax.planning.remat import LADDER
from alload_jax.run import main
from alload_jax.training import trial_step


@pytest.fixture
def runs(tmp_path, digits_folder, monkeypatch):
    runs = Runs(tmp_path, digits_folder)
    monkeypatch.chdir(runs.folder)
    return runs


AUTO = ("--model.remat", "auto", "--sampling.grids", "[]", "--evaluators", "[]")


def train(runs, *flags):
    return run_command(main, ["--config", str(runs.config), *AUTO, "--run.steps", "2", *flags])


def chosen(runs):
    return json.loads((runs.folder / "run" / "remat.json").read_text())["policies"]


def test_a_budget_is_filled_and_the_run_goes_on_with_what_it_chose(runs, capsys):
    assert train(runs, "--model.memory_budget", "2") == 0
    assert "model.remat: none (predicted 0.5 of 2.0 GB)" in capsys.readouterr().out
    written = yaml.safe_load((runs.folder / "run" / "config.yaml").read_text())["model"]
    assert (written["remat"], written["remat_layers"]) == ("auto", [])
    assert chosen(runs) == ["none"]
    # Another would fit, too.
    path = runs.folder / "run" / "remat.json"
    path.write_text(path.read_text().replace("none", "full"))
    for command in (
        ["--config", "run/config.yaml", "--run.steps", "3"],
        ["--config", str(runs.config), *AUTO, "--model.memory_budget", "2", "--run.steps", "4"],
    ):
        assert run_command(main, command) == 0
        assert "model.remat: full, as this run began" in capsys.readouterr().out


def test_on_a_gpu_measured_times_choose_and_stay_in_the_run_folder(runs, capsys, monkeypatch):
    times = dict.fromkeys(LADDER, 2.0) | {"feed_forward_and_attention": 1.0}
    asked = []

    def layer_seconds(model, latents, *, optimizer, parameters):
        asked.append(latents)
        return times

    monkeypatch.setattr(trial_step, "measurable", lambda model: True)
    monkeypatch.setattr(trial_step, "layer_seconds", layer_seconds)
    assert train(runs, "--model.memory_budget", "2") == 0
    out = capsys.readouterr().out
    assert "model.remat: auto times two layers under each policy" in out
    assert "model.remat: feed_forward_and_attention (by measured time, predicted 0." in out
    assert chosen(runs) == ["feed_forward_and_attention"]
    stored = json.loads((runs.folder / "run" / "remat.json").read_text())
    assert stored["layer_seconds"] == times
    # What the run began with is not timed again.
    assert train(runs, "--model.memory_budget", "2", "--run.steps", "3") == 0
    assert len(asked) == 1


def gone_on(runs, capsys, *flags):
    """What a run prints that goes on after another with a budget of 2 GB."""
    assert train(runs, "--model.memory_budget", "2") == 0
    capsys.readouterr()
    flags = ["--config", "run/config.yaml", "--run.steps", "3", *flags]
    assert run_command(main, flags) == 0
    return capsys.readouterr().out


def test_another_budget_is_told_and_chosen_for(runs, capsys):
    out = gone_on(runs, capsys, "--model.memory_budget", "3")
    assert "(predicted 0.5 of 3.0 GB); budget was 2000000000.0 and is 3000000000.0" in out


def test_a_choice_of_an_older_version_stays(runs, capsys):
    """It did not count samples."""
    assert train(runs, "--model.memory_budget", "2") == 0
    path = runs.folder / "run" / "remat.json"
    content = json.loads(path.read_text())
    del content["for"]["samples"], content["for"]["work_space"]
    path.write_text(json.dumps(content | {"policies": ["full"]}))
    capsys.readouterr()
    assert run_command(main, ["--config", "run/config.yaml", "--run.steps", "3"]) == 0
    assert "model.remat: full, as this run began" in capsys.readouterr().out


def test_a_policy_takes_the_place_of_auto_when_a_run_goes_on(runs, capsys):
    out = gone_on(runs, capsys, "--model.remat", "full")
    assert "model.remat: none" not in out
    assert "model.remat auto → full" in out
    written = yaml.safe_load((runs.folder / "run" / "config.yaml").read_text())["model"]
    assert written["remat"] == "full"


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{}", "?"),
        '{"for": {"tokens": 9}, "policies": ["most"]}',
        '{"for": {"tokens": 9}, "policies": []}',
    ],
)
def test_another_file_in_its_place_is_named(runs, content, capsys):
    (runs.folder / "run").mkdir()
    (runs.folder / "run" / "remat.json").write_text(content)
    assert train(runs, "--model.memory_budget", "2") == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "run/remat.json: is not" in line


def test_without_a_limit_of_memory_it_says_what_it_takes(runs, capsys):
    assert train(runs) == 0
    assert "model.remat: attention, as auto knows no limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model.memory_budget", "0.2"), "model.remat: auto finds nothing that fits: "),
        (("--model.memory_budget", "0"), "model.memory_budget is 0.0 GB; it must be above 0"),
        (("--model.remat_layers", "[full,none]"), "model.remat is auto and model.remat_layers"),
        (("--model.remat_layers", "[most]"), "model.remat_layers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(runs, flags, words, capsys):
    assert train(runs, *flags) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line
