"""Whole runs that are validated, in this process."""

import json

import numpy as np
import pytest
from training_runs import Runs, computed, metrics_of

from alload_jax.config import read_config
from alload_jax.data.datasets.digits import Digits
from alload_jax.data.manifest import read_manifest
from alload_jax.data.selection import is_held_out
from alload_jax.training.callbacks.validating import Validating
from alload_jax.training.restore import find_step

SHARE = ("--validation.share", "0.4")
EVERY = ("--validation.every", "2", "--checkpoint.every", "4")


class ValidatedRuns(Runs):
    def tiny(self):
        config = super().tiny()
        config["run"]["steps"] = 8
        config["planning"] = {"policy": "equal_tokens", "m_mem": 24, "ranks": 2}
        config["model"]["dtype"] = "float32"
        config["optimizer"]["ema_decay"] = 0.5
        del config["sampling"], config["checkpoint"]
        return config


@pytest.fixture
def runs(tmp_path, digits_folder):
    return ValidatedRuns(tmp_path, digits_folder)


@pytest.fixture
def train(runs):
    """Runs train.py in this process; returns the run's folder."""

    def run(*flags, folder="run", devices=1):
        runs.told = runs.finish("--run.folder", folder, *flags, devices=devices).stdout
        return runs.folder / folder

    return run


def steps_of(folder):
    return computed(folder, ("loss", "grad_norm", "epoch", "samples", "tokens"))


def validations(folder):
    return [row for row in metrics_of(folder) if "validation/loss" in row]


def checkpoints(folder):
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())


def best_of(folder):
    return json.loads((folder / "best.json").read_text())["best"]


@pytest.mark.slow
def test_a_crashed_run_continues_with_equal_validations_and_best_checkpoints(
    runs, train, monkeypatch
):
    """The validation of a step fails, before or after its line is in the log."""
    flags = (*SHARE, *EVERY, "--checkpoint.keep_best", "2", "--checkpoint.keep", "1")
    whole = train(*flags, folder="whole")
    assert "\nvalidation: " in runs.told
    assert "validation at step 2: loss " in runs.told
    assert [row["step"] for row in validations(whole)] == [2, 4, 6, 8]
    losses = {row["step"]: row["validation/loss"] for row in validations(whole)}
    lowest = sorted(losses, key=losses.get)[:2]
    validate = Validating.act
    for step, logged, saved in ((6, True, 6), (6, False, 4), (8, False, 8)):

        def failing(self, run, step=step, logged=logged):
            if run.done < step or logged:
                validate(self, run)
            if run.done >= step:
                raise RuntimeError("power is out")

        name = f"run-{step}-{logged}"
        with monkeypatch.context() as patched:
            patched.setattr(Validating, "act", failing)
            with pytest.raises(RuntimeError, match="power is out"):
                train(*flags, folder=name)
        assert checkpoints(runs.folder / name)[-1] == saved
        folder = train(*flags, folder=name)
        assert validations(folder) == validations(whole)
        assert steps_of(folder) == steps_of(whole)
        for run in (whole, folder):
            assert best_of(run) == [{"step": step, "loss": losses[step]} for step in lowest]
            assert checkpoints(run) == sorted({*lowest, 8})
            assert find_step(run / "checkpoints", "best") == lowest[0]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["validation_loss"] == losses[8]
        assert summary["validation_loss_best"] == min(losses.values())
        assert summary["validation_step_best"] == lowest[0]
        events = b"".join(path.read_bytes() for path in (folder / "tensorboard").glob("events*"))
        assert b"validation/loss/5x8x8" in events


def test_held_out_samples_are_not_trained_on_and_another_share_is_refused(runs, train, tmp_path):
    data = tmp_path / "one size"
    Digits(mix=((1, 8, 8, 21),), frames_per_latent=1).write(data)
    flags = ("--data.folder", str(data), "--run.steps", "null", "--run.epochs")
    folder = train(*SHARE, *flags, "1", "--validation.every", "null")
    held_out = int(is_held_out(read_manifest(data), 0.4).sum())
    assert sum(row[3] for row in steps_of(folder)) == 21 - held_out
    (last,) = validations(folder)
    assert last["step"] == len(steps_of(folder))
    assert last["validation/samples"] == held_out
    config = read_config(["--config", str(folder / "config.yaml")])
    assert config.run.epochs == 1
    for share, now in ((("--validation.share", "0.3"), "0.3"), ((), "null")):
        said = runs.refused(*share, *flags, "2")
        assert f"of another validation: share was 0.4 and is now {now}" in said


