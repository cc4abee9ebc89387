"""A run of train.py whose shape groups draw their own buckets."""

import shutil

import pytest


def computed(row):
    return [row[name] for name in ("step", "loss", "grad_norm", "samples", "tokens", "imbalance")]


@pytest.mark.slow
def test_independent_ranks_train_and_resume_bit_for_bit(runs):
    flags = ["--planning.ranks_mode", "independent", "--mesh.fsdp", "2", "--run.steps", "5"]
    flags += ["--planning.micro_batches_per_step", "1", "--checkpoint.every", "3"]
    flags += ["--sampling.grids", "[]"]
    finished = runs.run(*flags, devices=4)
    assert finished.returncode == 0, finished.stderr
    assert "compiling 3/3" in finished.stdout
    rows = runs.metrics()
    epoch = [row for row in rows if row["epoch"] == 0]
    assert len(epoch) < 5
    assert sum(row["samples"] for row in epoch) == 21
    assert max(row["imbalance"] for row in rows) > 0
    shutil.rmtree(runs.folder / "run" / "checkpoints" / "5")
    (runs.folder / "run" / "summary.json").unlink()
    again = runs.run(*flags, devices=4)
    assert again.returncode == 0, again.stderr
    assert "weights: checkpoint of step 3" in again.stdout
    assert [computed(row) for row in runs.metrics()] == [computed(row) for row in rows]
