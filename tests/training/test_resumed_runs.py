"""Runs that are killed, stopped or cut short, and continued: they are the run never stopped."""

import json
import re
import shutil
import signal
import sys

import numpy as np
import pyarrow as pa
import pytest
import yaml
from layouts import write_samples
from patience import PATIENCE, alive, wait_until
from training_runs import Runs, computed, descendants, forget_last, lines_of, metrics_of

from alload_jax.cli import main
from alload_jax.config import read_config
from alload_jax.data.manifest import NUMBER, read_manifest, read_rows
from alload_jax.data.selection import is_held_out
from alload_jax.data.store import StoreReader, StoreWriter, finish_store
from alload_jax.planning.cost import CostFile, QuadraticCost, write_cost_file
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import step_metrics

pytestmark = pytest.mark.slow


def test_a_signal_saves_and_the_run_continues_bit_for_bit(runs, default_signals):
    # A cosine that ends where it starts: the learning rate does not depend on the run's length.
    constant, folder = ("--optimizer.final_fraction", "1.0"), runs.folder / "run"
    status = ("--run.status_when_stopped", "75")
    process = runs.start("--run.steps", "4000", *status, *constant)
    wait_until(lambda: lines_of(folder / "metrics.jsonl") >= 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, err
    assert "SIGTERM: saved step" in out
    assert f"--config {folder}/config.yaml" in out
    stopped = len(runs.metrics())
    assert (folder / "checkpoints" / str(stopped)).exists()
    steps = str(max(stopped + 4, 14))
    runs.finish("--config", str(folder / "config.yaml"), "--run.steps", steps)
    assert [row["step"] for row in runs.metrics()] == list(range(1, int(steps) + 1))
    runs.finish("--run.folder", "whole", "--run.steps", steps, *constant)
    assert computed(folder) == computed(runs.folder / "whole")


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
    runs.finish()
    assert computed(runs.folder / "run") == computed(unbroken[0].folder / "run")
    starts = json.loads((runs.folder / "run" / "environment.json").read_text())
    assert 0 < starts[1]["step"] < 14


def test_a_recalibrated_run_continues_by_the_models_of_its_checkpoint(runs):
    costs = runs.folder / "costs.json"
    write_cost_file(costs, CostFile(quadratic=QuadraticCost(0.01, 1e-4, 1e-6, 1e-3)))
    flags = ["--planning.policy", "balanced", "--planning.recalibrate", "epoch"]
    flags += ["--planning.cost_model", str(costs), "--planning.micro_batches_per_step", "1"]
    flags += ["--run.steps", "60", "--checkpoint.every", "33", "--checkpoint.keep", "9"]
    runs.finish(*flags)
    before = models_of(runs, 33)
    forget_last(runs.folder / "run", 60)
    said = runs.refused(*flags[:2], *flags[4:])
    assert "another planning: recalibrate was 'epoch' and is now null" in said
    runs.finish(*flags)
    after = models_of(runs, 60)
    assert after[: len(before)] == before != []
    assert len(after) > len(before)
    saved = read_config(["--config", str(runs.folder / "run" / "config.yaml")])
    samples = read_manifest(runs.data).samples(saved.model.patch_size)
    plan = make_plan(saved.planning, samples, 1, saved.run.seed)
    for epoch, fields in after:
        plan = plan.recalibrated(epoch, QuadraticCost(**fields))
    for row in runs.metrics():
        expected = step_metrics(plan.step(row["step"] - 1), plan, QuadraticCost(1, 1, 1))
        assert (row["samples"], row["tokens"]) == (expected.samples, expected.tokens)


def models_of(runs, step):
    place = runs.folder / "run" / "checkpoints" / str(step) / "recalibration" / "metadata"
    return json.loads(place.read_text())["models"]


# ---------------------------------------------------------------- optimizers

SHARDED = (
    *("--model.dim", "64", "--model.ffn_dim", "64", "--model.num_heads", "4"),
    *("--mesh.fsdp", "2"),
)
"""Matrices large enough for moments in eight bits."""
GROUPS = [
    {"parameters": ["self_attention"], "name": "adamw8bit"},
    {"parameters": ["feed_forward"], "name": "adafactor"},
    {"parameters": ["head"], "name": "adamw", "learning_rate": 0.001},
]
OPTIMIZERS = (
    *("--optimizer.name", "muon", "--optimizer.groups", json.dumps(GROUPS)),
    *("--optimizer.skip_above", "50", "--optimizer.accumulate_dtype", "bfloat16"),
    *("--optimizer.schedule", "wsd", "--optimizer.decay_steps", "5"),
)


def test_a_lost_run_with_all_optimizers_continues_bit_for_bit(runs):
    flags = (*SHARDED, *OPTIMIZERS, "--checkpoint.every", "6")
    runs.finish(*flags, devices=2)
    rows, expected = runs.metrics(), computed(runs.folder / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]
    forget_last(runs.folder / "run", 14)
    runs.finish(*flags, devices=2)
    assert computed(runs.folder / "run") == expected
    said = runs.refused(*SHARDED, "--run.steps", "15", devices=2)
    assert "another optimizer: " in said
    assert "was null" not in said


# ---------------------------------------------------------------- sources, groups, sparse layers


@pytest.fixture
def weighted(tmp_path):
    """Runs on weighted sources whose samples have several texts."""

    def sample(rng, n):
        first, *others = (np.array([(n + more) % 10], np.int32) for more in range(3))
        path = f"{'rare' if n < 8 else 'usual'}/{n}.mp4"
        size = ((1, 8, 8), (5, 8, 8), (1, 8, 16))[n % 3]
        return size, first, {"alternatives": [(one, None) for one in others], "path": path}

    write_samples(tmp_path / "store", 24, sample, channels=1)
    runs = Runs(tmp_path, tmp_path / "store")
    config = runs.tiny()
    config["data"]["weights"] = [{"path": "rare", "weight": 2.5}, {"path": "usual", "weight": 0.6}]
    config["run"]["steps"] = 20
    del config["sampling"]
    runs.config.write_text(yaml.safe_dump(config))
    return runs


NOISE = ("--callbacks", "[{name: gradient_noise, every: 2, steps: 2}]")
"""What measures and changes nothing."""


def test_a_lost_run_of_weighted_sources_continues_bit_for_bit(weighted):
    flags = ("--planning.policy", "balanced", "--planning.micro_batches_per_step", "1")
    whole = weighted.finish(*flags)
    assert "24 samples, " in whole.stdout
    assert "an epoch by data.weights" in whole.stdout
    assert weighted.metrics()[-1]["epoch"] >= 2
    folder, expected = weighted.folder / "run", computed(weighted.folder / "run")
    forget_last(folder, 20)
    said = weighted.refused(*flags, "--data.weights", "[{path: rare, weight: 2}]")
    assert "another mixture: data.weights was [{'path': 'rare', 'weight': 2.5}" in said
    said = weighted.finish(*flags, "--data.loader.processes", "1", *NOISE).stdout
    assert re.search(r"gradient noise scale at step 1[68]: (\S+ samples|unknown)", said)
    assert computed(folder) == expected


def test_independent_ranks_train_and_resume_bit_for_bit(runs):
    flags = ["--planning.ranks_mode", "independent", "--run.steps", "9"]
    flags += ["--planning.micro_batches_per_step", "1", "--checkpoint.every", "5"]
    flags += ["--sampling.grids", "[]"]
    assert "compiling 3/3" in runs.finish(*flags, devices=2).stdout
    folder, rows = runs.folder / "run", runs.metrics()
    expected = computed(folder)
    epoch = [row for row in rows if row["epoch"] == 0]
    assert len(epoch) < 9
    assert sum(row["samples"] for row in epoch) == 21
    assert max(row["imbalance"] for row in rows) > 0
    forget_last(folder, 9)
    again = runs.finish(*flags, *NOISE, devices=2)
    assert "weights: checkpoint of step 5" in again.stdout
    assert "gradient noise scale at step 8: " in again.stdout
    assert computed(folder) == expected


SPARSE = {
    "selector": "predictor",
    "min_tokens": 0,
    "profile_every": 1,
    "profile_blocks": 1,
    "dense_steps": 7,
    "min_sparsity": 0.0,
    "min_recall": 0.0,
    "max_density": 1.0,
    "anneal_steps": 20,
}
SWITCHING = [f"--model.sparse_attention.{name}={value}" for name, value in SPARSE.items()]


def test_a_run_resumed_in_the_middle_of_a_switch_goes_on_as_if_never_stopped(runs, capsys):
    """And the next epoch is planned for layers that have switched."""
    flags = [*SWITCHING, "--planning.policy", "sorted", "--planning.recalibrate", "epoch"]
    runs.finish(*flags)
    rows, folder = runs.metrics(), runs.folder / "run"
    layers = (folder / "layers.jsonl").read_text()
    recorded = [json.loads(line) for line in layers.splitlines()]
    assert [row["step"] for row in recorded] == [10, 14]
    assert recorded[0]["sparse"] == [True]
    assert recorded[0]["density"] == [[1.0, 1.0]]  # one block a sample: nothing is sparse
    assert [row["attention_sparse_layers"] for row in rows] == [0.0] * 6 + [1.0] * 8
    assert all(row["attention_predictor_loss"] >= 0 for row in rows)
    switched = next(row["epoch"] for row in rows if row["attention_sparse_layers"])
    [[epoch, model]] = models_of(runs, 14)
    assert switched < epoch <= rows[-1]["epoch"]
    assert (model["layers"]["share"], model["layers"]["density"]) == (1.0, 1.0)
    assert [len(row["cost_terms"]) for row in rows] == [7] * 14
    assert [row["cost_terms"][4] > 0 for row in rows] == [False] * 7 + [True] * 7
    forget_last(folder, 14)
    again = runs.finish(*flags)
    assert "weights: checkpoint of step 10" in again.stdout
    names = ("loss", "grad_norm", "attention_density", "attention_recall")
    names += ("samples", "predicted_cost", "cost_terms")
    for one, other in zip(runs.metrics(), rows, strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]
    assert (folder / "layers.jsonl").read_text() == layers
    assert models_of(runs, 14) == [[epoch, model]]
    assert main(["report", "sparsity", str(folder)]) == 0
    assert "step 14: 1 of 1 layers are sparse" in capsys.readouterr().out
    assert (folder / "sparsity.png").stat().st_size > 10_000


# ---------------------------------------------------------------- processes that are left


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_run_leaves_no_process_behind(runs):
    run = runs.start("--run.steps", "1000000", "--data.loader.processes", "2")
    wait_until((runs.folder / "run" / "checkpoints" / "5").exists, run)
    left = descendants(run.pid)
    assert len(left) >= 2
    run.kill()
    run.communicate()
    wait_until(lambda: not any(map(alive, left)))


# ---------------------------------------------------------------- data that change


def test_a_run_goes_on_with_samples_that_join_and_without_those_that_leave(runs):
    data, run = runs.folder / "data", runs.folder / "run"
    shutil.copytree(runs.data, data)
    flags = ("--data.folder", str(data), "--planning.policy", "balanced")
    flags += ("--validation.share", "0.2", "--optimizer.final_fraction", "1.0")
    flags += ("--planning.micro_batches_per_step", "1")
    runs.finish(*flags, "--run.steps", "2")
    count, reader = len(read_rows(data)), StoreReader(read_manifest(data))
    with StoreWriter(data, vae_stride=(1, 1, 1), mode="append") as writer:
        for number in (0, 1, 2):
            sample, size = reader.read(number), tuple(reader.manifest.shape[number].tolist())
            writer.add(-sample["latents"], sample["labels"], size)
    rows = read_rows(data).append_column(NUMBER, pa.array(range(count + 3)))
    stay = ~np.isin(range(count + 3), (3, 7, 11))
    finish_store(data, rows=rows.filter(pa.array(stay)), next_number=count + 3)
    shutil.copytree(run, runs.folder / "again")
    told = runs.finish(*flags, "--run.steps", "3", "--run.folder", "again").stdout
    (line,) = (each for each in told.splitlines() if "the data folder has changed" in each)
    assert line.startswith("the data folder has changed since step 2: ")
    assert " joined, " in line
    flags += ("--run.steps", "24")
    assert "the data folder" not in runs.finish(*flags, "--run.folder", "again").stdout
    runs.finish(*flags)
    assert max(row.get("epoch", 0) for row in metrics_of(run)) > 0
    assert computed(run) == computed(runs.folder / "again")
    # The first epoch has each sample of the training side once: those that stayed, and the new.
    first = [row["samples"] for row in metrics_of(run) if row.get("epoch") == 0 and "loss" in row]
    sides = is_held_out(read_manifest(data), 0.2)
    before = is_held_out(reader.manifest, 0.2)
    gone = sum(not held for held in before[[3, 7, 11]])
    assert (~sides).sum() <= sum(first) <= (~sides).sum() + gone
