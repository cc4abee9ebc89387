"""Real footage: prepared, trained on and drawn, as `benchmarks/footage.py` does it for the docs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from alload_jax.data.manifest import read_manifest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_samples_look_like_the_footage_that_their_caption_names(tmp_path):
    """After some steps of training only: most samples are nearest to a clip of their caption."""
    script = [sys.executable, "benchmarks/footage.py", "--folder", str(tmp_path / "footage")]
    flags = ["--run.steps", "150", "--run.compilation_cache", str(tmp_path / "compiled")]
    done = subprocess.run([*script, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "footage/store")
    assert manifest.shape.tolist().count([1, 32, 48]) == 2  # the pictures
    assert len(manifest) > 50
    assert manifest.fps == 5
    found = json.loads((tmp_path / "footage/footage.json").read_text())["nearest"]
    assert len(found) == 5
    assert sum(caption == other for caption, other in found.items()) >= 4, found
    with Image.open(tmp_path / "footage/footage.gif") as picture:
        assert picture.n_frames == 5
    log = (tmp_path / "footage/run/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, log) if "loss" in row]
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
