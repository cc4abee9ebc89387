"""Runs on weighted sources whose samples have several texts, by command."""

import math

import numpy as np
import pytest
import yaml
from patience import PATIENCE, wait_until
from training_runs import Runs

from alload_jax.data.store import StoreWriter

SIZES = ((1, 8, 8), (5, 8, 8), (1, 8, 16))


@pytest.fixture
def runs(tmp_path):
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1)) as writer:
        for number in range(24):
            size = SIZES[number % 3]
            latents = rng.normal(size=(*size, 1)).astype(np.float32)
            labels = [np.array([(number + more) % 10], np.int32) for more in range(3)]
            others = [(one, None) for one in labels[1:]]
            path = f"{'rare' if number < 8 else 'usual'}/{number}.mp4"
            writer.add(latents, labels[0], size, alternatives=others, path=path)
    runs = Runs(tmp_path, tmp_path / "store")
    config = runs.tiny()
    config["data"]["weights"] = [{"path": "rare", "weight": 2.5}, {"path": "usual", "weight": 0.6}]
    config["run"]["steps"] = 20
    del config["sampling"]
    runs.config.write_text(yaml.safe_dump(config))
    return runs


def computed(rows):
    names = ("step", "epoch", "loss", "grad_norm", "samples", "tokens")
    return [[row[name] for name in names] for row in rows]


POLICIES = {
    "bucketed": ("--planning.policy", "dual_constraint"),
    "packed": ("--planning.policy", "balanced", "--planning.micro_batches_per_step", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_run_of_weighted_sources_continues_bit_for_bit(runs, policy):
    flags = POLICIES[policy]
    whole = runs.run(*flags, "--run.folder", str(runs.folder / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert "24 samples, " in whole.stdout
    assert "an epoch by data.weights" in whole.stdout
    expected = computed(runs.metrics("whole"))
    assert expected[-1][1] >= 2
    process = runs.start(*flags)
    checkpoints = runs.folder / "run" / "checkpoints"
    wait_until(lambda: (checkpoints / "5").exists(), process)
    process.kill()
    process.communicate()
    other = runs.run(*flags, "--data.weights", "[{path: rare, weight: 2}]")
    assert other.returncode == 2
    assert "another mixture: data.weights was [{'path': 'rare', 'weight': 2.5}" in other.stderr
    finished = runs.run(*flags, "--data.loader.processes", "1")
    assert finished.returncode == 0, finished.stderr
    assert computed(runs.metrics()) == expected


@pytest.mark.slow
def test_processes_take_the_texts_and_repetitions_of_one(runs):
    flags = ("--planning.ranks", "2", "--run.steps", "8")
    alone = runs.run(*flags, "--run.folder", str(runs.folder / "alone"))
    assert alone.returncode == 0, alone.stderr
    processes = runs.start_together(2, *flags)
    ended = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    losses = [[row["loss"] for row in runs.metrics(name)] for name in ("alone", "run")]
    assert len(losses[0]) == 8
    assert all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(*losses, strict=True))
