"""Records what plans and training steps compute, and compares a later version with it, bit for bit.

    python benchmarks/golden_steps.py --record before.json
    python benchmarks/golden_steps.py --compare before.json

Everything is run by its command, `train.py` or `alload plan`, so that a restructured project is
compared without changing this program. Bits differ between processors and versions of JAX: record
and compare on one machine. Training runs take three steps of tiny models on four CPU devices; the
arrays of their checkpoints, by value whatever their names, and the losses are compared.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parents[1]
STEPS = 3
GIVEN: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
WORKLOADS = ("wan-480p", "mixed-resolution", "long-video-V40")
POLICIES = ("auto", "equal_tokens", "sorted", "dual_constraint", "first_fit", "balanced")
PLANS: dict[str, list[str]] = {
    f"{workload} {policy} {ranks}": [
        *("--workload", workload, "--size", "2000", "--policy", policy, "--ranks", str(ranks)),
    ]
    for workload in WORKLOADS
    for policy in POLICIES
    for ranks in (1, 12)
} | {
    f"{workload} {name}": ["--workload", workload, "--size", "1000", "--ranks", "8", *flags]
    for workload in WORKLOADS
    for name, flags in GIVEN["plans"].items()
}


def main() -> int:
    """Records or compares; status 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="file to write")
    parser.add_argument("--compare", type=Path, help="file of another version")
    parser.add_argument("--only", help="part of the name of what is run")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    earlier = json.loads(options.compare.read_text()) if options.compare else {}
    found, differing = {}, []
    with tempfile.TemporaryDirectory() as folder:
        digests: dict[str, Any] = {
            **{f"plan {name}": (_plan, flags) for name, flags in PLANS.items()},
            **{f"run {name}": (_run, changed) for name, changed in GIVEN["runs"].items()},
        }
        for name, (digest, what) in digests.items():
            if options.only and options.only not in name:
                continue
            found[name] = digest(what, Path(folder))
            same = not earlier or earlier.get(name) == found[name]
            differing += [] if same else [name]
            print(name, str(found[name])[:60], "" if same else "DIFFERS", flush=True)
    if options.record:
        options.record.write_text(json.dumps(found, indent=1) + "\n")
    if differing:
        print(f"{len(differing)} of {len(found)} differ: {', '.join(differing)}")
    return 1 if differing else 0


def _plan(flags: list[str], folder: Path) -> str:
    """The plan's digest, or the line of its refusal."""
    out = folder / "plan.parquet"
    alload = str(Path(sys.executable).parent / "alload")
    done = _call([alload, "plan", *flags, "--out", str(out)], statuses=(0, 2))
    return done.stderr if done.returncode else hashlib.sha256(out.read_bytes()).hexdigest()


def _run(changed: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Losses, gradient norms and the sorted digests of all arrays of the checkpoint."""
    import orbax.checkpoint as ocp

    config = {name: dict(section) for name, section in GIVEN["base"].items()}
    for name, section in changed.items():
        config[name] = config.get(name, {}) | section
    run = Path(tempfile.mkdtemp(dir=folder))
    config["run"]["folder"] = str(run / "run")
    config["data"]["folder"] = str(folder / "data")
    file = run / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    _call([sys.executable, str(ROOT / "train.py"), "--config", str(file)])
    rows = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [
        [row[key] for key in ("loss", "grad_norm", "samples")] for row in rows if "loss" in row
    ]
    step = run / "run" / "checkpoints" / str(STEPS)
    digests = []
    for item in sorted(path for path in step.iterdir() if (path / "_METADATA").exists()):
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.restore(item)
        digests += [_digest(leaf) for leaf in _leaves(tree) if leaf is not None]
    return {"metrics": metrics, "arrays": sorted(digests)}


def _leaves(tree: Any) -> list[Any]:
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return [tree] if parts is None else [leaf for part in parts for leaf in _leaves(part)]


def _digest(leaf: Any) -> str:
    array = np.asarray(leaf)
    return f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:32]}"


def _call(command: list[str], statuses: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in statuses:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done


if __name__ == "__main__":
    sys.exit(main())