@pytest.mark.slow
def test_validation_on_other_data_changes_no_step(runs, train, tmp_path):
    Digits(mix=((1, 8, 8, 4), (5, 8, 8, 2)), seed=9, frames_per_latent=1).write(tmp_path / "held")
    plain = train(folder="plain")
    assert "\nvalidation: " not in runs.told
    assert not (plain / "best.json").exists()
    with_folder = train("--validation.folder", str(tmp_path / "held"), *EVERY)
    assert steps_of(with_folder) == steps_of(plain)
    assert {row["validation/samples"] for row in validations(with_folder)} == {6}


def test_a_destroyed_shard_of_the_validation_is_named_before_anything_is_compiled(runs, tmp_path):
    Digits(mix=((1, 8, 8, 4),), frames_per_latent=1).write(tmp_path / "held")
    (shard,) = (tmp_path / "held").glob("*.arrayrecord")
    shard.write_bytes(bytes(shard.stat().st_size))
    refused = runs.here("--validation.folder", str(tmp_path / "held"))
    assert refused.returncode == 2
    assert f"{shard}: this shard is destroyed" in refused.stderr
    assert "compiling" not in refused.stdout


@pytest.mark.slow
def test_more_epochs_continue_a_run(runs, train):
    flags = ("--run.steps", "null", "--optimizer.final_fraction", "1")
    whole = train(*flags, "--run.epochs", "3", folder="whole")
    train(*flags, "--run.epochs", "2")
    folder = train(*flags, "--run.epochs", "3")
    told = runs.told
    assert "changed since the last start: run.epochs 2 → 3" in told
    assert steps_of(folder) == steps_of(whole)
    epochs = [row["epoch"] for row in metrics_of(folder)]
    assert (epochs[0], epochs[-1], epochs) == (0, 2, sorted(epochs))
    assert f"the run {len(epochs):,} (" in told


@pytest.mark.slow
def test_samples_to_leave_out_are_numbered_as_in_the_folder(runs, train, tmp_path, digits_folder):
    held_out = np.flatnonzero(is_held_out(read_manifest(digits_folder), 0.4)).tolist()
    trained = next(number for number in range(21) if number not in held_out)
    listed = tmp_path / "exclude.txt"
    listed.write_text(f"{held_out[0]}\n{trained}\n")
    epoch = ("--run.epochs", "1", "--run.steps", "null", "--validation.every", "null")
    folder = train(*SHARE, *epoch, "--data.exclude", str(listed))
    assert sum(row[3] for row in steps_of(folder)) == 21 - len(held_out) - 1
    assert validations(folder)[0]["validation/samples"] == len(held_out) - 1
    listed.write_text("\n".join(map(str, held_out)))
    said = runs.refused(*SHARE, *epoch, "--data.exclude", str(listed), "--run.folder", "none")
    assert "leaves no sample to validate on with validation.share" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*SHARE, "--validation.folder", "x"), "validation.folder is x and validation.share 0.4"),
        (("--validation.folder", "none"), "validation.folder: none/manifest.parquet: no such"),
        ((*SHARE, "--validation.noise_levels", "[0.5,1.5]"), "noise_levels has 1.5"),
        ((*SHARE, "--validation.noise_levels", "[]"), "noise_levels is empty"),
        ((*SHARE, "--validation.noise_levels", "[0.5,0.5]"), "leave out levels that are given"),
        (("--checkpoint.keep_best", "1"), "checkpoint.keep_best is 1, but nothing is validated"),
        (("--run.epochs", "2"), "run.steps is 8 and run.epochs 2; give one, and null for the"),
        (("--run.epochs", "0", "--run.steps", "null"), "run.epochs is 0"),
        (("--validation.source.name", "store"), "validation.source is given without"),
    ],
)
def test_wrong_settings_are_one_line(runs, flags, words):
    assert words in runs.refused(*flags)
