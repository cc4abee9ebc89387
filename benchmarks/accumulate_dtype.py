"""Compares sums of gradients over micro-batches in float32 and in bfloat16 on the digits.

    python benchmarks/accumulate_dtype.py

Trains benchmarks/digits_study.yaml with several micro-batches per step under both settings of
`optimizer.accumulate_dtype`, with the same seeds, samples and noise. Then compares the gradient of
one step at the last weights. Writes benchmarks/results/accumulate_dtype_{device}.json and prints a
table. Finished runs in the folder of `--runs` are not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from digits_model import weights_of_run
from digits_policies import CONFIG, ROOT, digits_config, plan_of

from alload_jax.bench.provenance import provenance
from alload_jax.config import Config
from alload_jax.data.collate import Collator
from alload_jax.data.collation import collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError, run_command
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.optimizer import make_optimizer
from alload_jax.training.state import TrainingSpec
from alload_jax.training.step import make_accumulate, zero_accumulator

DTYPES = ("float32", "bfloat16")
LAST = 0.2
"""Share of the steps, at the end, over which losses are averaged."""
FIXED = ("--planning.policy", "dual_constraint", "--sampling.grids", "[]", "--evaluators", "[]")


def main(argv: list[str]) -> int:
    """Trains, compares and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default 60)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--m-mem", type=int, default=320, help="tokens of each (default 320)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "accumulate")
    parser.add_argument("--device", default="cpu", help="name for the JSON (default cpu)")
    options = parser.parse_args(argv)
    flags = ["--planning.micro_batches_per_step", str(options.micro_batches)]
    flags += ["--planning.m_mem", str(options.m_mem), *FIXED]
    rows = [
        compare(options.runs.absolute(), seed, [*flags, "--run.steps", str(options.steps)])
        for seed in options.seeds
    ]
    content = {
        "command": f"python benchmarks/accumulate_dtype.py {' '.join(argv)}".strip(),
        **provenance(("jax", "jaxlib", "optax", "numpy")),
        "micro_batches_per_step": options.micro_batches,
        "m_mem": options.m_mem,
        "steps": options.steps,
        "seeds": rows,
    }
    path = ROOT / "benchmarks" / "results" / f"accumulate_dtype_{options.device}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(table(rows))
    return 0


def compare(runs: Path, seed: int, flags: list[str]) -> dict[str, Any]:
    """Last losses of both dtypes, and the error of a gradient at the last weights of float32."""
    losses = {dtype: last_loss(runs / f"{dtype}_{seed}", seed, dtype, flags) for dtype in DTYPES}
    config = digits_config(seed, flags)
    exact, rounded = (gradient(config, runs / f"float32_{seed}", dtype) for dtype in DTYPES)
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    return {"seed": seed, "last_loss": losses, "gradient_error": float(error)}


def last_loss(folder: Path, seed: int, dtype: str, flags: list[str]) -> float:
    """Trains, unless the run is finished, and returns the mean loss of its last steps."""
    command = [sys.executable, "train.py", "--config", str(CONFIG), "--run.folder", str(folder)]
    command += ["--run.seed", str(seed), "--optimizer.accumulate_dtype", dtype, *flags]
    if not (folder / "summary.json").is_file():
        print(f"{dtype}, seed {seed}", file=sys.stderr, flush=True)
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
            raise InputError(f"{' '.join(command)} failed; run it to see its error")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(row["loss"] for row in rows[-round(LAST * len(rows)) :])


def gradient(config: Config, folder: Path, dtype: str) -> np.ndarray:
    """The mean gradient of the first step's samples at a run's last weights, flat float64."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    optimizer, settings = make_optimizer(config.optimizer, config.run.given_steps), config.optimizer
    spec = TrainingSpec(
        config.model, config.objective, optimizer, settings.ema_decay, config.parameters, dtype
    )
    manifest, plan = read_manifest(config.data.folder), plan_of(config)
    collation = collation_for(plan, manifest, config.model, conditions_for(config.model, manifest))
    batches = Collator(StoreReader(manifest), frozenset({0}), collation)(plan.step(0)).batches
    weights = weights_of_run(config, folder, "raw")
    accumulate = make_accumulate(spec, mesh)
    sums = zero_accumulator(spec, mesh, weights, batches[0])
    key = jax.random.key_data(jax.random.key(config.run.seed))
    for batch in batches:
        sums = accumulate(weights, sums, jax.device_put(batch), key)
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(sums.grads)]
    return np.concatenate(leaves) / float(sums.weight)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the seeds."""
    lines = [
        "| seed | loss, float32 | loss, bfloat16 | error of a gradient |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        float32, bfloat16 = (row["last_loss"][dtype] for dtype in DTYPES)
        error = row["gradient_error"]
        lines.append(f"| {row['seed']} | {float32:.4f} | {bfloat16:.4f} | {error:.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
