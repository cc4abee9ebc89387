"""Measures whether memory, descriptors and threads of a run stay flat.

    python benchmarks/flat_memory.py

Trains the smallest model twice, without checkpoints and with one every ten steps, and looks at the
process in /proc meanwhile. Growth is that between the medians of two parts of a run: its second and
its last fifth. Writes benchmarks/results/flat_memory_cpu.json and prints a table.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from alload_jax.bench.harness import Record, markdown
from alload_jax.data.datasets.digits import Digits
from alload_jax.errors import InputError, run_command

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "flat_memory_cpu.json"
SAVED_EVERY = 10
_INTERVAL = 0.2
_LONGEST_LINES = 8192


class Look(NamedTuple):
    """What a process holds after some steps: bytes of its own, open descriptors, threads."""

    step: int
    memory: int
    descriptors: int
    threads: int


def main(argv: list[str]) -> int:
    """Measures, writes and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000, help="of a run (default 10000)")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: growth(measure(Path(folder), name, options.steps, every))
            for name, every in (("no checkpoints", None), ("checkpoints", SAVED_EVERY))
        }
    packages = ("jax", "jaxlib", "orbax-checkpoint", "grain")
    sizes = {"steps": options.steps, "saved_every": SAVED_EVERY}
    Record(options.result, packages, **sizes, runs=runs).write()
    print(table(runs))
    return 0


def measure(folder: Path, name: str, steps: int, every: int | None) -> list[Look]:
    """Trains in a process of its own and looks at it until its last step."""
    if not (folder / "data").exists():
        Digits(mix=((1, 8, 8, 32),), frames_per_latent=1).write(folder / "data")
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(settings(folder, name, steps, every)))
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config)]
    with (folder / f"{name}.err").open("w+") as said:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        )
        looks: list[Look] = []
        while process.poll() is None:
            if found := look(process.pid, folder / name / "metrics.jsonl"):
                looks.append(found)
            time.sleep(_INTERVAL)
        said.seek(0)
        if process.returncode:
            raise InputError(f"the run failed: {said.read().strip()[-300:]}")
    return [each for each in looks if 0 < each.step < steps]


def settings(folder: Path, name: str, steps: int, every: int | None) -> dict[str, Any]:
    """The config of a run of the smallest model."""
    model = {"dim": 8, "ffn_dim": 8, "num_heads": 1, "num_layers": 1, "freq_dim": 8}
    return {
        "run": {"folder": str(folder / name), "steps": steps},
        "data": {"folder": str(folder / "data")},
        "planning": {"m_mem": 32, "policy": "equal_tokens"},
        "model": model | {"patch_size": [1, 4, 4]},
        "checkpoint": {"every": every},
        "trackers": [],
    }


def look(pid: int, metrics: Path) -> Look | None:
    """Looks at a process; None if it is not there or has done no step."""
    try:
        status = (Path("/proc") / str(pid) / "status").read_text()
        descriptors = len(list((Path("/proc") / str(pid) / "fd").iterdir()))
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _LONGEST_LINES))
            lines = file.read().split(b"\n")[:-1]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    values = dict(line.split(":", 1) for line in status.splitlines())
    if not lines or "RssAnon" not in values:
        return None
    memory = 1024 * sum(int(values[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return Look(int(json.loads(lines[-1])["step"]), memory, descriptors, int(values["Threads"]))


def growth(looks: list[Look]) -> dict[str, float]:
    """Growth between the second and the last fifth of a run: bytes a step, descriptors, threads."""
    last = looks[-1].step
    early = [each for each in looks if last / 5 < each.step <= 2 * last / 5]
    late = [each for each in looks if each.step > 4 * last / 5]

    def median(part: list[Look], name: str) -> float:
        return statistics.median(getattr(each, name) for each in part)

    steps = median(late, "step") - median(early, "step")
    grown = {name: median(late, name) - median(early, name) for name in Look._fields}
    return {
        "bytes_per_step": grown["memory"] / steps,
        "descriptors": grown["descriptors"],
        "threads": grown["threads"],
        "memory": median(late, "memory"),
    }


def table(runs: dict[str, dict[str, float]]) -> str:
    """A Markdown table of the runs."""
    rows = [
        [
            *(name, f"{each['memory'] / 2**20:.0f} MiB", f"{each['bytes_per_step']:,.0f} B"),
            *(f"{each['descriptors']:+.0f}", f"{each['threads']:+.0f}"),
        ]
        for name, each in runs.items()
    ]
    return markdown(("run", "memory", "growth a step", "descriptors", "threads"), rows)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
