"""Whole runs of train.py, as a user types them, and the files of their folders."""

import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from layouts import write_samples
from rich.console import Console
from source_files import make_samples, write_tensor_files
from training_runs import COMPUTED, computed, errors, line_of, lines_of, run_here

from alload_jax.config import Config, DataConfig, RunConfig, read_config
from alload_jax.data.loader import PlacedStep
from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.initialize import ClusterConfig
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.cost import CostFile
from alload_jax.planning.metrics import StepMetrics
from alload_jax.planning.settings import PlanningConfig
from alload_jax.run import prepare, training
from alload_jax.run.prepare import make_collator, plan_run, read_data
from alload_jax.sharding.mesh import make_mesh
from alload_jax.training import progress, run_files
from alload_jax.training.callbacks import telemetry
from alload_jax.training.callbacks.telemetry import LayerLog, Telemetry
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import (
    LOCK_NAME,
    BadRecords,
    MetricsLog,
    after_loss,
    locked,
    set_aside_metrics,
)
from alload_jax.training.trackers import TensorBoard


def test_the_config_of_a_moved_run_does_not_begin_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved" / "checkpoints").mkdir(parents=True)
    config = {"run": {"folder": "gone"}, "data": {"folder": "none"}, "planning": {"m_mem": 64}}
    Path("moved/config.yaml").write_text(yaml.dump(config))
    argv = ["--config", "moved/config.yaml"]
    assert "give --run.folder moved to go on" in line_of(run_here(*argv))
    assert "none/manifest.parquet: no such" in line_of(run_here(*argv, "--run.folder", "moved"))


def test_a_run_writes_all_documented_files(unbroken):
    runs, finished = unbroken
    folder = runs.folder / "run"
    summary = json.loads((folder / "summary.json").read_text())
    rows = runs.metrics()
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert summary["steps"] == 14
    assert summary["samples_seen"] == sum(row["samples"] for row in rows)
    for row in rows:
        assert row["step_seconds"] > row["input_wait_seconds"] >= 0
        assert row["predicted_cost"] > 0
    assert (folder / "samples" / "step_0000014" / "1x8x8.png").stat().st_size > 0
    events = b"".join(path.read_bytes() for path in (folder / "tensorboard").glob("events*"))
    assert b"tokens_per_second" in events
    assert b"samples/1x8x8" in events
    environment = json.loads((folder / "environment.json").read_text())
    assert environment[0]["versions"]["jax"]
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["dim"] == 16
    # On a CPU auto is a bucketed policy, and stays what it was.
    assert "policy" not in yaml.safe_load(runs.config.read_text())["planning"]
    assert saved["planning"]["policy"] == "equal_tokens"
    # An epoch trains on every sample once.
    assert sum(row["samples"] for row in rows if row["epoch"] == 0) == 21
    assert "finished at step 14" in finished.stdout
    assert "training 14/14" in finished.stdout  # plain lines, as output is no terminal


def test_a_run_that_is_continued_keeps_the_policy_that_auto_took(unbroken, tmp_path):
    runs, _ = unbroken
    folder = tmp_path / "run"
    shutil.copytree(runs.folder / "run", folder)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    saved["planning"]["policy"] = "sorted"
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    flags = ["--config", str(runs.config), "--run.folder", str(folder)]
    config, cluster = read_config([*flags, "--data.folder", str(runs.data)]), Cluster()
    data = read_data(config.data, config.validation, config.model, cluster)
    mesh = make_mesh(config.mesh)
    plan, reason = plan_run(config.planning, config.model, data, config.run, mesh, cluster)
    assert plan.planning.policy == "sorted"
    assert reason == ""


