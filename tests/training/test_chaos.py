"""A short campaign of faults; `make chaos` is the long one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_campaign_finds_nothing(tmp_path):
    result, report = tmp_path / "chaos.json", tmp_path / "report.md"
    parts = {"kills": "3", "disks": "0", "flips": "100", "inputs": "12", "steps": "40"}
    places = {"work": tmp_path / "work", "result": result, "report": report}
    flags = [part for name, value in (parts | places).items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert sum(len(series["kills"]) for series in found["series"]) == 3
    flips = [count for part in found["flips"]["flips"].values() for count in part.values()]
    assert sum(flips) == 100
    assert found["inputs"]["given"] == 12
    assert "3 kills of 1 runs" in report.read_text()
