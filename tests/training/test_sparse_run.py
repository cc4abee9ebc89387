"""Whole runs whose layers switch to sparse attention."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from training_runs import Runs

from alload_jax.cli import main
from alload_jax.models.common.sparse_attention import SparseAttentionConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.state import TrainingSpec, init_state

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


def test_weights_without_predictors_get_new_ones():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    dense = WanConfig(dim=16, ffn_dim=16, num_heads=2, num_layers=2, freq_dim=8)
    predictor = SparseAttentionConfig(selector="predictor", min_tokens=0)
    sparse = dataclasses.replace(dense, sparse_attention=predictor)
    dense_spec, sparse_spec = (
        TrainingSpec(model, FlowMatching(), make_optimizer(OptimizerConfig(), 10), 0.9)
        for model in (dense, sparse)
    )
    released = init_state(dense_spec, mesh, 1).params
    expected = {name: np.asarray(x) for name, x in flatten_dict(released, sep="/").items()}
    found = flatten_dict(init_state(sparse_spec, mesh, 2, released).params, sep="/")
    for name, value in expected.items():
        np.testing.assert_array_equal(found.pop(name), value)
    assert sorted(found) == [
        f"blocks/sparse_attention/selector/{side}/kernel" for side in ("key", "query")
    ]
    assert all(np.asarray(value).any() for value in found.values())


@pytest.mark.slow
def test_a_run_resumed_in_the_middle_of_a_switch_goes_on_as_if_never_stopped(
    tmp_path, digits_folder, capsys
):
    runs = Runs(tmp_path, digits_folder)
    flags = [f"--model.sparse_attention.{name}={value}" for name, value in SPARSE.items()]
    assert runs.run(*flags).returncode == 0
    rows, folder = runs.metrics(), tmp_path / "run"
    layers = (folder / "layers.jsonl").read_text()
    recorded = [json.loads(line) for line in layers.splitlines()]
    assert [row["step"] for row in recorded] == [10, 14]
    assert recorded[0]["sparse"] == [True]
    assert recorded[0]["density"] == [[1.0, 1.0]]  # one block a sample: nothing is sparse
    assert [row["attention_sparse_layers"] for row in rows] == [0.0] * 6 + [1.0] * 8
    assert all(row["attention_predictor_loss"] >= 0 for row in rows)
    shutil.rmtree(folder / "checkpoints" / "14")
    (folder / "summary.json").unlink()
    again = runs.run(*flags)
    assert again.returncode == 0, again.stderr
    assert "weights: checkpoint of step 10" in again.stdout
    for one, other in zip(runs.metrics(), rows, strict=True):
        for name in ("loss", "grad_norm", "attention_density", "attention_recall"):
            assert one[name] == other[name]
    assert (folder / "layers.jsonl").read_text() == layers
    assert main(["report", "sparsity", str(folder)]) == 0
    assert "step 14: 1 of 1 layers are sparse" in capsys.readouterr().out
    assert (folder / "sparsity.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_next_epoch_is_planned_for_layers_that_have_switched(tmp_path, digits_folder):
    runs = Runs(tmp_path, digits_folder)
    flags = [f"--model.sparse_attention.{name}={value}" for name, value in SPARSE.items()]
    flags += ["--planning.policy", "sorted", "--planning.recalibrate", "epoch"]
    finished = runs.run(*flags)
    assert finished.returncode == 0, finished.stderr
    rows, checkpoints = runs.metrics(), tmp_path / "run" / "checkpoints"
    switched = next(row["epoch"] for row in rows if row["attention_sparse_layers"])
    path = checkpoints / "14" / "recalibration" / "metadata"
    [[epoch, model]] = json.loads(path.read_text())["models"]
    assert switched < epoch <= rows[-1]["epoch"]
    assert (model["layers"]["share"], model["layers"]["density"]) == (1.0, 1.0)
    assert [len(row["cost_terms"]) for row in rows] == [7] * 14
    assert [row["cost_terms"][4] > 0 for row in rows] == [False] * 7 + [True] * 7
    shutil.rmtree(checkpoints / "14")
    (tmp_path / "run" / "summary.json").unlink()
    assert runs.run(*flags).returncode == 0
    for one, other in zip(runs.metrics(), rows, strict=True):
        for name in ("loss", "samples", "predicted_cost", "cost_terms"):
            assert one[name] == other[name]
    assert json.loads(path.read_text())["models"] == [[epoch, model]]