@pytest.mark.parametrize(
    ("unable", "older", "ratio", "packs"),
    [
        ("", "", None, True),
        ("", "sm_80", None, False),
        ("", "sm_80", 1.1, True),
        ("attention is xla", "", 1.1, False),
    ],
)
def test_before_hopper_packed_rows_need_a_measurement(unable, older, ratio, packs, monkeypatch):
    family = SimpleNamespace(packing_unsupported_reason=lambda _: unable)
    monkeypatch.setattr(prepare, "family_of", lambda _: family)
    monkeypatch.setattr(prepare, "packed_unsupported_reason", lambda: older)
    assert prepare.packs_rows(WanConfig(), CostFile(packed_ratio=ratio)) == packs


def test_weights_and_dropout_of_the_data_folder_reach_the_run_s_plan_and_collator(
    unbroken, tmp_path
):
    runs, _ = unbroken
    settings = [{"weight": 3.0, "dropout": 1.0}] * 2 + [{}] * 4
    samples = [((1, 8, 8), np.array([n % 2]), more) for n, more in enumerate(settings)]
    write_samples(tmp_path / "data", 6, lambda _, n: samples[n], channels=1)
    flags = ["--config", str(runs.config), "--data.folder", str(tmp_path / "data")]
    config, cluster = read_config([*flags, "--run.folder", str(tmp_path / "run")]), Cluster()
    data = read_data(config.data, config.validation, config.model, cluster)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    plan, _ = plan_run(config.planning, config.model, data, config.run, mesh, cluster)
    assert plan.plan.epoch(0).counts.tolist() == [3, 3, 1, 1, 1, 1]
    collator = make_collator(plan, data, config.model, mesh, config.run.seed)
    null = config.model.num_classes
    for number in range(plan.plan.steps_per_epoch):
        for batch in collator(plan.plan.step(number)).batches:
            labels = np.asarray(batch.condition)[batch.sample >= 0][:, 0]
            numbers = batch.sample[batch.sample >= 0]
            assert labels.tolist() == [null if n < 2 else n % 2 for n in numbers.tolist()]
    # Gradients are divided by the mean number of samples of a step, if each counts alike.
    for weighting, weight in (("sample", 10 / plan.plan.steps_per_epoch), ("token", None)):
        config = replace(config, objective=replace(config.objective, weighting=weighting))
        run = SimpleNamespace(config=config, plan=plan, cluster=cluster, folder=tmp_path)
        assert training._computation(run, list, 4).step_weight == weight


def test_the_same_command_shows_the_summary_again_and_another_model_is_refused(unbroken):
    runs, _ = unbroken
    files = [runs.folder / "run" / name for name in ("summary.json", "config.yaml")]
    before = [path.read_bytes() for path in files]
    assert "finished at step 14" in runs.finish().stdout
    assert "another model: dim was 16 and is now 32" in runs.refused("--model.dim", "32")
    assert [path.read_bytes() for path in files] == before


BAD = [
    (("--planning.m_mem", "10"), "m_mem is 10 tokens, shorter than sample"),
    (("--mesh.fsdp", "3"), "fsdp 3, context 1, tensor 1) does not fit"),
    (("--data.folder", "nowhere"), "nowhere/manifest.parquet: no such manifest"),
    (("--model.patch_size", "[1,3,3]"), "model.patch_size (1, 3, 3) does not divide"),
    (("--model.in_channels", "3"), "has 1 channels, but the model generates 3"),
    (
        ("--planning.ranks_mode", "independent", "--planning.ranks_per_group", "3"),
        "planning.ranks_per_group is 3, which does not divide the plan's",
    ),
    (("--run.steps", "0"), "run.steps is 0"),
    (("--sampling.grids", "[{frames: 1, height: 9, width: 8}]"), "is not a multiple"),
    (
        ("--sampling.grids", "[{frames: 5, height: 8, width: 8, rows: 800}]"),
        "with 800 rows would have 67230×844 pixels, but GIF supports sides up to 65535",
    ),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=[words for _, words in BAD])
def test_invalid_input_is_reported_in_one_line_with_status_2(runs, flags, words):
    assert words in runs.refused(*flags, devices=8)
    assert not (runs.folder / "run" / "config.yaml").exists()


