"""Runs whose layers keep what memory holds, and whose processes choose the same kernels."""

import json
from types import SimpleNamespace

import pytest
import yaml

from alload_jax.errors import InputError
from alload_jax.planning.remat import LADDER
from alload_jax.run import training
from alload_jax.run.training import share_comparisons
from alload_jax.training import trial_step
from pallas_kernels.first_use import COMPARISONS

AUTO = ("--model.remat", "auto", "--sampling.grids", "[]", "--evaluators", "[]")
BUDGET = ("--model.memory_budget", "2")


@pytest.fixture
def train(runs, monkeypatch):
    """What a run prints until it would compile, with what layers keep chosen."""

    def compiled(*_):
        raise InputError("it would compile now")

    monkeypatch.chdir(runs.folder)
    monkeypatch.setattr(training, "_compile", compiled)

    def train(*flags):
        ended = runs.here(*AUTO, *flags)
        assert "it would compile now" in ended.stderr
        return ended.stdout

    return train


def model_of(runs):
    return yaml.safe_load((runs.folder / "run" / "config.yaml").read_text())["model"]


def test_a_budget_is_filled_and_the_run_goes_on_with_what_it_chose(runs, train):
    assert "model.remat: none (predicted 0.5 of 2.0 GB)" in train(*BUDGET)
    written = model_of(runs)
    assert (written["remat"], written["remat_layers"]) == ("auto", [])
    path = runs.folder / "run" / "remat.json"
    content = json.loads(path.read_text())
    assert content["policies"] == ["none"]
    # Another would fit, too; and an older version did not count samples.
    del content["for"]["samples"], content["for"]["work_space"]
    path.write_text(json.dumps(content | {"policies": ["full"]}))
    assert "model.remat: full, as this run began" in train(*BUDGET)
    # Another budget is told and chosen for.
    out = train("--model.memory_budget", "3")
    assert "(predicted 0.5 of 3.0 GB); budget was 2000000000.0 and is 3000000000.0" in out
    assert "model.remat: " not in train("--model.remat", "full", "--model.memory_budget", "3")
    assert model_of(runs)["remat"] == "full"


def test_on_a_gpu_measured_times_choose_and_stay_in_the_run_folder(runs, train, monkeypatch):
    times = dict.fromkeys(LADDER, 2.0) | {"feed_forward_and_attention": 1.0}
    asked = []

    def layer_seconds(model, latents, *, optimizer, parameters):
        asked.append(latents)
        return times

    monkeypatch.setattr(trial_step, "measurable", lambda model: True)
    monkeypatch.setattr(trial_step, "layer_seconds", layer_seconds)
    out = train(*BUDGET)
    assert "model.remat: auto times two layers under each policy" in out
    assert "model.remat: feed_forward_and_attention (by measured time, predicted 0." in out
    stored = json.loads((runs.folder / "run" / "remat.json").read_text())
    assert stored["policies"] == ["feed_forward_and_attention"]
    assert stored["layer_seconds"] == times
    # What the run began with is not timed again.
    train(*BUDGET)
    assert len(asked) == 1


def test_without_a_limit_of_memory_it_says_what_it_takes(train):
    assert "model.remat: attention, as auto knows no limit" in train()


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{}", "?"),
        '{"for": {"tokens": 9}, "policies": ["most"]}',
        '{"for": {"tokens": 9}, "policies": []}',
    ],
)
def test_another_file_in_its_place_is_named(runs, content):
    (runs.folder / "run").mkdir()
    (runs.folder / "run" / "remat.json").write_text(content)
    assert "run/remat.json: is not" in runs.refused(*AUTO, *BUDGET)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model.memory_budget", "0.2"), "model.remat: auto finds nothing that fits: "),
        (("--model.memory_budget", "0"), "model.memory_budget is 0.0 GB; it must be above 0"),
        (("--model.remat_layers", "[full,none]"), "model.remat is auto and model.remat_layers"),
        (("--model.remat_layers", "[most]"), "model.remat_layers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(runs, flags, words):
    assert words in runs.refused(*AUTO, *flags)


@pytest.mark.usefixtures("own_comparisons")
@pytest.mark.parametrize("process", [0, 1, None])
def test_processes_take_the_times_of_kernels_that_process_0_measures(process):
    told, case = [], "bias_gelu 1536 bfloat16"

    def broadcast(compute):
        told.append(compute() if process == 0 else {case: 1.5})
        return json.loads(json.dumps(told[0]))

    cluster = SimpleNamespace(num_processes=1 if process is None else 2, broadcast=broadcast)
    share_comparisons(cluster, lambda: COMPARISONS.ratio(case, lambda: (3.0, 2.0)))
    assert told == ([] if process is None else [{case: 1.5}])
    alone = 9.0 if process is None else 1.5
    assert COMPARISONS.ratio(case, lambda: (9.0, 1.0)) == alone
    assert COMPARISONS.ratio("another", lambda: (9.0, 1.0)) == (9.0 if process is None else 1.0)
