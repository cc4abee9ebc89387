"""Compares held-out losses of training with products in float8 and in bfloat16, in pairs of seeds.

    python benchmarks/float8_loss.py --out benchmarks/results/float8_loss_h200.json

The model has the digits' inputs and 100 million parameters. All runs share the device. Both of a
pair have the same weights at first, batches and noise, also in validation.
"""

import itertools
import json
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
FLAGS = """--config configs/digits.yaml --planning.m_mem 16384 --planning.policy balanced
--model.dim 1024 --model.ffn_dim 4096 --model.num_heads 16 --model.num_layers 8
--model.dtype bfloat16 --optimizer.name adamw --optimizer.learning_rate 3e-4
--sampling.grids [] --evaluators [] --trackers [] --checkpoint.every null --data.dataset null
--run.compilation_cache null --validation.share 0.1 --validation.max_samples null"""


def main(argv: list[str]) -> int:
    """Trains all runs at once and writes the JSON."""
    parser = benchmark_parser(__doc__, "float8_loss.json")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, further = parser.parse_known_args(argv)  # others are flags of train.py
    record = Record(options.out, ("jax", "jaxlib", "flax"), steps=options.steps, cases=[])
    with tempfile.TemporaryDirectory() as place:
        Digits(mix=MIX).write(Path(place, "data"))
        runs = {}
        for matmul, seed in itertools.product(("dtype", "float8"), options.seeds):
            folder = Path(place, f"{matmul}_{seed}")
            words = [
                *FLAGS.split(),
                "--model.matmul",
                matmul,
                "--run.seed",
                str(seed),
                *further,
            ]
            words += ["--data.folder", f"{place}/data", "--run.folder", str(folder)]
            words += ["--run.steps", str(options.steps), "--validation.every", str(options.steps)]
            command = [sys.executable, str(ROOT / "train.py"), *words]
            variables = {
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            with Path(f"{folder}.txt").open("w") as said:
                process = subprocess.Popen(
                    command, stdout=said, stderr=said, cwd=ROOT, env=os.environ | variables
                )
            runs[matmul, seed] = process, folder
        for (matmul, seed), (process, folder) in runs.items():
            if process.wait():
                raise InputError(f"{matmul}, {seed}: {Path(f'{folder}.txt').read_text()[-500:]}")
            last = [row for row in read_metrics(folder / "metrics.jsonl") if is_validation(row)][-1]
            case = {"matmul": matmul, "seed": seed, "held_out_loss": last["validation/loss"]}
            record.add(case)
            print(case, flush=True)
    found = {
        (case["matmul"], case["seed"]): case["held_out_loss"] for case in record.content["cases"]
    }
    record.content["ratios"] = [found["float8", n] / found["dtype", n] for n in options.seeds]
    record.write()
    print(json.dumps(record.content["ratios"]))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
