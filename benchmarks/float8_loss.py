"""Compares held-out losses of training with products in float8 and in bfloat16, in pairs of seeds.

    python benchmarks/float8_loss.py --out benchmarks/results/float8_loss_h200.json

The model has the digits' inputs and 100 million parameters. All runs share the device. Runs of a
seed have the same weights at first, batches and noise, also in validation. A control says what
chance does: bfloat16 again, with a learning rate that is 0.01 % larger.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.data.datasets.digits import Digits
from alload_jax.errors import InputError, run_command
from alload_jax.training.run_files import is_validation, read_metrics

ROOT = Path(__file__).parents[1]
MIX = ((17, 16, 16, 3000), (17, 16, 32, 3000))
"""Frames, height, width and number of clips, of 80 and 160 tokens."""
FLAGS = """--config configs/digits.yaml --planning.m_mem 8192 --planning.policy balanced
--model.dim 1024 --model.ffn_dim 4096 --model.num_heads 16 --model.num_layers 8
--model.dtype bfloat16 --model.remat attention --optimizer.name adamw --model.patch_size [1,4,4]
--model.prediction velocity --model.position_embedding false --objective.timesteps.std 1
--sampling.grids [] --evaluators [] --trackers [] --checkpoint.every null --data.dataset null
--run.compilation_cache null --validation.share 0.1 --validation.max_samples null"""
ARMS = {"bfloat16": ("dtype", 3e-4), "float8": ("float8", 3e-4), "control": ("dtype", 3.0003e-4)}
"""Arithmetic of the products and learning rate, by name."""


def started(place: Path, arm: str, seed: int, flags: list[str]) -> subprocess.Popen[bytes]:
    """A run in a folder of its own, and what it says beside it."""
    name, (matmul, rate) = f"{arm}_{seed}", ARMS[arm]
    words = [*FLAGS.split(), "--model.matmul", matmul, "--optimizer.learning_rate", str(rate)]
    words += ["--run.seed", str(seed), *flags]
    words += ["--data.folder", str(place / "data"), "--run.folder", str(place / name)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "train.py"), *words]
    with (place / f"{name}.txt").open("w") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, env=variables)


def main(argv: list[str]) -> int:
    """Trains all runs at once and writes the JSON."""
    parser = benchmark_parser(__doc__, "float8_loss.json")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, flags = parser.parse_known_args(argv)  # others are flags of train.py
    flags += ["--run.steps", str(options.steps), "--validation.every", str(options.steps)]
    record = Record(options.out, ("jax", "jaxlib", "flax"), steps=options.steps, cases=[])
    with tempfile.TemporaryDirectory() as folder:
        place, losses = Path(folder), dict[tuple[str, int], float]()
        Digits(mix=MIX).write(place / "data")
        pairs = list(itertools.product(ARMS, options.seeds))
        runs = {pair: started(place, *pair, flags) for pair in pairs}
        try:
            for (arm, seed), process in runs.items():
                name = f"{arm}_{seed}"
                if process.wait():
                    raise InputError(f"{name}: {(place / f'{name}.txt').read_text()[-500:]}")
                rows = read_metrics(place / name / "metrics.jsonl")
                (*_, last) = filter(is_validation, rows)
                losses[arm, seed] = last["validation/loss"]
                record.add({"arm": arm, "seed": seed, "held_out_loss": losses[arm, seed]})
        finally:
            for process in runs.values():
                process.kill()
    ratios = {
        arm: [losses[arm, seed] / losses["bfloat16", seed] for seed in options.seeds]
        for arm in ("float8", "control")
    }
    record.content["ratios"] = ratios
    record.write()
    print(losses, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
