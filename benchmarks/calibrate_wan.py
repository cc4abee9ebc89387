"""Measures training steps of Wan 2.1's 1.3B on this device and checks M_mem.

    python benchmarks/calibrate_wan.py

Runs `alload calibrate --memory-check`, which takes about eight minutes on an H200. For a quick
trial, add flags such as --config configs/digits.yaml --seconds 60.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEMORY_SHARE = "0.95"
"""Share of the device's memory for JAX, whose default is 0.75."""


def main() -> int:
    """Calibrates and returns the exit status of `alload calibrate`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--config", default=str(ROOT / "configs" / "wan2_1_t2v_1_3b.yaml"))
    add(
        "--seconds",
        default="360",
        help="time for the grid; the other parts take about three minutes more",
    )
    add("--name", default="calibration_wan_1_3b_h200", help="name of the results")
    add("--results", default=str(ROOT / "benchmarks" / "results"), help="folder of the JSON")
    add("--pictures", default=str(ROOT / "docs" / "results" / "planning"), help="folder of the PNG")
    options, more = parser.parse_known_args()
    for folder in (options.results, options.pictures):
        Path(folder).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "alload_jax.cli", "calibrate", "--memory-check"]
    command += ["--config", options.config, "--seconds", options.seconds]
    command += ["--out", str(Path(options.results) / f"{options.name}.json")]
    command += ["--picture", str(Path(options.pictures) / f"{options.name}.png"), *more]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE} | os.environ
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
