"""Runs whose layers keep what memory holds: `model.remat: auto`."""

import pytest
import yaml
from training_runs import Runs

from alload_jax.errors import run_command
from alload_jax.run.main import main


@pytest.fixture
def runs(tmp_path, digits_folder, monkeypatch):
    runs = Runs(tmp_path, digits_folder)
    monkeypatch.chdir(runs.folder)
    return runs


def train(runs, *flags):
    flags = ("--run.steps", "2", "--sampling.grids", "[]", "--evaluators", "[]", *flags)
    return run_command(main, ["--config", str(runs.config), "--model.remat", "auto", *flags])


def test_a_budget_is_filled_and_the_run_goes_on_with_what_it_chose(runs, capsys):
    assert train(runs, "--model.memory_budget", "2") == 0
    assert "model.remat: none (predicted 0.5 of 2.0 GB)" in capsys.readouterr().out
    written = yaml.safe_load((runs.folder / "run" / "config.yaml").read_text())["model"]
    assert (written["remat"], written["remat_layers"]) == ("auto", ["none"])
    flags = ["--config", "run/config.yaml", "--run.steps", "3"]
    assert run_command(main, flags) == 0
    assert "predicted" not in capsys.readouterr().out


def test_without_a_limit_of_memory_it_says_what_it_takes(runs, capsys):
    assert train(runs) == 0
    assert "model.remat: attention, as auto knows no limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model.memory_budget", "0.2"), "model.remat: auto finds nothing that fits: "),
        (("--model.memory_budget", "0"), "model.memory_budget is 0.0 GB; it must be above 0"),
        (("--model.remat_layers", "[full,full,none]"), "model.remat_layers has 3 policies"),
        (("--model.remat_layers", "[most]"), "model.remat_layers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(runs, flags, words, capsys):
    assert train(runs, *flags) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line
