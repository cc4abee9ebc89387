"""Runs of several processes on one machine, which meet and reduce as on several hosts.

One chain of runs, each test a link: four processes are stopped, and one goes on.
"""

import json
import shutil
import signal
import subprocess
from operator import itemgetter

import numpy as np
import pytest
from patience import PATIENCE, wait_until
from training_runs import Runs, errors, lines_of

KEPT = ("--model.remat", "auto", "--model.memory_budget", "2")
"""What layers keep is chosen by process 0 for all."""
RANKS = ("--planning.ranks", "4", "--data.loader.max_bad_records", "1", *KEPT)
PLAIN = ("--sampling.grids", "[]")
CONSTANT = ("--optimizer.final_fraction", "1.0")
"""A learning rate that does not depend on the run's length."""
LOSS = itemgetter("validation/loss")
SAME = ("step", "epoch", "samples", "skipped", "tokens", "imbalance", "padding", "learning_rate")


def finished(processes, seconds=PATIENCE):
    """(status, stdout, stderr) of each."""
    outputs = [process.communicate(timeout=seconds) for process in processes]
    return [(process.returncode, *out) for process, out in zip(processes, outputs, strict=True)]


def assert_the_same(rows, others):
    assert [[row[name] for name in SAME] for row in rows] == [
        [row[name] for name in SAME] for row in others
    ]
    for name in ("loss", "grad_norm"):
        ours, theirs = ([row[name] for row in part] for part in (rows, others))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits_folder):
    runs = Runs(tmp_path_factory.mktemp("cluster"), digits_folder)
    runs.damaged = ("--data.folder", runs.spoil(12))
    return runs


@pytest.fixture(scope="module")
def stopped(runs):
    """Four processes, one of which receives a signal to stop."""
    flags = (*RANKS, *CONSTANT, *PLAIN, *runs.damaged, "--run.steps", "4000")
    processes = runs.start_together(4, *flags)
    wait_until(lambda: lines_of(runs.folder / "run" / "metrics.jsonl") >= 6, processes[0])
    processes[2].send_signal(signal.SIGTERM)
    return finished(processes)


@pytest.fixture(scope="module")
def alone(runs, stopped):
    """The same by one process with four devices, for some steps more."""
    steps = str(len(runs.metrics()) + 6)
    flags = ("--run.folder", "alone", "--run.steps", steps, *PLAIN)
    runs.finish(*RANKS, *CONSTANT, *runs.damaged, *flags, devices=4)
    return runs.metrics("alone")


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(runs, stopped):
    assert [(status, errors(err)) for status, _, err in stopped] == [(0, [])] * 4
    assert [out for _, out, _ in stopped[1:]] == [""] * 3
    out, steps = stopped[0][1], len(runs.metrics())
    assert f"SIGTERM: saved step {steps} of 4000" in out
    assert "--cluster.processes 4 --cluster.process <0 to 3>" in out
    assert "[Gloo]" not in out
    assert (runs.folder / "run" / "checkpoints" / str(steps)).exists()


@pytest.mark.slow
def test_four_processes_learn_what_one_does_and_leave_out_a_damaged_record(runs, stopped, alone):
    rows = runs.metrics()
    assert_the_same(rows, alone[: len(rows)])
    assert stopped[0][1].count("skipped:") == 1
    assert sum(row["skipped"] for row in rows if row["epoch"] == 0) == 1
    assert lines_of(runs.folder / "run" / "bad_records.txt") == 1


@pytest.mark.slow
def test_one_process_goes_on_where_four_were(runs, stopped, alone):
    config = ("--config", str(runs.folder / "run" / "config.yaml"))
    runs.finish(*config, *PLAIN, "--run.steps", str(len(alone)))
    rows = runs.metrics()
    assert_the_same(rows, alone)
    epochs = [
        sum(row["samples"] + row["skipped"] for row in rows if row["epoch"] == n) for n in (0, 1)
    ]
    assert epochs == [21, 21]
    starts = json.loads((runs.folder / "run" / "environment.json").read_text())
    assert [start["processes"] for start in starts] == [4, 1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_is_named_and_the_others_end(runs, alone, victim, monkeypatch):
    start_clocks = runs.hold_clocks(monkeypatch)
    shutil.copytree(runs.folder / "alone", runs.folder / f"lost{victim}")
    before = len(alone)
    flags = ("--run.folder", f"lost{victim}", "--run.steps", "4000", "--cluster.lost_after", "15")
    processes = runs.start_together(2, *RANKS, *CONSTANT, *PLAIN, *runs.damaged, *flags)
    metrics = runs.folder / f"lost{victim}" / "metrics.jsonl"
    wait_until(lambda: lines_of(metrics) >= before + 2, processes[0])
    processes[victim].kill()
    start_clocks()
    (status, _, err) = finished(processes)[1 - victim]
    assert status == 1
    assert len(errors(err)) == 1, err
    assert f"error: process {victim} of 2 (" in err
    assert ") was lost at step " in err
    assert f"python train.py --config lost{victim}/config.yaml --cluster.coordinator" in err
    assert "(continues from step " in err


@pytest.mark.slow
def test_two_processes_with_a_group_of_shapes_each_train_measure_and_draw_as_one_device(runs):
    flags = ("--planning.ranks", "2", "--planning.ranks_mode", "independent", "--run.steps", "5")
    flags += ("--validation.share", "0.4", "--validation.every", "2", "--checkpoint.keep_best", "1")
    often = ("--checkpoint.minutes", "0.001")
    both = finished(runs.start_together(2, *flags, *often, "--run.folder", "groups"))
    assert [(status, errors(err)) for status, _, err in both] == [(0, [])] * 2
    assert list((runs.folder / "groups" / "samples").glob("*/1x8x8.png"))
    flags += ("--planning.ranks_per_group", "1")
    runs.finish(*flags, *PLAIN, "--run.folder", "one")
    trained, measured = (
        [[row for row in runs.metrics(name) if kind in row] for name in ("groups", "one")]
        for kind in ("loss", "validation/loss")
    )
    assert_the_same(*trained)
    assert [row["step"] for row in measured[0]] == [2, 4, 5]
    for ours, theirs in zip(*measured, strict=True):
        assert ours.pop("validation/set") == theirs.pop("validation/set")
        assert ours == pytest.approx(theirs, rel=1e-4)
    best = json.loads((runs.folder / "groups" / "best.json").read_text())["best"]
    assert [each["step"] for each in best] == [min(measured[1], key=LOSS)["step"]]


@pytest.mark.slow
def test_a_full_disk_of_one_process_ends_all_and_whole_checkpoints_stay(runs, small_disk):
    flags = ("--run.folder", str(small_disk / "run"), *PLAIN, "--planning.ranks", "2")
    often = ("--checkpoint.every", "2", "--checkpoint.keep", "100", "--run.steps", "2000")
    both = finished(runs.start_together(2, *flags, *often))
    assert sorted(status for status, _, _ in both) in ([1, 2], [2, 2])
    for _, _, err in both:
        (line,) = errors(err)
        assert "cannot be written (" in line
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    steps = str(lines_of(small_disk / "run" / "metrics.jsonl") + 2)
    continued = runs.finish(*flags, "--run.steps", steps, devices=2)
    assert "weights: checkpoint of step" in continued.stdout