def test_files_of_others_whose_latents_may_be_on_another_scale_are_refused(runs):
    write_tensor_files(runs.folder / "files", make_samples(3))
    assert "data.source.normalize" in runs.refused("--data.folder", "files")


@pytest.mark.slow
def test_a_damaged_record_stops_a_run_or_is_skipped_in_every_epoch(runs):
    damaged = ("--data.folder", runs.spoil(12))
    stopped = runs.here("--run.folder", "stopped", *damaged)
    assert stopped.returncode == 2
    (line,) = errors(stopped.stderr)
    assert "(sample 12) has checksum" in line
    done = lines_of(runs.folder / "stopped" / "metrics.jsonl")
    assert f"saved at step {done}" in line
    assert (runs.folder / "stopped" / "checkpoints" / str(done)).exists()

    finished = runs.finish(*damaged, "--data.loader.max_bad_records", "1")
    rows = runs.metrics()
    epochs = [sum(row["samples"] for row in rows if row["epoch"] == n) for n in (0, 1)]
    assert epochs == [20, 20]
    assert finished.stdout.count("skipped:") == 1
    assert lines_of(runs.folder / "run" / "bad_records.txt") == 1
    (runs.folder / "bad.txt").write_text("# not a digit\n12\n")
    left_out = runs.finish("--run.folder", "left out", "--data.exclude", "bad.txt")
    assert "samples (1 left out) of" in left_out.stdout
    folders = [runs.folder / name for name in ("left out", "run")]
    names = [name for name in COMPUTED if name not in ("skipped", "tokens", "padding")]
    found, expected = (computed(folder, names) for folder in folders)
    assert found == expected
    # A damaged sample counts among the tokens, one that a list leaves out does not.
    found, expected = (np.array(computed(folder, ["tokens", "padding"])) for folder in folders)
    fewer = expected[:, 0] - found[:, 0]
    assert fewer[fewer != 0].tolist() == [20] * 3  # of three epochs
    rows = [(1 - each[:, 1]) / each[:, 0] for each in (found, expected)]
    np.testing.assert_allclose(*rows)


@pytest.mark.slow
def test_updates_of_large_gradients_are_skipped_and_counted(runs):
    small = ("--planning.policy", "dual_constraint")  # one or two samples a micro-batch
    finished = runs.finish("--optimizer.skip_above", "1.05", "--run.steps", "40", *small)
    skipped = [row["update_skipped"] for row in runs.metrics()]
    assert not any(skipped[:20])
    assert any(skipped[20:])
    assert finished.stdout.count("update skipped, gradient norm") == sum(skipped)
    summary = json.loads((runs.folder / "run" / "summary.json").read_text())
    assert summary["updates_skipped"] == sum(skipped)
    said = runs.refused("--run.steps", "41", *small)
    assert "checkpoint of another optimizer: skip_above was 'set' and is now null" in said


@pytest.mark.slow
def test_an_evaluator_refuses_a_model_of_fewer_classes(runs):
    few = ("--model.num_classes", "3", "--sampling.grids", "[]")
    judged = runs.here(*few, "--evaluators", '[{"name": "digit_accuracy"}]')
    assert "digits have 10 classes" in judged.stderr


# ---------------------------------------------------------------- files of a run's folder


