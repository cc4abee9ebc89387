"""Runs whose storage fails."""

import signal
import subprocess

import pytest
from patience import PATIENCE, wait_until
from training_runs import errors

NO_PICTURES = ("--sampling.grids", "[]")


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_whole_checkpoints_stay(runs, small_disk):
    flags = ("--run.folder", str(small_disk / "run"), "--run.steps", "200", *NO_PICTURES)
    stopped = runs.here(*flags, "--checkpoint.every", "2", "--checkpoint.keep", "100")
    assert stopped.returncode == 2
    (line,) = errors(stopped.stderr)
    assert "cannot be written (" in line
    assert "make room and run the same command again" in line
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    continued = runs.finish(*flags, "--checkpoint.every", "100")
    assert "weights: checkpoint of step" in continued.stdout


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_quietly(runs, default_signals):
    run = runs.start("--run.steps", "100000", "--checkpoint.every", "1", *NO_PICTURES)
    wait_until((runs.folder / "run" / "checkpoints" / "5").exists, run)
    run.send_signal(signal.SIGINT)
    said = "SIGINT: finishing and saving; repeat the signal to quit immediately\n"
    assert said in iter(run.stdout.readline, "")
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=PATIENCE)
    # A run that was saved before the second signal arrived ends as after one.
    assert (run.returncode, errors(err)) in [(130, ["interrupted"]), (0, [])]
    names = [path.name for path in (runs.folder / "run" / "checkpoints").iterdir()]
    steps = str(max(int(name) for name in names if name.isdigit()) + 5)
    runs.finish("--run.steps", steps, "--checkpoint.every", "100", *NO_PICTURES)
