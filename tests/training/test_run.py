"""Whole runs of train.py, as a user types them."""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE, wait_until
from training_runs import Runs, errors, lines_of

from alload_jax.config import read_config
from alload_jax.data.manifest import read_manifest
from alload_jax.distributed.cluster import Cluster
from alload_jax.planning.cost import CostFile, QuadraticCost, write_cost_file
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import step_metrics
from alload_jax.run.prepare import plan_run, read_data
from alload_jax.sharding.mesh import make_mesh

COMPUTED = ("loss", "grad_norm", "learning_rate", "tokens", "samples", "imbalance", "padding")


def computed(rows):
    return [(row["step"], *(row[name] for name in COMPUTED)) for row in rows]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, digits_folder):
    runs = Runs(tmp_path_factory.mktemp("unbroken"), digits_folder)
    return runs, runs.run()


def test_a_run_writes_all_documented_files(unbroken):
    runs, finished = unbroken
    assert finished.returncode == 0, finished.stderr
    folder = runs.folder / "run"
    summary = json.loads((folder / "summary.json").read_text())
    rows = runs.metrics()
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert summary["steps"] == 14
    assert summary["samples_seen"] == sum(row["samples"] for row in rows)
    for key in ("loss_first", "loss_last", "tokens_per_second", "imbalance", "padding", "seconds"):
        assert key in summary
    for row in rows:
        assert row["step_seconds"] > row["input_wait_seconds"] >= 0
        assert row["predicted_cost"] > 0
    assert (folder / "samples" / "step_0000014" / "1x8x8.png").stat().st_size > 0
    events = b"".join(path.read_bytes() for path in (folder / "tensorboard").glob("events*"))
    assert b"tokens_per_second" in events
    assert b"samples/1x8x8" in events
    environment = json.loads((folder / "environment.json").read_text())
    assert environment[0]["versions"]["jax"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["dim"] == 16
    assert "finished at step 14" in finished.stdout
    assert "training 14/14" in finished.stdout  # plain lines, as output is no terminal


@pytest.mark.slow
def test_packed_plans_train_by_one_program_on_every_sample_once(runs):
    flags = ["--planning.policy", "balanced", "--run.folder", "packed", "--run.steps"]
    finished = runs.run(*flags, "4")
    assert finished.returncode == 0, finished.stderr
    assert "compiling 1/1" in finished.stdout
    assert "1 row of 40 tokens" in finished.stdout
    rows = runs.metrics("packed")
    assert sum(row["samples"] for row in rows if row["epoch"] == 0) == 21
    assert all(row["tokens"] <= 80 for row in rows)
    saved = read_config(["--config", str(runs.folder / "packed" / "config.yaml")])
    assert saved.planning.policy == "balanced"


def test_on_a_cpu_auto_is_a_bucketed_policy_and_stays_what_it_was(unbroken):
    runs, _ = unbroken
    assert "policy" not in yaml.safe_load(runs.config.read_text())["planning"]
    config = yaml.safe_load((runs.folder / "run" / "config.yaml").read_text())
    assert config["planning"]["policy"] == "equal_tokens"


def test_an_epoch_trains_on_every_sample_once(unbroken):
    runs, _ = unbroken
    epoch = [row for row in runs.metrics() if row["epoch"] == 0]
    assert sum(row["samples"] for row in epoch) == 21


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


def test_the_same_command_after_the_end_shows_the_summary_again(unbroken):
    runs, _first = unbroken
    before = (runs.folder / "run" / "summary.json").read_bytes()
    again = runs.run()
    assert again.returncode == 0, again.stderr
    assert "finished at step 14" in again.stdout
    assert (runs.folder / "run" / "summary.json").read_bytes() == before


@pytest.mark.slow
def test_a_signal_saves_and_the_run_continues_bit_for_bit(runs, default_signals):
    # A cosine that ends where it starts: the learning rate does not depend on the run's length.
    constant = ("--optimizer.final_fraction", "1.0")
    status = ("--run.status_when_stopped", "75")
    process = runs.start("--run.steps", "4000", *status, *constant)
    metrics = runs.folder / "run" / "metrics.jsonl"
    wait_until(lambda: lines_of(metrics) >= 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, err
    assert "SIGTERM: saved step" in out
    stopped = len(runs.metrics())
    assert f"--config {runs.folder}/run/config.yaml" in out
    assert (runs.folder / "run" / "checkpoints" / str(stopped)).exists()
    config = runs.folder / "run" / "config.yaml"
    steps = str(max(stopped + 4, 14))
    finished = runs.run("--config", str(config), "--run.steps", steps)
    assert finished.returncode == 0, finished.stderr
    rows = runs.metrics()
    assert [row["step"] for row in rows] == list(range(1, int(steps) + 1))
    whole = runs.run("--run.folder", str(runs.folder / "whole"), "--run.steps", steps, *constant)
    assert whole.returncode == 0, whole.stderr
    assert computed(rows) == computed(runs.metrics("whole"))


@pytest.mark.slow
def test_a_run_killed_while_saving_continues_bit_for_bit(runs, unbroken):
    process = runs.start("--checkpoint.every", "1", "--checkpoint.keep", "3")
    folder = runs.folder / "run" / "checkpoints"

    def saving():
        finished = [p for p in folder.glob("*") if p.name.isdigit()]
        return len(finished) >= 2 and any("tmp" in p.name for p in folder.glob("*"))

    wait_until(saving, process)
    process.kill()
    process.communicate()
    assert not (runs.folder / "run" / "summary.json").exists()
    finished = runs.run()
    assert finished.returncode == 0, finished.stderr
    assert computed(runs.metrics()) == computed(unbroken[0].metrics())
    starts = json.loads((runs.folder / "run" / "environment.json").read_text())
    assert 0 < starts[1]["step"] < 14


@pytest.mark.slow
def test_a_recalibrated_run_continues_by_the_models_of_its_checkpoint(runs):
    costs = runs.folder / "costs.json"
    write_cost_file(costs, CostFile(quadratic=QuadraticCost(0.01, 1e-4, 1e-6, 1e-3)))
    flags = ["--planning.policy", "balanced", "--planning.recalibrate", "epoch"]
    flags += ["--planning.cost_model", str(costs), "--planning.micro_batches_per_step", "1"]
    flags += ["--run.steps", "60", "--checkpoint.every", "33", "--checkpoint.keep", "9"]
    process = runs.start(*flags)
    checkpoints = runs.folder / "run" / "checkpoints"
    wait_until(lambda: (checkpoints / "33").exists(), process)
    process.kill()
    process.communicate()
    other = runs.run(*flags[:2], *flags[4:])
    assert other.returncode == 2
    assert "another planning: recalibrate was 'epoch' and is now None" in other.stderr
    finished = runs.run(*flags)
    assert finished.returncode == 0, finished.stderr
    before, after = (
        json.loads((checkpoints / step / "recalibration" / "metadata").read_text())["models"]
        for step in ("33", "60")
    )
    assert before
    assert after[: len(before)] == before
    assert len(after) > len(before)
    saved = read_config(["--config", str(runs.folder / "run" / "config.yaml")])
    samples = read_manifest(runs.data).samples(saved.model.patch_size)
    plan = make_plan(saved.planning, samples, 1, saved.run.seed)
    for epoch, fields in after:
        plan = plan.recalibrated(epoch, QuadraticCost(**fields))
    for row in runs.metrics():
        expected = step_metrics(plan.step(row["step"] - 1), plan, QuadraticCost(1, 1, 1))
        assert (row["samples"], row["tokens"]) == (expected.samples, expected.tokens)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop", [7, 4])
def test_a_run_cut_short_and_continued_is_the_run_never_stopped(runs, unbroken, stop):
    """Within an epoch (4) and in the next one (7), by a checkpoint of exactly that step."""
    process = runs.start("--checkpoint.every", str(stop), "--checkpoint.keep", "9")
    wait_until(lambda: (runs.folder / "run" / "checkpoints" / str(stop)).exists(), process)
    process.kill()
    process.communicate()
    for path in (runs.folder / "run" / "checkpoints").iterdir():
        assert path.name == str(stop) or not path.name.isdigit() or int(path.name) > stop
    finished = runs.run()
    assert finished.returncode == 0, finished.stderr
    assert computed(runs.metrics()) == computed(unbroken[0].metrics())


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_samples(runs):
    flags = ("--optimizer.learning_rate", "1e30", "--checkpoint.every", "1")
    broken = runs.run(*flags)
    assert broken.returncode == 2
    assert len(errors(broken.stderr)) == 1
    bad = json.loads((runs.folder / "run" / "bad_step.json").read_text())
    assert f"step {bad['step']}: loss" in broken.stderr
    samples = [n for part in bad["micro_batches"] for n in part["samples"]]
    assert samples
    assert all(0 <= n < 21 for n in samples)
    kept = [
        int(p.name) for p in (runs.folder / "run" / "checkpoints").iterdir() if p.name.isdigit()
    ]
    assert max(kept) == bad["step"] - 1


BAD = [
    (("--optimizer.learning_rat", "1"), "did you mean optimizer.learning_rate?"),
    (("--model.dim", "wide"), "model.dim"),
    (("--model.remat", "foo"), "expected one of ['none', 'full', 'offload'"),
    (("--planning.m_mem", "10"), "m_mem is 10 tokens, shorter than sample"),
    (("--mesh.fsdp", "3"), "fsdp 3, context 1, tensor 1) does not fit"),
    (("--data.folder", "nowhere"), "nowhere/manifest.parquet: no such manifest"),
    (("--config", "missing.yaml"), "missing.yaml"),
    (("--model.patch_size", "[1,3,3]"), "model.patch_size (1, 3, 3) does not divide"),
    (("--model.in_channels", "3"), "has 1 channels, but the model generates 3"),
    (
        ("--planning.ranks_mode", "independent", "--planning.ranks_per_group", "3"),
        "planning.ranks_per_group is 3, which does not divide the plan's",
    ),
    (("--planning.ranks", "0"), "planning.ranks is 0"),
    (("--run.steps", "0"), "run.steps is 0"),
    (("--sampling.grids", "[{frames: 1, height: 9, width: 8}]"), "is not a multiple"),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=[words for _, words in BAD])
def test_invalid_input_is_reported_in_one_line_with_status_2(
    runs, flags, words, capsys, monkeypatch
):
    from alload_jax.errors import run_command
    from alload_jax.run import main

    monkeypatch.chdir(runs.folder)
    assert run_command(main, ["--config", str(runs.config), *flags]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not (runs.folder / "run" / "config.yaml").exists()


def test_a_misspelt_key_in_the_file_is_named(runs, capsys):
    from alload_jax.errors import run_command
    from alload_jax.run import main

    config = runs.tiny() | {"planing": {"m_mem": 4}}
    runs.config.write_text(yaml.safe_dump(config))
    assert run_command(main, ["--config", str(runs.config)]) == 2
    error = capsys.readouterr().err
    assert "planing.m_mem is unknown; did you mean planning.m_mem?" in error
    assert "tiny.yaml" in error


def test_an_empty_config_is_named(runs, capsys):
    from alload_jax.errors import run_command
    from alload_jax.run import main

    runs.config.write_text("")
    assert run_command(main, ["--config", str(runs.config)]) == 2
    error = capsys.readouterr().err
    assert f"{runs.config}: is empty or holds no sections" in error
    assert len(error.strip().splitlines()) == 1


def test_another_model_does_not_touch_the_run(unbroken):
    runs, _ = unbroken
    before = (runs.folder / "run" / "config.yaml").read_bytes()
    other = runs.run("--model.dim", "32")
    assert other.returncode == 2
    assert "another model: dim was 16 and is now 32" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1
    assert (runs.folder / "run" / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_a_damaged_record_stops_the_run_which_keeps_what_it_has_done(runs):
    stopped = runs.run("--data.folder", runs.spoil(12))
    assert stopped.returncode == 2
    assert len(errors(stopped.stderr)) == 1
    assert "(sample 12) has checksum" in stopped.stderr
    done = lines_of(runs.folder / "run" / "metrics.jsonl")
    assert f"saved at step {done}" in stopped.stderr
    assert (runs.folder / "run" / "checkpoints" / str(done)).exists()


@pytest.mark.slow
def test_a_damaged_record_can_be_skipped_in_every_epoch(runs):
    flags = ("--data.folder", runs.spoil(12), "--data.loader.max_bad_records", "1")
    finished = runs.run(*flags)
    assert finished.returncode == 0, finished.stderr
    rows = runs.metrics()
    epochs = [sum(row["samples"] for row in rows if row["epoch"] == n) for n in (0, 1)]
    assert epochs == [20, 20]
    assert finished.stdout.count("skipped:") == 1
    assert len((runs.folder / "run" / "bad_records.txt").read_text().splitlines()) == 1
    (runs.folder / "bad.txt").write_text("# not a digit\n12\n")
    left_out = runs.run("--run.folder", "left out", "--data.exclude", "bad.txt")
    assert left_out.returncode == 0, left_out.stderr
    assert "samples (1 left out) of" in left_out.stdout
    assert computed(runs.metrics("left out")) == computed(rows)


@pytest.mark.slow
def test_updates_of_large_gradients_are_skipped_and_counted(runs):
    small = ("--planning.policy", "dual_constraint")  # one or two samples a micro-batch
    finished = runs.run("--optimizer.skip_above", "1.05", "--run.steps", "40", *small)
    assert finished.returncode == 0, finished.stderr
    skipped = [row["update_skipped"] for row in runs.metrics()]
    assert not any(skipped[:20])
    assert any(skipped[20:])
    assert finished.stdout.count("update skipped, gradient norm") == sum(skipped)
    summary = json.loads((runs.folder / "run" / "summary.json").read_text())
    assert summary["updates_skipped"] == sum(skipped)
    refused = runs.run("--run.steps", "41", *small)
    assert refused.returncode == 2
    assert "checkpoint of another optimizer: skip_above was 'set' and is now None" in refused.stderr


def descendants(pid):
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for found in lists for child in found.split()]
    return children + [each for child in children for each in descendants(child)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_run_leaves_no_process_behind(runs):
    run = runs.start("--run.steps", "1000000", "--data.loader.processes", "2")
    wait_until((runs.folder / "run" / "checkpoints" / "5").exists, run)
    left = descendants(run.pid)
    assert len(left) >= 2
    run.kill()
    run.communicate()
    wait_until(lambda: not any(map(alive, left)))


@pytest.mark.slow
def test_a_label_that_the_model_does_not_know_is_named(runs):
    evaluators = '[{"name": "digit_accuracy"}]'
    few = ("--model.num_classes", "3", "--sampling.grids", "[]")
    stopped = runs.run(*few, "--evaluators", evaluators)
    assert stopped.returncode == 2
    assert "digits have 10 classes" in stopped.stderr
    stopped = runs.run(*few)
    assert stopped.returncode == 2
    assert "must be from 0 to below model.num_classes, which is 3" in stopped.stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named(runs):
    assert runs.run().returncode == 0
    folder = runs.folder / "run" / "checkpoints"
    shutil.rmtree(folder / "14" / "identity")
    told = runs.run("--run.steps", "16")
    assert told.returncode == 0
    assert f"warning: {folder / '14'}: identity/" in told.stderr
    assert "is missing; it is moved to damaged-14" in told.stderr
    assert "weights: checkpoint of step 10" in told.stdout
    for step in folder.glob("[0-9]*"):
        shutil.rmtree(step / "identity")
    broken = runs.run("--run.steps", "18")
    assert broken.returncode == 2
    (error,) = errors(broken.stderr)
    assert "16: identity/" in error
    assert "is missing, and no other checkpoint is left" in error