HOLD = """
import signal, sys
from pathlib import Path
from alload_jax.distributed.cluster import Cluster
from alload_jax.training.run_files import locked
with locked(Path(sys.argv[1]), Cluster()):
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_until_the_first_one_ends(tmp_path, holder):
    def refused():
        with pytest.raises(InputError) as error, locked(tmp_path, Cluster()):
            pass
        return str(error.value)

    message = refused()
    assert message.startswith(f"{tmp_path}: another run trains here (process {holder.pid} on ")
    assert re.search(r"since \d{4}-\d\d-\d\d .*UTC\); stop it, wait .* run.folder$", message)
    held = json.loads((tmp_path / LOCK_NAME).read_text()) | {"host": "lost"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(held))
    assert refused().endswith(
        "if that host is lost and its lock stays, as on NFS 3, remove lock.json"
    )
    (tmp_path / LOCK_NAME).write_text("{")  # which says nothing, and is still held
    assert "another run trains here; stop" in refused()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    for _ in range(2):
        with locked(tmp_path, Cluster()):
            assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()


def test_files_that_no_run_wrote_are_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(InputError, match=r"config.yaml: no run wrote this file, .* run.folder"):
        locked(tmp_path, Cluster()).__enter__()
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
    flags = ["--config", "configs/videos.yaml", "--run.folder", str(tmp_path)]
    flags += ["--data.folder", str(tmp_path / "missing")]
    with pytest.raises(InputError, match=r"config.yaml: no run wrote this file"):
        training.run(read_config(flags), flags)  # before data are read
    (tmp_path / LOCK_NAME).write_text('{"host": "a", "process": 1}')  # which no run leaves alone
    with pytest.raises(InputError, match=r"config.yaml: no run wrote this file"):
        locked(tmp_path, Cluster()).__enter__()
    (tmp_path / "environment.json").touch()  # a run that was copied without its lock
    with locked(tmp_path, Cluster()):
        pass
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "checkpoints")
    for part in (".", "7", "8", "7/state"):  # a folder 8 would be its newest step
        with pytest.raises(InputError, match=f"is a part of the run {tmp_path}; name another"):
            locked(Path(part), Cluster()).__enter__()
    assert [str(each) for each in Path().rglob("*")] == ["7"]
    (tmp_path / "environment.json").unlink()  # config.yaml and checkpoints of anything
    with locked(Path("8"), Cluster()):
        pass


@pytest.mark.parametrize(
    ("name", "words"),
    [("manifest.parquet", ": is a data folder; name"), (LOCK_NAME, "lock.json: no run wrote this")],
)
def test_a_data_folder_and_a_lock_of_others_are_no_run_folder(tmp_path, name, words):
    (tmp_path / name).write_text('{"lockfileVersion": 3}')
    with pytest.raises(InputError, match=words):
        locked(tmp_path, Cluster()).__enter__()
    assert (tmp_path / name).read_text() == '{"lockfileVersion": 3}'


def test_metrics_are_kept_where_no_checkpoint_continues_them(tmp_path):
    assert set_aside_metrics(tmp_path) == ""
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        told = set_aside_metrics(tmp_path)
        assert "has no checkpoint, so the run begins at step 0 again; the metrics of" in told
        assert told.endswith(f"{number} steps before are kept in metrics-{number}.jsonl")
        assert (tmp_path / f"metrics-{number}.jsonl").read_text() == f'{{"step": {number}}}\n'


@pytest.mark.parametrize("first", [True, False])
def test_metrics_are_read_by_others_when_process_0_has_replaced_them(first, tmp_path, monkeypatch):
    """NFS fails a process that is reading a file which another host replaces."""
    path, order = tmp_path / "metrics.jsonl", []
    path.touch()
    before = path.stat().st_ino
    monkeypatch.setattr(run_files, "first_process", lambda: first)
    read = run_files.read_metrics
    monkeypatch.setattr(run_files, "read_metrics", lambda path: order.append("read") or read(path))
    told = SimpleNamespace(broadcast=lambda _: order.append(path.stat().st_ino != before))
    MetricsLog(tmp_path, 0, told).close()
    assert order == (["read", True] if first else [False, "read"])
    assert (path.stat().st_ino != before) is first


def test_what_a_run_keeps_of_its_steps_does_not_grow_with_them(tmp_path):
    path, most = tmp_path / "metrics.jsonl", run_files.MOST_FOLLOWED
    line = '{{"step": {}, "loss": {}, "grad_norm": NaN}}\n{{"step": {}, "validation/loss": 2}}\n'
    path.write_text("".join(line.format(n, n, n) for n in range(2 * most)) + '{"step": 1, "lo')
    tracemalloc.start()
    log = MetricsLog(tmp_path, 2 * most - 2, Cluster())
    assert [loss for loss, _ in log.losses()] == list(range(most - 1, 2 * most - 1))
    assert len(log.validations) == 2 * most - 1
    kept = tracemalloc.get_traced_memory()[0]
    count = sum(1 for _ in log.rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    log.close()
    assert count == 2 * most - 1
    assert len(path.read_text().splitlines()) == 2 * count
    assert peak < kept + 2**18


def test_what_follows_the_loss_of_a_process_is_told_with_its_step(tmp_path):
    for name in ("5", "20", "diverged-30"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    given = (tmp_path, tmp_path, ClusterConfig())
    assert after_loss(*given) == "start all processes again"
    (tmp_path / "config.yaml").touch()
    assert after_loss(*given).endswith(f"{tmp_path}/config.yaml (continues from step 20)")


@pytest.mark.parametrize(("processes", "calls"), [(1, ["train"]), (2, ["devices", "train"])])
def test_processes_take_their_devices_before_they_read_data(
    processes, calls, tmp_path, monkeypatch
):
    """JAX waits for the devices of the others for two minutes, and one may read for longer."""
    cluster, found = Cluster(), []
    cluster.num_processes = processes
    monkeypatch.setattr(training, "initialize", lambda *_: cluster)
    monkeypatch.setattr(training, "train", lambda *_: found.append("train") or 0)
    monkeypatch.setattr("jax.devices", lambda: found.append("devices"))
    config = Config(RunConfig(str(tmp_path)), DataConfig("none"), PlanningConfig(m_mem=9))
    assert training.run(config, []) == 0
    assert found == calls


def test_what_a_run_that_failed_has_left_does_not_stay_while_the_next_one_trains(
    tmp_path, monkeypatch
):
    class Left:
        """Frames of an error hold arrays, and themselves."""

    left = Left()
    left.frame, alive, seen = left, weakref.ref(left), []
    gc.disable()
    try:
        del left
        monkeypatch.setattr(training, "train", lambda *_: seen.append(alive()) or 0)
        config = Config(RunConfig(str(tmp_path)), DataConfig("none"), PlanningConfig(m_mem=9))
        assert training.run(config, []) == 0
    finally:
        gc.enable()
    assert seen == [None]


def test_file_systems_without_locks_are_noted(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("alload_jax.training.run_files.fcntl.flock", refuse)
    with locked(tmp_path, Cluster()):
        pass
    assert "cannot be locked (Operation not supported); start no other" in capsys.readouterr().out


# ---------------------------------------------------------------- damaged records


def refusal(folder, max_bad_records, *problems):
    """What telemetry says of a step with damaged records."""
    records = BadRecords(folder / "bad_records.txt", Cluster())
    run = SimpleNamespace(refusal="", done=3, total=4)
    run.refuse = partial(setattr, run, "refusal")
    log, tracker = MetricsLog(folder, 0, Cluster()), TensorBoard(folder / "events", resumed_at=0)
    bar = ProgressBar("training", 4)
    told = Telemetry(None, lambda step: 1.0, log, tracker, records, max_bad_records, bar)
    told.on_start(run)
    told.on_step_start(run, PlacedStep(3, 0, (), problems, 0, 0.0))
    told.close()
    return run.refusal


def test_a_refusal_counts_the_records_of_earlier_starts_and_says_where_they_are(tmp_path):
    listed = tmp_path / "bad_records.txt"
    listed.write_bytes(b"shard: record 1 is damaged\n\xff\xfe\n")
    assert refusal(tmp_path, 0) == ""  # those that were damaged once stop no later start
    assert refusal(tmp_path, 3, "shard: record 3") == ""
    found = refusal(tmp_path, 3, "shard: record 4")
    assert found.startswith("shard: record 4; restore the record, or allow more than")
    assert found.endswith(f"(3 others are in {listed}; delete it where they are restored)")
    (tmp_path / "new").mkdir()
    assert " in " not in refusal(tmp_path / "new", 0, "shard: record 1")


# ---------------------------------------------------------------- progress


def test_each_step_is_told_and_meanwhile_nothing_is_computed_on_the_devices(tmp_path):
    """What is computed behind a step waits for it, and the devices then wait for the next one."""
    started, run = [], SimpleNamespace(done=2, total=10**13)

    def schedule(step):
        assert not started
        return 0.5 * step

    computed, shown, guarded, notes = [], [], [], []
    plan = SimpleNamespace(
        metrics=lambda number: StepMetrics(4, 8, 1.0, 0.0, 0.0, (1.0,)),
        drift=lambda number, terms, seconds: computed.append(seconds),
        observe=lambda *_: None,
    )
    log, bad = MetricsLog(tmp_path, 0, Cluster()), BadRecords(tmp_path / "bad", Cluster())
    tracker = SimpleNamespace(log=lambda *each: shown.append(each), close=lambda: None)
    bar = SimpleNamespace(start=list, stop=list, say=notes.append, advance=notes.append)
    guard = SimpleNamespace(add=lambda *each: guarded.append(each))
    told = Telemetry(plan, schedule, log, tracker, bad, 9, bar, guard)
    told.on_start(run)
    started.append(True)
    # The first one's loss is not finite, and it begins again.
    for number, loss in ((2, jnp.nan), (2, 2.0), (3, 3.0), (4, 4.0)):
        step = PlacedStep(number, 0, (), ("damaged",), 0, 1e6)
        told.on_step_start(run, step)
        metrics = {"loss": jnp.float32(loss), "grad_norm": jnp.float32(7)}
        told.on_step_end(run, step, metrics)
    told.on_stop(run)
    told.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["learning_rate"] for row in rows] == [1.0, 1.5, 2.0]
    assert [row["input_wait_seconds"] for row in rows] == [2e6, 1e6, 0.0]
    assert [round(seconds / 1e6) for seconds in computed] == [-2, -1, 0]
    assert [(row["samples"], row["skipped"]) for row in rows] == [(3, 1)] * 3
    for row, (step, figures) in zip(rows, shown, strict=True):
        assert figures["tokens_per_second"] == 8 / row["step_seconds"]
        assert step == row["step"]
    assert log.first["step"] == 3
    assert guarded == [(2, 2.0, 7.0), (3, 3.0, 7.0), (4, 4.0, 7.0)]
    assert [note.split(" · ")[0] for note in notes] == [
        *("skipped: damaged", "loss 2.0000", "loss 2.0500", "loss 2.1475"),
    ]
    started.clear()
    assert told._rate(2 + telemetry._RATES) == 1 + telemetry._RATES / 2  # and so are later ones
    MetricsLog(tmp_path, 4, Cluster()).close()  # after that step, whose row stays
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]
    # A pause waits for the step in flight: only models that record something of layers take one.
    layers = LayerLog(tmp_path, WanConfig(), 0)
    layers.on_start(SimpleNamespace(state=SimpleNamespace(variables={})))
    assert not layers.due(SimpleNamespace(done=10))


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_done_before_count_for_no_speed(monkeypatch, terminal):
    now = [5.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=200 if terminal else 20)
    with ProgressBar("work", total=110, console=console) as bar:
        bar.skip(90)
        for _ in range(10):
            now[0] += 1.5
            bar.advance("[b]")
    lines = written.getvalue()
    if terminal:
        assert "100/110" in lines
    else:  # the 10 left take as long as the 10 done
        assert lines == "work 97/110 · [b] · 20 s left\n"
