"""Programs of benchmarks/ and the example of the README do what their pages promise."""

import json
import os
import subprocess
import sys

import pytest
from PIL import Image
from training_runs import ROOT, metrics_of

from alload_jax.data.manifest import read_manifest

ONE_DEVICE_AT_SPEED = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}

pytestmark = pytest.mark.slow


def run(program, *flags, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, program, *flags], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_loss_of_the_digits_falls_within_300_steps(tmp_path):
    """With `gradient_mean: plan` it was 0.65, and pairs of digits were not learnt at all."""
    flags = ["--run.folder", str(tmp_path / "run"), "--data.folder", str(tmp_path / "data")]
    flags += ["--run.steps", "300", "--run.compilation_cache", "null", "--evaluators", "[]"]
    flags += ["--sampling.grids", "[]"]
    run("train.py", "--config", "configs/digits.yaml", *flags, **ONE_DEVICE_AT_SPEED)
    steps = metrics_of(tmp_path / "run")[-100:]
    samples = sum(step["samples"] for step in steps)
    assert sum(step["loss"] * step["samples"] for step in steps) / samples < 0.57


def test_a_run_does_not_grow_with_its_steps_and_hardly_with_its_checkpoints(tmp_path):
    result = tmp_path / "flat.json"
    run("benchmarks/flat_memory.py", "--steps", "1000", "--out", str(result))
    found = json.loads(result.read_text())
    runs = found["runs"]
    # A line of metrics alone is about 1,500 bytes as Python's objects.
    assert runs["no checkpoints"]["bytes_per_step"] < 500
    # Orbax asks TensorStore for its metrics, which are never freed; allocators also take time.
    assert runs["checkpoints"]["bytes_per_step"] * found["saved_every"] < 400_000
    for each in runs.values():
        assert each["descriptors"] <= 2
        assert each["threads"] <= 2


def test_samples_take_the_colours_of_the_footage_that_their_caption_names(tmp_path):
    """Where things are in a picture is learnt in more steps than these."""
    place = tmp_path / "footage"
    flags = ["--run.steps", "400", "--run.compilation_cache", str(tmp_path / "compiled")]
    run("benchmarks/footage.py", "--folder", str(place), *flags, **ONE_DEVICE_AT_SPEED)
    manifest = read_manifest(place / "store")
    assert manifest.shape.tolist().count([1, 32, 48]) == 2  # the pictures
    assert len(manifest) > 50
    assert manifest.fps == 5
    drawn = json.loads((place / "footage.json").read_text())
    assert len(drawn) == 5
    green = {name: found["colour"][1] - found["colour"][0] for name, found in drawn.items()}
    assert green["rabbit"] > green["street"] + 0.04  # on a meadow
    light = {name: sum(found["colour"]) / 3 for name, found in drawn.items()}
    assert light["palace"] > light["flower"] + 0.1  # before the sky, and before dark leaves
    with Image.open(place / "footage.gif") as picture:
        assert picture.n_frames == 5
    losses = [row["loss"] for row in metrics_of(place / "run") if "loss" in row]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
