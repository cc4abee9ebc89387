"""Collects the figures of the default run for the docs.

    make train && .venv/bin/python benchmarks/digits_run.py runs/digits cpu

Writes the summary and the origin of a run to benchmarks/results/digits_cpu.json. Give the run
folder and the name of another device for its results.
"""

import datetime
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main(folder: str, name: str) -> None:
    """Writes the summary and provenance of a run."""
    run = Path(folder)
    start = json.loads((run / "environment.json").read_text())[0]
    finished = datetime.date.fromtimestamp((run / "metrics.jsonl").stat().st_mtime)
    content = {
        "command": start["command"],
        "date": finished.isoformat(),
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
