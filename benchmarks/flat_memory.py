"""Measures whether memory, descriptors and threads of a run stay flat.

    python benchmarks/flat_memory.py

Trains the smallest model twice, without checkpoints and with one every ten steps, and looks at the
process in /proc meanwhile. Growth is that between the medians of two parts of a run: its second and
its last fifth.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.data.datasets.digits import Digits
from alload_jax.errors import InputError, run_command

ROOT = Path(__file__).parents[1]
SAVED_EVERY = 10
_INTERVAL = 0.02  # between two looks; a run that saves is without a checkpoint for moments only
_LONGEST_LINES = 8192


class Look(NamedTuple):
    """What a process holds after some steps: bytes of its own, open descriptors, threads."""

    step: int
    memory: int
    descriptors: int
    threads: int


def main(argv: list[str]) -> int:
    """Measures and writes."""
    parser = benchmark_parser(__doc__, ROOT / "benchmarks" / "results" / "flat_memory_cpu.json")
    parser.add_argument("--steps", type=int, default=10_000, help="of a run (default 10000)")
    options = parser.parse_args(argv)
    sizes = {"steps": options.steps, "saved_every": SAVED_EVERY, "runs": {}}
    record = Record(options.out, ("jax", "jaxlib", "orbax-checkpoint", "grain"), **sizes)
    with tempfile.TemporaryDirectory() as folder:
        for name, every in (("no checkpoints", None), ("checkpoints", SAVED_EVERY)):
            found = growth(measure(Path(folder), name, options.steps, every))
            record.content["runs"][name] = found
            record.write()
            print(name, found, flush=True)
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
    """Growth between the second and the last fifth of a run: bytes a step, descriptors, threads.

    Of those, the fewest at any time: more are there while a checkpoint is written.
    """
    last = looks[-1].step
    early = [each for each in looks if last / 5 < each.step <= 2 * last / 5]
    late = [each for each in looks if each.step > 4 * last / 5]

    def median(part: list[Look], name: str) -> float:
        return statistics.median(getattr(each, name) for each in part)

    steps = median(late, "step") - median(early, "step")
    grown = median(late, "memory") - median(early, "memory")
    fewest = [
        (min(each.descriptors for each in p), min(e.threads for e in p)) for p in (early, late)
    ]
    return {
        "bytes_per_step": grown / steps,
        "descriptors": fewest[1][0] - fewest[0][0],
        "threads": fewest[1][1] - fewest[0][1],
        "memory": median(late, "memory"),
    }


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
