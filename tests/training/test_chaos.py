"""The campaign of faults: what it sees, and a short one; `make chaos` is the long one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import orbax.checkpoint as ocp
import pytest
from patience import PATIENCE
from safetensors.numpy import save_file
from training_runs import ROOT

from alload_jax.errors import InputError


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """The campaign's programs can be imported."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


# ---------------------------------------------------------------- what was hit


def test_a_kill_counts_once_for_the_phases_that_are_open(tmp_path, monkeypatch):
    import chaos_phases

    up, arrived, sent = threading.Event(), threading.Event(), []

    def kill(pid, number):
        sent.append((pid, number))
        arrived.set()

    clock = SimpleNamespace(sleep=lambda _: up.wait(), monotonic=float)
    monkeypatch.setattr(chaos_phases, "time", clock)
    monkeypatch.setattr(chaos_phases.os, "kill", kill)
    aim, place = chaos_phases.Aim("validation", 2, 1.0, "SIGKILL"), tmp_path / "x.phases"
    phases = chaos_phases.Phases(place, aim)
    assert chaos_phases.read_marker(place) == (("start",), "")
    with phases.during("validation"):
        pass
    phases.open("saving")
    assert (sent, chaos_phases.read_marker(place)) == ([], (("saving",), ""))
    with phases.during("validation"):
        up.set()  # the delay is over
        assert arrived.wait(PATIENCE)
    assert chaos_phases.read_marker(place) == (("saving", "validation"), "SIGKILL")
    with phases.during("validation"):  # as after SIGTERM
        pass
    assert sent == [(os.getpid(), signal.SIGKILL)]


def test_300_kills_hit_every_phase_25_times():
    """Where a kill in five comes late, and a run has ended after some kills."""
    import chaos

    chance, counts, kills = random.Random(0), Counter(), 0
    while kills < 300:
        saved, series = 0, 0
        while series < chaos._MOST and kills < 300:
            phase = chaos.next_phase(counts, saved, 60, chance)
            if phase is None:
                break
            kills, series = kills + 1, series + 1
            counts.update([phase] if chance.random() > 0.2 else ["steps"])
            saved = 60 if phase == "end" else min(60, saved + chance.randrange(20))
    assert min(counts[phase] for phase in chaos.PHASES) >= 25
    signals = [chaos._SIGNALS[n % len(chaos._SIGNALS)] for n in range(300)]
    assert signals.count("SIGKILL") >= 200


# ---------------------------------------------------------------- planted faults


def write_run(folder):
    """What a finished run leaves."""
    same = {"epoch": 0, "grad_norm": 0.5, "samples": 4, "skipped": 0, "tokens": 64}
    rows = [{"step": n, "loss": 1 / n, "learning_rate": 0.01} | same for n in range(1, 9)]
    rows.insert(4, {"step": 4, "validation/loss": 0.25})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = {"params": {"kernel": np.arange(6.0).reshape(2, 3)}, "step": np.asarray(8)}
    for step in (4, 8):
        ocp.PyTreeCheckpointer().save(folder / "checkpoints" / str(step) / "state", state)
    (folder / "exported").mkdir()
    save_file({"a": np.arange(4.0)}, folder / "exported" / "x.safetensors")


def rows(edit):
    """Edits the lines of the metrics."""

    def plant(folder):
        path = folder / "metrics.jsonl"
        path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))

    return plant


def last_loss(value):
    return rows(lambda lines: [line.replace("0.125", value) for line in lines])


def plant_array(folder):
    place = folder / "checkpoints" / "8" / "state"
    state = ocp.PyTreeCheckpointer().restore(place)
    kernel = np.array(state["params"]["kernel"])
    kernel.view(np.uint64)[0, 1] ^= 1  # the lowest bit
    state["params"]["kernel"] = kernel
    ocp.PyTreeCheckpointer().save(place, state, force=True)


def plant_lost_array(folder):
    place = folder / "checkpoints" / "8" / "state"
    ocp.PyTreeCheckpointer().save(place, {"step": np.asarray(8)}, force=True)


def plant_export(folder):
    save_file({"a": np.arange(4.0) * (1 + 2e-16)}, folder / "exported" / "x.safetensors")


