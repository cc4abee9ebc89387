"""Compares sums of gradients over micro-batches in float32 and in bfloat16 on the digits.

    python benchmarks/accumulate_dtype.py

Trains benchmarks/digits_study.yaml with several micro-batches per step under both settings of
`optimizer.accumulate_dtype`, with the same seeds, samples and noise. Then compares the gradient of
one step at the last weights. Writes benchmarks/results/accumulate_dtype_{device}.json and prints a
table. Finished runs in the folder of `--runs` are not repeated.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from digits_model import RESULTS, ROOT, digits_config, plan_of, step_gradient, train, weights_of_run

from alload_jax.bench.harness import Record, markdown
from alload_jax.config import Config
from alload_jax.errors import run_command
from alload_jax.files import Json

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
    sizes = {"micro_batches_per_step": options.micro_batches, "m_mem": options.m_mem}
    out = RESULTS / f"accumulate_dtype_{options.device}.json"
    packages = ("jax", "jaxlib", "optax", "numpy")
    Record(out, packages, **sizes, steps=options.steps, seeds=rows).write()
    print(table(rows))
    return 0


def compare(runs: Path, seed: int, flags: list[str]) -> Json:
    """Last losses of both dtypes, and the error of a gradient at the last weights of float32."""
    flags = ["--run.seed", str(seed), *flags]
    losses = {dtype: last_loss(runs / f"{dtype}_{seed}", dtype, flags) for dtype in DTYPES}
    config = digits_config(*flags)
    exact, rounded = (gradient(config, runs / f"float32_{seed}", dtype) for dtype in DTYPES)
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    return {"seed": seed, "last_loss": losses, "gradient_error": float(error)}


def last_loss(folder: Path, dtype: str, flags: list[str]) -> float:
    """Trains, unless the run is finished, and returns the mean loss of its last steps."""
    train(folder, "--optimizer.accumulate_dtype", dtype, *flags)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(row["loss"] for row in rows[-round(LAST * len(rows)) :])


def gradient(config: Config, folder: Path, dtype: Any) -> np.ndarray:
    """The mean gradient of the first step's samples at a run's last weights, flat float64."""
    optimizer = dataclasses.replace(config.optimizer, accumulate_dtype=dtype)
    config = dataclasses.replace(config, optimizer=optimizer)
    weights = weights_of_run(config, folder, "raw")
    grads = step_gradient(config, plan_of(config), weights, 0, config.run.seed)
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(grads)])


def table(rows: list[Json]) -> str:
    """A Markdown table of the seeds."""
    lines = [
        [
            *(row["seed"], *(f"{row['last_loss'][dtype]:.4f}" for dtype in DTYPES)),
            f"{row['gradient_error']:.2%}",
        ]
        for row in rows
    ]
    return markdown(("seed", "loss, float32", "loss, bfloat16", "error of a gradient"), lines)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
