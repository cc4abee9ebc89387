"""Whole runs with each optimizer: killed and continued, they are the run never stopped."""

import pytest
from patience import wait_until

WIDE = ("--model.dim", "64", "--model.ffn_dim", "64", "--model.num_heads", "4")
"""Matrices large enough for moments in eight bits."""

CASES = {
    "adamw8bit": ("--optimizer.name", "adamw8bit", "--optimizer.skip_above", "50"),
    "adafactor": ("--optimizer.name", "adafactor", "--optimizer.accumulate_dtype", "bfloat16"),
    "muon": (
        *("--optimizer.name", "muon", "--optimizer.mu_dtype", "bfloat16"),
        *("--optimizer.groups", "[{parameters: [head], name: adamw, learning_rate: 0.001}]"),
        *("--optimizer.schedule", "wsd", "--optimizer.decay_steps", "5"),
    ),
}
SHARDED = ("--mesh.fsdp", "2")


def losses(runs, name="run"):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in runs.metrics(name)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_and_continued_is_the_run_never_stopped(runs, case):
    flags = (*WIDE, *CASES[case], *SHARDED, "--checkpoint.keep", "9")
    process = runs.start(*flags, "--checkpoint.every", "6", devices=2)
    wait_until(lambda: (runs.folder / "run" / "checkpoints" / "6").exists(), process)
    process.kill()
    process.communicate()
    finished = runs.run(*flags, devices=2)
    assert finished.returncode == 0, finished.stderr
    whole = runs.run(*flags, "--run.folder", str(runs.folder / "whole"), devices=2)
    assert whole.returncode == 0, whole.stderr
    assert losses(runs) == losses(runs, "whole")
    assert losses(runs)[-1][1] < losses(runs)[0][1]
    other = runs.run(*WIDE, *SHARDED, "--run.steps", "15", devices=2)
    assert other.returncode == 2
    assert "another optimizer: " in other.stderr
    assert "was None" not in other.stderr


@pytest.mark.slow
def test_the_curve_stays_when_a_run_with_a_schedule_of_its_own_grows(runs):
    own = ("--optimizer.schedule_steps", "14", "--optimizer.final_fraction", "0.1")
    short = runs.run(*own, "--run.steps", "10")
    assert short.returncode == 0, short.stderr
    grown = runs.run(*own, "--run.steps", "16")
    assert grown.returncode == 0, grown.stderr
    rates = [row["learning_rate"] for row in runs.metrics()]
    whole = runs.run(*own, "--run.steps", "16", "--run.folder", str(runs.folder / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert rates == [row["learning_rate"] for row in runs.metrics("whole")]
    assert rates[-1] == rates[-2] == pytest.approx(0.001)
    assert losses(runs) == losses(runs, "whole")