LOSSES = "samples or their losses differ"
STEPS = "steps are missing or repeated"
PLANTED = [
    (lambda folder: None, []),
    (last_loss("0.12500000000000003"), [LOSSES]),
    (rows(lambda lines: lines[:2] + lines[3:]), [STEPS, LOSSES]),
    (rows(lambda lines: lines[:3] + lines[2:]), [STEPS, LOSSES]),
    (
        rows(lambda lines: [line for line in lines if "validation" not in line]),
        ["validations or their losses differ"],
    ),
    (
        lambda folder: shutil.rmtree(folder / "checkpoints/4"),
        ["there are checkpoints of steps [8], not [4, 8]"],
    ),
    (plant_array, ["last arrays differ: ['params']['kernel'] and 0 more"]),
    (plant_lost_array, ["last arrays have other names"]),
    (plant_export, ["exports differ: a and 0 more"]),
    (lambda folder: shutil.rmtree(folder / "exported"), ["exports have other names"]),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    write_run(folder := tmp_path_factory.mktemp("chaos") / "whole")
    return folder


def test_planted_faults_are_seen(tmp_path, whole):
    from chaos_runs import differences

    for number, (plant, expected) in enumerate(PLANTED):
        planted = shutil.copytree(whole, tmp_path / str(number))
        plant(planted)
        assert differences(planted, whole, exact=True) == expected
    for loss, expected in (("0.12500000000000003", []), ("0.1251", [LOSSES])):
        planted = shutil.copytree(whole, tmp_path / loss)
        last_loss(loss)(planted)  # of several processes, which may round and no more
        assert differences(planted, whole, exact=False) == expected


def test_what_is_wrong_with_an_interruption_is_seen():
    from chaos_runs import faults_of_end, faults_of_rest, faults_of_start

    gone = "the checkpoint of step {} is gone"
    for numbers, faults in (
        ((8, 14, 8), []),
        ((8, 17, 8), ["9 steps are lost"]),
        ((8, 9, 4), [gone.format(8)]),
        ((12, 3, 0), ["12 steps are lost", gone.format(12)]),
    ):
        assert faults_of_rest(*numbers) == faults
    for said, before, right in (
        ("weights: checkpoint of step 8 in run", 8, True),
        ("weights: checkpoint of step 4 in run", 8, False),
        ("weights: new, drawn with run.seed 0", 8, False),
        ("weights: /some/weights; trained: lora", 0, True),
        ("weights: checkpoint of step 4 in run", 0, False),
        ("nothing yet", 8, True),
    ):
        started = SimpleNamespace(stdout=f"plan\n{said}\n")
        assert (faults_of_start(started, before) == []) == right
    for name, status, stderr, words in (
        ("SIGTERM", 0, "", []),
        ("SIGKILL", -9, "warning: x", []),
        ("SIGTERM", 1, "", ["SIGTERM gave status 1"]),
        ("", 2, "error: x", ["the run ended by itself with 2: ['error: x']"]),
        ("SIGTERM", 0, "Traceback ...\nKeyError: 3", ["a traceback: KeyError: 3"]),
    ):
        assert faults_of_end(SimpleNamespace(stderr=stderr), name, status) == words


def test_flipped_bits_are_found_or_harmless_or_missed(tmp_path):
    from chaos_bits import flip_in

    (tmp_path / "x").write_bytes(bytes(64))

    def read():
        content = (tmp_path / "x").read_bytes()
        if any(content[:16]):
            raise InputError("x: is damaged")
        return list(content[16:32])

    counts, missed = flip_in(tmp_path, read, 200, random.Random(0))
    assert min(counts[what] for what in ("found", "harmless", "missed")) > 20
    assert len(missed) == counts["missed"]
    assert (tmp_path / "x").read_bytes() == bytes(64)


def test_processes_that_are_left_are_seen(tmp_path):
    from chaos_starts import Started

    script = (
        "import subprocess, time; subprocess.Popen(['sleep', '600']); print(1, flush=True); "
        "time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout.readline() == b"1\n"
    parent.kill()
    parent.wait()
    started = Started(SimpleNamespace(pid=parent.pid, exitcode=-9), tmp_path / "1.out")
    assert started.wait_for_children(0) == 1
    assert started.wait_for_children(PATIENCE) == 0
    parent.stdout.close()


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder of a campaign, whose runs that are never stopped both tests share."""
    return tmp_path_factory.mktemp("campaign") / "work"


@pytest.mark.slow
def test_a_short_campaign_finds_nothing(tmp_path, work):
    result = tmp_path / "chaos.json"
    parts = {"kills": "3", "disks": "0", "flips": "0", "inputs": "3", "steps": "40"}
    places = {"work": work, "out": result}
    flags = [part for name, value in (parts | places).items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert sum(len(series["kills"]) for series in found["series"]) == 3
    assert found["inputs"]["given"] == 3
    assert len(found["series"]) == 1


@pytest.mark.slow
def test_a_fault_that_is_planted_in_a_run_is_seen(tmp_path, work, monkeypatch):
    """A sample that is left out after the interruption, as if its place were lost."""
    from chaos_runs import Campaign
    from chaos_starts import ENVIRONMENT

    for name, value in ENVIRONMENT.items():  # which the campaign sets
        monkeypatch.setenv(name, value)
    campaign = Campaign(work, steps=40)
    chance = random.Random(0)
    assert campaign.kill("run", "classes", "commit", "SIGKILL", chance).faults == []
    (tmp_path / "exclude.txt").write_text("\n".join(map(str, range(12))))
    flags = campaign.flags
    extra = ["--data.exclude", str(tmp_path / "exclude.txt")]
    monkeypatch.setattr(campaign, "flags", lambda *given: [*flags(*given), *extra])
    faults = campaign.finish("run", "classes")
    assert "samples or their losses differ" in faults
    assert any(fault.startswith("last arrays differ") for fault in faults)
