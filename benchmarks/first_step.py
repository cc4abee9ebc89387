"""Measures the time to the first step: programs for one GPU and for all, and starts of `train.py`.

    python benchmarks/first_step.py --out benchmarks/results/first_step_h100_x2.json

First the gradients of micro-batches of several lengths are compiled, for one GPU and then for shape
groups of one GPU each, in a process of its own each. Then `train.py` starts on data of the workload
mixed-resolution, which the program writes, and the seconds to the end of the first step are read
from its summary. `--tiny` is for trying the program on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from alload_jax.bench.harness import Record, benchmark_parser, model_fields, training_fields
from alload_jax.files import Json

ROOT = Path(__file__).parents[1]
RUNS = {
    "balanced": {"policy": "balanced"},
    "sorted, independent": {"policy": "sorted", "ranks_mode": "independent"},
    "dual_constraint, synchronous": {"policy": "dual_constraint", "ranks_mode": "synchronous"},
}
"""Settings of the planning section of each start."""


def main() -> None:
    """Measures, prints a line for each case, and writes JSON after each."""
    parser = benchmark_parser(__doc__, "first_step.json")
    add = parser.add_argument
    add("--programs", type=int, default=15)
    add("--layers", type=int, default=5)
    add("--m-mem", type=int, default=65_536, help="of the compiled micro-batches")
    add("--plan-m-mem", type=int, default=78_458, help="of the runs")
    add("--samples", type=int, default=400)
    add("--runs", nargs="*", choices=tuple(RUNS), default=tuple(RUNS))
    add("--tiny", action="store_true")
    add("--groups", type=int, help="shape groups of one compilation; the program starts itself so")
    options = parser.parse_args()
    if options.groups is not None:
        print(json.dumps(_compile(options)))
        return
    packages = ("jax", "jaxlib", "flax", "numpy")
    record = Record(options.out, packages, cores=os.cpu_count(), compiled=[], runs={})
    for groups in (1, 0):
        found = _in_process([*sys.argv[1:], "--groups", str(groups)])
        record.add(found, to="compiled")
        print(found, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _write_data(Path(folder) / "data", options)
        for name in options.runs:
            record.content["runs"][name] = found = _run(Path(folder), name, options)
            print(name, found, flush=True)
            record.write()


def _in_process(arguments: list[str]) -> Json:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def _model(options: argparse.Namespace) -> Json:
    return training_fields(model_fields("tiny" if options.tiny else "1.3b", options.layers))


def _compile(options: argparse.Namespace) -> Json:
    """Seconds to compile the programs for as many groups; 0 for one on each device."""
    from alload_jax.sharding.host_memory import set_xla_flags

    set_xla_flags()
    import jax

    from alload_jax.models.families import config_from_fields
    from alload_jax.sharding.mesh import MeshConfig, make_mesh, split_mesh
    from alload_jax.training.state import init_state
    from alload_jax.training.trainer import make_trainer
    from alload_jax.training.trial_step import random_batch, training_spec

    model = config_from_fields(_model(options))
    devices = jax.devices()[: options.groups or None]
    mesh = make_mesh(MeshConfig(), devices)
    spec = training_spec(model)
    side = (4, 4) if options.tiny else (60, 104)
    most = max(1, options.m_mem // (side[0] * side[1] // 4))
    frames = np.unique(np.geomspace(1, min(21, most), options.programs).round().astype(int))
    shapes = []
    for number in range(options.programs):
        count = int(frames[number % len(frames)])
        rows = max(1, most // count // (1 + number // len(frames)))
        latents = (rows, count, *side)
        shapes.append(jax.eval_shape(lambda latents=latents: random_batch(model, latents)))
    groups = () if options.groups == 1 else split_mesh(mesh)
    state = init_state(spec, mesh, 0)
    trainer = make_trainer(spec, mesh, state, groups, single=not groups)
    begin, each = time.perf_counter(), []
    for _ in trainer.compile(shapes):
        each.append(time.perf_counter() - begin)
    return {"groups": len(groups) or 1, "programs": len(shapes), "seconds": each[-1], "done": each}


def _write_data(folder: Path, options: argparse.Namespace) -> None:
    """Random latents of the workload mixed-resolution, as train.py reads them."""
    import ml_dtypes

    from alload_jax.data.store import StoreWriter
    from alload_jax.planning.workloads import make_workload

    rng = np.random.default_rng(0)
    text = np.zeros((8, 4096), ml_dtypes.bfloat16)
    samples = make_workload("mixed-resolution", options.samples)
    with StoreWriter(folder, vae_stride=(4, 8, 8)) as writer:
        for frames, height, width in samples.shape.tolist():
            if options.tiny:
                frames, height, width = min(frames, 17), height // 128 * 16, width // 128 * 16
            size = ((frames - 1) // 4 + 1, height // 8, width // 8, 16)
            writer.add(rng.normal(size=size).astype(np.float32), text, (frames, height, width))


def _run(folder: Path, name: str, options: argparse.Namespace) -> Json:
    """Starts train.py for two steps; the seconds of its parts, by the lines that it prints."""
    import yaml

    run = folder / name.replace(", ", "-")
    config = {
        "run": {"folder": str(run), "steps": 2},
        "data": {"folder": str(folder / "data")},
        "planning": {"m_mem": options.plan_m_mem, **RUNS[name]},
        "model": _model(options),
        "sampling": {"prompts": []},
    }
    file = folder / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(config))
    begin = time.perf_counter()
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = [(round(time.perf_counter() - begin, 2), line.strip()) for line in process.stdout]
    if process.wait():
        return {"error": [line for _, line in lines[-20:]]}
    summary = json.loads((run / "summary.json").read_text())
    names = ("first_step_seconds", "programs", "compile_seconds")
    begins = ("data:", "steps:", "memory", "training")
    shown = [each for each in lines if each[1].startswith(begins)]
    return {key: summary[key] for key in names} | {"lines": shown[:8]}


if __name__ == "__main__":
    main()
