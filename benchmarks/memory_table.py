"""Predicts which clips fit which GPUs, for training all weights and for adapters.

    python benchmarks/memory_table.py --out benchmarks/results/memory_predicted.json

By the arithmetic of `alload plan --memory`; nothing is measured and no GPU is needed.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from alload_jax.bench.harness import Record, benchmark_parser, markdown
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
SIZES = ("480x832", "720x1280")


def main() -> int:
    """Writes the JSON and prints the table."""
    options = benchmark_parser(__doc__, "memory_predicted.json").parse_args()
    rows = [
        {"model": model, "gpu": gpu, **case}
        for model, (config, change) in MODELS.items()
        for gpu, flags in GPUS.items()
        for case in cases(config, change, flags, options.out.parent)
    ]
    Record(options.out, ["jax", "flax", "optax"], measured=False, rows=rows).write()
    print(table(rows))
    return 0


def cases(config: str, change: tuple[Any, ...], flags: list[str], folder: Path) -> list[Any]:
    """The cases of `alload plan --memory` for a config, with one section changed."""
    values = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    if change:
        values[change[0]] = change[1]
    file = folder / ".memory_table.yaml"
    file.write_text(yaml.safe_dump(values))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        alload(["plan", "--memory", "--json", "--config", str(file), *flags])
    file.unlink()
    return [case for case in json.loads(printed.getvalue())["cases"] if case["remat"] in REMAT]


def table(rows: list[dict[str, Any]]) -> str:
    """The table: frames of the longest clip, inputs of blocks on the device / in host memory."""
    lines = []
    for model in MODELS:
        for gpu in GPUS:
            full, offload = (
                next(r for r in rows if (r["model"], r["gpu"], r["remat"]) == (model, gpu, remat))
                for remat in REMAT
            )
            clips = [
                f"{shown(full['clips'][size])} / {shown(offload['clips'][size])}" for size in SIZES
            ]
            state = f"{full['state'] / 1e9:.1f} GB"
            lines.append([model, gpu, state, *clips])
    head = ["trained", "GPU", "state", *(size.replace("x", "×") for size in SIZES)]
    return markdown(head, lines, left=2)


def shown(frames: int) -> str:
    """The frames of a clip; 0 stands for none, and longer clips were not tried."""
    return "–" if not frames else "≥ 1001" if frames >= 1001 else str(frames)


if __name__ == "__main__":
    sys.exit(main())
