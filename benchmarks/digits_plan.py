"""The README's table: AdaptiveLoad's policy beside its baseline on the digits, 8 ranks.

    python benchmarks/digits_plan.py

Plans one epoch by each policy as `alload plan` does, writes benchmarks/results/digits_plan.json
and prints the table in Markdown.
"""

import dataclasses
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.config import Config, read_config
from alload_jax.data.digits import prepare_digits
from alload_jax.data.manifest import read_manifest
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.settings import make_plan

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "digits_plan.json"
RANKS = 8
CASES = (
    ("equal_tokens", "independent"),
    ("dual_constraint", "independent"),
    ("equal_tokens", "synchronous"),
    ("dual_constraint", "synchronous"),
)
COLUMNS = {
    "compute_cv": "compute CV",
    "imbalance": "imbalance",
    "idle": "idle",
    "step_cv": "CV over steps",
    "padding": "padding",
    "utilisation": "use of M_mem",
}


def main() -> None:
    """Measures, writes and prints."""
    config = read_config(["--config", str(ROOT / "configs" / "digits.yaml")])
    assert config.data.digits
    prepare_digits(ROOT / config.data.folder, config.data.digits)
    rows = [_measure(config, *case) for case in CASES]
    content = {
        "command": "python benchmarks/digits_plan.py",
        "date": datetime.date.today().isoformat(),
        "device": f"none (planning only); {platform.machine()}",
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__},
        "ranks": RANKS,
        "m_mem": config.planning.m_mem,
        "p": config.planning.exponent(),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n")
    print(_table(rows))


def _measure(config: Config, policy: Any, mode: Any) -> dict[str, Any]:
    planning = dataclasses.replace(config.planning, policy=policy, ranks_mode=mode)
    samples = read_manifest(ROOT / config.data.folder).samples(config.model.patch_size)
    plan = make_plan(planning, samples, RANKS, config.run.seed)
    metrics = plan_metrics(
        plan.epoch(0), samples.seq_len, planning.predictor(), planning.tokens_bound()
    )
    return {"policy": policy, "ranks_mode": mode} | dataclasses.asdict(metrics)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | policy | " + " | ".join(COLUMNS.values()) + " |",
        "|---|---|" + "---:|" * len(COLUMNS),
    ]
    for row in rows:
        figures = " | ".join(f"{row[name]:.1%}" for name in COLUMNS)
        lines.append(f"| {row['ranks_mode']} | `{row['policy']}` | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
