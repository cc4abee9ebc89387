"""Runs whose storage fails."""

import signal
import subprocess

import pytest
from patience import PATIENCE, wait_until
from training_runs import errors

NO_PICTURES = ("--sampling.grids", "[]")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_whole_checkpoints_stay(runs, small_disk):
    flags = ("--run.folder", str(small_disk / "run"), "--run.steps", "200", *NO_PICTURES)
    stopped = runs.run(*flags, "--checkpoint.every", "2", "--checkpoint.keep", "100")
    assert stopped.returncode == 2
    (line,) = errors(stopped.stderr)
    assert "cannot be written (" in line
    assert "make room and run the same command again" in line
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    continued = runs.run(*flags, "--checkpoint.every", "100")
    assert continued.returncode == 0, continued.stderr
    assert "weights: checkpoint of step" in continued.stdout


@pytest.mark.slow
def test_a_full_disk_of_one_process_ends_all(runs, small_disk):
    flags = ("--run.folder", str(small_disk / "run"), "--run.steps", "2000", *NO_PICTURES)
    often = ("--checkpoint.every", "2", "--checkpoint.keep", "100", "--planning.ranks", "2")
    both = runs.start_together(2, *flags, *often)
    first = both[0]
    wait_until(lambda: any(each.poll() is not None for each in both), first, ended=True)
    outputs = [each.communicate(timeout=PATIENCE) for each in both]
    assert sorted(each.returncode for each in both) in ([1, 2], [2, 2])
    for _, err in outputs:
        (line,) = errors(err)
        assert "cannot be written (" in line


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
    continued = runs.run("--run.steps", steps, "--checkpoint.every", "100", *NO_PICTURES)
    assert continued.returncode == 0, continued.stderr
