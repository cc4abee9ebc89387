"""Collects the figures of the default run for the docs.

    make train && .venv/bin/python benchmarks/digits_run.py runs/digits cpu

Writes the summary and the origin of a run to benchmarks/results/digits_cpu.json. Give the run
folder and the name of another device for its results. To run on the day and commit of the run.
"""

import json
import sys
from pathlib import Path

from alload_jax.bench.harness import provenance

RESULTS = Path(__file__).parent / "results"


def main(folder: str, name: str) -> None:
    """Writes the summary and provenance of a run."""
    run, now = Path(folder), provenance(())
    start = json.loads((run / "environment.json").read_text())[0]
    content = {
        "command": start["command"],
        **{name: now[name] for name in ("date", "commit")},
        "device": start["devices"],
        "cpus": start["cpus"],
        "versions": {"python": start["python"], **start["versions"]},
        "summary": json.loads((run / "summary.json").read_text()),
    }
    (RESULTS / f"digits_{name}.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/digits_run.py RUN_FOLDER NAME")
    main(*sys.argv[1:])
