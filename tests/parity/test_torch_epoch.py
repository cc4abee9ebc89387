"""benchmarks/torch_epoch.py in two processes on a CPU: it trains what the plan says."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from alload_jax.bench.random_data import write_random_store
from alload_jax.config import read_config
from alload_jax.planning.samples import Samples

pytestmark = pytest.mark.parity
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODEL = {"dim": 32, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "in_channels": 4}
CONFIG = {
    "run": {"folder": "unused"},
    "data": {"folder": "unused"},
    "planning": {"m_mem": 64},
    "model": MODEL | {"text": {"dim": 16, "length": 12}},
}
COMMAND = ["--parallel", "ddp", "--compile", "no", "--attention", "default", "--processes", "2"]


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epoch")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    config = read_config(["--config", str(folder / "config.yaml")], "test")
    # Batches of 7, 1 and 4 rows; the last one of the second shape lacks a row.
    counts = {(1, 32, 32): 70, (1, 64, 48): 33, (5, 32, 64): 32}
    shape = np.repeat(np.asarray([*counts]), [*counts.values()], axis=0)
    seq_len = np.repeat([4, 12, 16], [*counts.values()])
    write_random_store(folder / "data", Samples(shape, seq_len), config.model, 8)
    return folder


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_train_each_sample_once_in_batches_of_one_shape(folder, program, parallel):
    out = folder / f"{parallel}.json"
    out.write_text(json.dumps({"cases": [{"case": "ours", "error": "none"}]}))
    words = ["--config", "config.yaml", "--data", "data", "--out", out.name, *COMMAND]
    words[words.index("ddp")] = parallel
    command = [sys.executable, BENCHMARKS / "torch_epoch.py", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert "| ours " in done.stdout
    ours, case = json.loads(out.read_text())["cases"]
    assert ours == {"case": "ours", "error": "none"}
    assert (case["programs"], case["whole_epoch"], case["devices"]) == (3, True, 2)
    batches = batches_of(program("torch_epoch"), folder)
    figures = [batches[index][3] for index in range(len(batches))]
    assert sum(each["samples"] for each in figures) == 135
    assert sum(each["tokens"] for each in figures) == 70 * 4 + 33 * 12 + 32 * 16
    for name in ("samples", "tokens"):
        assert case[name] == sum(each[name] for each in figures)
    # Latents and noise have unit variance: an untrained model's loss is about 2.
    assert 1.5 < case["loss"] < 3


def batches_of(program, folder, rank=0):
    config = read_config(["--config", str(folder / "config.yaml")], "test")
    samples = program.read_manifest(folder / "data").samples((1, 2, 2))
    topology = program.RankTopology(2)
    costs = config.planning.costs()
    policy = program.OneShape.from_config(config.planning, costs)
    plan = program.Plan(samples, policy.fitted(samples, topology), topology, 0)
    return program.Batches(
        rank, plan, str(folder / "data"), (12, 16), config.planning.predictor(costs)
    )


def test_ranks_share_shapes_and_no_sample(folder, program):
    torch_epoch = program("torch_epoch")
    both = [batches_of(torch_epoch, folder, rank) for rank in range(2)]
    for index in range(len(both[0])):
        (clips, texts, rows, figures), (others, _, more, _) = (each[index] for each in both)
        assert clips.shape == others.shape
        assert rows + more == figures["samples"]
        assert len(clips) * figures["tokens"] <= 64 * figures["samples"]
        assert not clips[rows:].any()
        assert not texts[:, 8:].any()
        assert clips[:rows].std() == pytest.approx(1, abs=0.3)


class CountAttention(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.calls += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **kwargs or {})


def test_kept_attention_changes_no_gradient_and_runs_once(program):
    torch_step = program("torch_step")
    fields = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 64}
    found = {}
    for remat in ("none", "full", "attention"):
        settings = torch_step.Settings("wan", fields, 2, (1, 4, 4), remat=remat, compile="no")
        torch.manual_seed(0)
        trainer = torch_step.Trainer(settings, "cpu")
        trainer.rows = 1
        torch.manual_seed(1)
        with CountAttention() as counted:
            trainer.loss_and_gradient()
        found[remat] = [master.grad for master in trainer.weights.masters], counted.calls
    for remat in ("full", "attention"):
        torch.testing.assert_close(found[remat][0], found["none"][0])
    # Self-attention and cross-attention of two blocks.
    assert [found[remat][1] for remat in ("none", "full", "attention")] == [4, 8, 4]
