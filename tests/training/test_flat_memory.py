"""Memory, descriptors and threads of a run stay flat."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_does_not_grow_with_its_steps_and_hardly_with_its_checkpoints(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "flat_memory.py")]
    result = tmp_path / "flat.json"
    subprocess.run(
        [*command, "--steps", "1000", "--out", str(result)],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = json.loads(result.read_text())
    runs = found["runs"]
    # A line of metrics alone is about 1,500 bytes as Python's objects.
    assert runs["no checkpoints"]["bytes_per_step"] < 500
    # Orbax asks TensorStore for its metrics, which are never freed; allocators also take time.
    per_save = runs["checkpoints"]["bytes_per_step"] * found["saved_every"]
    assert per_save < 400_000
    for each in runs.values():
        assert each["descriptors"] <= 2
        assert each["threads"] <= 2
