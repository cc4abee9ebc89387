"""Predicts which clips fit which GPUs, for training all weights and for adapters.

    python benchmarks/memory_table.py --out benchmarks/results/memory_predicted.json

By the arithmetic of `alload plan --memory`; nothing is measured and no GPU is needed.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.cli import main as alload

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = {
    "1.3B, all weights": ("wan2_1_t2v_1_3b", ()),
    "1.3B, adapters": ("wan2_1_t2v_1_3b_lora", ()),
    "14B, all weights": ("wan2_1_t2v_14b", ()),
    "14B, adapters": ("wan2_1_t2v_14b_lora", ()),
    "14B, adapters, float8": ("wan2_1_t2v_14b_lora", ("parameters", {"frozen_dtype": "float8"})),
}
GPUS = {
    "24 GB": ["--memory-gb", "24"],
    "H100 80 GB": ["--device", "h100"],
    "H200": ["--device", "h200"],
    "4 × H200": ["--device", "h200", "--shards", "4"],
}
REMAT = ("full", "offload")


def main() -> int:
    """Writes the JSON."""
    options = benchmark_parser(__doc__, "memory_predicted.json").parse_args()
    record = Record(options.out, ["jax", "flax", "optax"], measured=False)
    for model, (config, change) in MODELS.items():
        for gpu, flags in GPUS.items():
            found = cases(config, change, flags)
            record.add(*({"model": model, "gpu": gpu, **case} for case in found), to="rows")
    return 0


def cases(config: str, change: tuple[Any, ...], flags: list[str]) -> list[Any]:
    """The cases of `alload plan --memory` for a config, with one section changed."""
    values = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    if change:
        values[change[0]] = change[1]
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(values))
        alload(["plan", "--memory", "--json", "--config", str(file), *flags])
    return [case for case in json.loads(printed.getvalue())["cases"] if case["remat"] in REMAT]


if __name__ == "__main__":
    sys.exit(main())
