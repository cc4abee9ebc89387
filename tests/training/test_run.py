"""Whole runs of train.py, as a user types them."""

import json
import shutil

import pytest
import yaml
from training_runs import COMPUTED, computed, errors, lines_of

from alload_jax.config import read_config
from alload_jax.distributed.cluster import Cluster
from alload_jax.run.prepare import plan_run, read_data
from alload_jax.sharding.mesh import make_mesh


def test_a_run_writes_all_documented_files(unbroken):
    runs, finished = unbroken
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
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["dim"] == 16
    # On a CPU auto is a bucketed policy, and stays what it was.
    assert "policy" not in yaml.safe_load(runs.config.read_text())["planning"]
    assert saved["planning"]["policy"] == "equal_tokens"
    # An epoch trains on every sample once.
    assert sum(row["samples"] for row in rows if row["epoch"] == 0) == 21
    assert "finished at step 14" in finished.stdout
    assert "training 14/14" in finished.stdout  # plain lines, as output is no terminal


@pytest.mark.slow
def test_packed_plans_train_by_one_program_on_every_sample_once(runs):
    flags = ["--planning.policy", "balanced", "--run.folder", "packed", "--run.steps"]
    finished = runs.finish(*flags, "4")
    assert "compiling 1/1" in finished.stdout
    assert "1 row of 40 tokens" in finished.stdout
    rows = runs.metrics("packed")
    assert sum(row["samples"] for row in rows if row["epoch"] == 0) == 21
    assert all(row["tokens"] <= 80 for row in rows)
    saved = read_config(["--config", str(runs.folder / "packed" / "config.yaml")])
    assert saved.planning.policy == "balanced"


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
    assert "finished at step 14" in runs.finish().stdout
    assert (runs.folder / "run" / "summary.json").read_bytes() == before


def test_another_model_does_not_touch_the_run(unbroken):
    runs, _ = unbroken
    before = (runs.folder / "run" / "config.yaml").read_bytes()
    other = runs.here("--model.dim", "32")
    assert other.returncode == 2
    assert "another model: dim was 16 and is now 32" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1
    assert (runs.folder / "run" / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_samples(runs):
    flags = ("--optimizer.learning_rate", "1e30", "--checkpoint.every", "1")
    broken = runs.here(*flags)
    assert broken.returncode == 2
    assert len(errors(broken.stderr)) == 1
    bad = json.loads((runs.folder / "run" / "bad_step.json").read_text())
    assert f"step {bad['step']}: loss" in broken.stderr
    samples = [n for part in bad["micro_batches"] for n in part["samples"]]
    assert samples
    assert all(0 <= n < 21 for n in samples)
    names = [path.name for path in (runs.folder / "run" / "checkpoints").iterdir()]
    assert max(int(name) for name in names if name.isdigit()) == bad["step"] - 1


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
def test_invalid_input_is_reported_in_one_line_with_status_2(runs, flags, words):
    refused = runs.here(*flags, devices=8)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (runs.folder / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"planing": {"m_mem": 4}}, "planing.m_mem is unknown; did you mean planning.m_mem?"),
        (None, "tiny.yaml: is empty or holds no sections"),
    ],
)
def test_a_file_of_the_config_that_is_wrong_is_named(runs, section, words):
    runs.config.write_text(yaml.safe_dump(runs.tiny() | section) if section else "")
    refused = runs.here()
    assert refused.returncode == 2
    assert words in refused.stderr
    assert "tiny.yaml" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_damaged_record_stops_the_run_which_keeps_what_it_has_done(runs):
    stopped = runs.here("--data.folder", runs.spoil(12))
    assert stopped.returncode == 2
    assert len(errors(stopped.stderr)) == 1
    assert "(sample 12) has checksum" in stopped.stderr
    done = lines_of(runs.folder / "run" / "metrics.jsonl")
    assert f"saved at step {done}" in stopped.stderr
    assert (runs.folder / "run" / "checkpoints" / str(done)).exists()


@pytest.mark.slow
def test_a_damaged_record_can_be_skipped_in_every_epoch(runs):
    flags = ("--data.folder", runs.spoil(12), "--data.loader.max_bad_records", "1")
    finished = runs.finish(*flags)
    rows = runs.metrics()
    epochs = [sum(row["samples"] for row in rows if row["epoch"] == n) for n in (0, 1)]
    assert epochs == [20, 20]
    assert finished.stdout.count("skipped:") == 1
    assert len((runs.folder / "run" / "bad_records.txt").read_text().splitlines()) == 1
    (runs.folder / "bad.txt").write_text("# not a digit\n12\n")
    left_out = runs.finish("--run.folder", "left out", "--data.exclude", "bad.txt")
    assert "samples (1 left out) of" in left_out.stdout
    names = [name for name in COMPUTED if name != "skipped"]
    found, expected = (computed(runs.folder / name, names) for name in ("left out", "run"))
    assert found == expected


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
    refused = runs.here("--run.steps", "41", *small)
    assert refused.returncode == 2
    assert "checkpoint of another optimizer: skip_above was 'set' and is now None" in refused.stderr


@pytest.mark.slow
def test_a_label_that_the_model_does_not_know_is_named(runs):
    evaluators = '[{"name": "digit_accuracy"}]'
    few = ("--model.num_classes", "3", "--sampling.grids", "[]")
    stopped = runs.here(*few, "--evaluators", evaluators)
    assert stopped.returncode == 2
    assert "digits have 10 classes" in stopped.stderr
    stopped = runs.here(*few)
    assert stopped.returncode == 2
    assert "must be from 0 to below model.num_classes, which is 3" in stopped.stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named(runs):
    runs.finish()
    folder = runs.folder / "run" / "checkpoints"
    shutil.rmtree(folder / "14" / "identity")
    told = runs.finish("--run.steps", "16")
    assert f"warning: {folder / '14'}: identity/" in told.stderr
    assert "is missing; it is moved to damaged-14" in told.stderr
    assert "weights: checkpoint of step 10" in told.stdout
    for step in folder.glob("[0-9]*"):
        shutil.rmtree(step / "identity")
    broken = runs.here("--run.steps", "18")
    assert broken.returncode == 2
    (error,) = errors(broken.stderr)
    assert "16: identity/" in error
    assert "is missing, and no other checkpoint is left" in error
