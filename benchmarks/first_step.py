"""Measures the time to the first step: starts of `train.py` under several policies.

    python benchmarks/first_step.py --out benchmarks/results/first_step_h100_x2.json

The data are of the workload mixed-resolution, random and written by the program; the seconds to the
end of the first step are read from the summary of each run. `--tiny` is for trying the program on a
CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import yaml

from alload_jax.bench.harness import Record, benchmark_parser, model_fields, training_fields
from alload_jax.data.store import StoreWriter
from alload_jax.files import Json
from alload_jax.planning.workloads import make_workload

ROOT = Path(__file__).parents[1]
RUNS = {
    "balanced": {"policy": "balanced"},
    "sorted, independent": {"policy": "sorted", "ranks_mode": "independent"},
    "dual_constraint, synchronous": {"policy": "dual_constraint", "ranks_mode": "synchronous"},
}
"""Settings of the planning section of each start."""


def main() -> None:
    """Measures, prints a line for each start, and writes JSON after each."""
    parser = benchmark_parser(__doc__, "first_step.json")
    add = parser.add_argument
    add("--layers", type=int, default=5)
    add("--m-mem", type=int, default=78_458)
    add("--samples", type=int, default=400)
    add("--runs", nargs="*", choices=tuple(RUNS), default=tuple(RUNS))
    add("--tiny", action="store_true")
    options = parser.parse_args()
    packages = ("jax", "jaxlib", "flax", "numpy")
    record = Record(options.out, packages, cores=os.cpu_count(), runs={})
    model = training_fields(model_fields("tiny" if options.tiny else "1.3b", options.layers))
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "data", options.samples, options.tiny)
        for name in options.runs:
            planning = {"m_mem": options.m_mem, **RUNS[name]}
            found = start(Path(folder), name, {"planning": planning, "model": model})
            record.content["runs"][name] = found
            record.write()
            print(name, found, flush=True)


def write_data(folder: Path, count: int, tiny: bool) -> None:
    """Random latents of the workload mixed-resolution, as train.py reads them."""
    rng = np.random.default_rng(0)
    text = np.zeros((8, 4096), ml_dtypes.bfloat16)
    with StoreWriter(folder, vae_stride=(4, 8, 8)) as writer:
        for frames, height, width in make_workload("mixed-resolution", count).shape.tolist():
            if tiny:
                frames, height, width = min(frames, 17), height // 128 * 16, width // 128 * 16
            size = ((frames - 1) // 4 + 1, height // 8, width // 8, 16)
            writer.add(rng.normal(size=size).astype(np.float32), text, (frames, height, width))


def start(folder: Path, name: str, sections: Json) -> Json:
    """Starts train.py for two steps; what its summary says, or its last lines if it failed."""
    run = folder / name.replace(", ", "-")
    config = sections | {
        "run": {"folder": str(run), "steps": 2},
        "data": {"folder": str(folder / "data")},
        "sampling": {"prompts": []},
    }
    file = folder / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stdout + done.stderr).splitlines()[-20:]}
    summary = json.loads((run / "summary.json").read_text())
    return {key: summary[key] for key in ("first_step_seconds", "programs", "compile_seconds")}


if __name__ == "__main__":
    main()
