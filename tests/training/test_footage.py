"""Real footage: prepared, trained on and drawn, as `benchmarks/footage.py` does it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from alload_jax.data.manifest import read_manifest

ROOT = Path(__file__).parents[2]
ONE_DEVICE_AT_SPEED = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}


@pytest.mark.slow
def test_samples_take_the_colours_of_the_footage_that_their_caption_names(tmp_path):
    """Where things are in a picture is learnt in more steps than these."""
    script = [sys.executable, "benchmarks/footage.py", "--folder", str(tmp_path / "footage")]
    flags = ["--run.steps", "400", "--run.compilation_cache", str(tmp_path / "compiled")]
    done = subprocess.run(
        [*script, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | ONE_DEVICE_AT_SPEED,
    )
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "footage/store")
    assert manifest.shape.tolist().count([1, 32, 48]) == 2  # the pictures
    assert len(manifest) > 50
    assert manifest.fps == 5
    drawn = json.loads((tmp_path / "footage/footage.json").read_text())
    assert len(drawn) == 5
    green = {name: found["colour"][1] - found["colour"][0] for name, found in drawn.items()}
    assert green["rabbit"] > green["street"] + 0.04  # on a meadow
    light = {name: sum(found["colour"]) / 3 for name, found in drawn.items()}
    assert light["palace"] > light["flower"] + 0.1  # before the sky, and before dark leaves
    with Image.open(tmp_path / "footage/footage.gif") as picture:
        assert picture.n_frames == 5
    log = (tmp_path / "footage/run/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, log) if "loss" in row]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
