"""Counts false alarms of the divergence warnings over healthy runs of the examples.

    python benchmarks/healthy_runs.py --runs 200

Each run draws an example, a policy, a bound on tokens, a learning rate and a seed, and trains for
120 steps; `optimizer.gradient_mean` changes every 25 runs. An alarm is a line of
`training/divergence.py` in its output, of a level or of a single loss, or a status other than 0.
Runs are added to those in the JSON; a number of a run always draws the same settings.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from alload_jax.bench.harness import Record, benchmark_parser

ROOT = Path(__file__).parents[1]
BUCKETED = ("sorted", "dual_constraint", "equal_tokens")
PACKED = ("balanced", "first_fit")
TOKENS: dict[str, tuple[int, ...]] = {
    "digits": (176, 320),
    "digits_mmdit": (176, 320),
    "digits_sparse": (1088, 2176),
}
WEIGHTS = (4, 4, 1)
"""How often each is drawn: a run of the sparse one takes as long as five others."""
RATES = (0.3, 1.0, 1.7)
"""Factors of an example's learning rate."""
MEANS = ("plan", "step")
STEPS = 120
ALARMS = ("training may diverge", "training diverges", "bad_step.json")


def main() -> None:
    """Runs what is missing of the number, and writes the JSON after each."""
    parser = benchmark_parser(__doc__, ROOT / "benchmarks" / "results" / "healthy_runs_cpu.json")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    record = Record(options.out, ("jax", "jaxlib", "flax", "optax"), device="CPU", runs=known)
    missing = range(len(known), options.runs)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as workers:
        for run in workers.map(partial(trained, folder=Path(folder)), missing):
            record.content["alarms"] = sum(len(each["alarms"]) for each in [*known, run])
            record.add(run, to="runs")
            print(len(known), run, flush=True)


def drawn(number: int) -> dict[str, Any]:
    """The settings of a run by its number."""
    rng = random.Random(number)
    example = rng.choices(list(TOKENS), WEIGHTS)[0]
    return {
        "example": example,
        "policy": rng.choice(BUCKETED if example == "digits_sparse" else BUCKETED + PACKED),
        "m_mem": rng.choice(TOKENS[example]),
        "rate": rng.choice(RATES),
        "gradient_mean": MEANS[number // 25 % 2],
        "seed": 1000 + number,
    }


def trained(number: int, folder: Path) -> dict[str, Any]:
    """Trains; returns settings and lines that are alarms, the last ones of a run that failed."""
    settings = drawn(number)
    config = yaml.safe_load((ROOT / "configs" / f"{settings['example']}.yaml").read_text())
    config["run"] |= {
        "folder": str(folder / f"run-{settings['seed']}"),
        "steps": STEPS,
        "seed": settings["seed"],
    }
    config["planning"] |= {"policy": settings["policy"], "m_mem": settings["m_mem"]}
    config["optimizer"]["learning_rate"] *= settings["rate"]
    config["optimizer"]["gradient_mean"] = settings["gradient_mean"]
    config["sampling"] = {"prompts": []}
    config |= {"evaluators": [], "validation": {"every": STEPS + 1}}
    file = folder / f"config-{settings['seed']}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    shutil.rmtree(config["run"]["folder"], ignore_errors=True)
    lines = (done.stdout + done.stderr).splitlines()
    alarms = [line for line in lines if any(alarm in line for alarm in ALARMS)]
    failed = lines[-3:] if done.returncode else []
    return {**settings, "jax_version": version("jax"), "alarms": alarms or failed}


if __name__ == "__main__":
    main()
