"""docs/clusters/ray_train.py: Ray Train starts the processes, and all again after a loss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from patience import PATIENCE, free_port, wait_until

from alload_jax.data.datasets.digits import Digits

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "clusters" / "ray_train.py"


def config_of(folder, name, steps):
    """The path of the config of a tiny model's run."""
    model = {"dim": 8, "ffn_dim": 8, "num_heads": 1, "num_layers": 1, "freq_dim": 8}
    config = {
        "run": {"folder": str(folder / name), "steps": steps},
        "data": {"folder": str(folder / "data")},
        "planning": {"m_mem": 32, "policy": "equal_tokens"},
        "model": model | {"patch_size": [1, 4, 4]},
        "checkpoint": {"every": 40},
        "trackers": [],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def losses(run):
    """Of the steps so far; the last line may be half written."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def test_a_killed_process_is_started_again_with_the_others_and_nothing_changes(tmp_path):
    Digits(mix=((1, 8, 8, 32),), frames_per_latent=1).write(tmp_path / "data")
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    env["RAY_USAGE_STATS_ENABLED"] = "0"
    flags = ["--processes", "2", "--gpus", "0", "--port", str(free_port())]
    command = [sys.executable, SCRIPT, *flags, "--config", config_of(tmp_path, "ray", 200)]
    with (tmp_path / "said").open("w") as said:
        begun = subprocess.Popen(
            command, env=env | {"XLA_FLAGS": ""}, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            wait_until(lambda: len(losses(tmp_path / "ray")) > 60, begun)
            below = psutil.Process(begun.pid).children(recursive=True)
            (second,) = (p for p in below if p.cmdline()[-2:] == ["--cluster.process", "1"])
            second.kill()
            assert begun.wait(PATIENCE) == 0, (tmp_path / "said").read_text()[-3000:]
        finally:
            begun.kill()
    assert "[FailurePolicy] RETRY" in (tmp_path / "said").read_text()
    alone = [sys.executable, ROOT / "train.py", "--config", config_of(tmp_path, "alone", 200)]
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run(alone, env=env | two, check=True, capture_output=True)
    found, expected = (np.array(losses(tmp_path / name)) for name in ("ray", "alone"))
    assert found[:, 0].tolist() == list(range(1, 201))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
