"""Interrupts and damages runs at random, and checks that nothing is lost.

    python benchmarks/chaos.py --kills 100 --seed 0

Kills runs of a tiny model in every phase, continues them, and compares the result with a run that
was never stopped; fills disks; flips bits in stores and checkpoints; gives hostile inputs.
`--kills`, `--disks`, `--flips` and `--inputs` say how many of each; 0 leaves a part as it was. A
campaign is continued by calling it again with the same seed: kills and disks are added to those in
benchmarks/results/chaos_cpu.json. `--print` only writes the report, docs/results/chaos/report.md.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from chaos_bits import flip_bits
from chaos_disks import fill_disk
from chaos_inputs import INPUTS, give_inputs
from chaos_report import report
from chaos_runs import STEPS, Campaign

from alload_jax.bench.provenance import provenance
from alload_jax.errors import run_command

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "chaos_cpu.json"
REPORT = ROOT / "docs" / "results" / "chaos" / "report.md"
_EVERY_TOGETHER = 4
"""Of so many series of kills, one is of several processes."""
_MOST_ALONE, _MOST_TOGETHER = 15, 4
"""Kills in a series of one process, and of several."""


def main(argv: list[str]) -> int:
    """Runs the campaign; status 1 if something was not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300, help="kills to add (default 300)")
    parser.add_argument("--disks", type=int, default=5, help="full disks to add (default 5)")
    parser.add_argument("--flips", type=int, default=1000, help="flipped bits (default 1000)")
    parser.add_argument(
        "--inputs", type=int, default=len(INPUTS), help=f"inputs (default {len(INPUTS)})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run (default {STEPS})")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "chaos")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--print", action="store_true", help="only write the report")
    options = parser.parse_args(argv)
    found = json.loads(options.result.read_text()) if options.result.exists() else {}
    if not options.print:
        found = run_campaign(options, found)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(report(found))
    print(report(found))
    return 1 if faults_of(found) else 0


def run_campaign(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Runs the parts that are asked for, and writes each when it is done."""

    def note(name: str, content: Any) -> None:
        found[name] = content
        found.update(provenance(("jax", "jaxlib", "orbax-checkpoint", "grain", "numpy")))
        partial = options.result.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(options.result)

    parts = ("kills", "disks", "flips", "inputs", "seed", "steps")
    given = " ".join(f"--{name} {getattr(options, name)}" for name in parts)
    found.setdefault("commands", []).append(f"python benchmarks/chaos.py {given}")
    campaign = Campaign(options.work.absolute(), options.steps)
    if options.inputs:
        note("inputs", give_inputs(campaign, INPUTS[: options.inputs]))
    if options.flips:
        note("flips", flip_bits(campaign, options.flips, options.seed))
    series = found.get("series", [])
    expected = campaign.reference() if options.kills or options.disks else []
    for number in range(options.disks):
        disks = found.get("disks", [])
        note("disks", [*disks, fill_disk(campaign, f"disk-{len(disks)}", number, expected)])
    left = options.kills
    while left > 0:
        series.append(kill_series(campaign, options.seed, len(series), left, expected))
        left -= len(series[-1]["kills"])
        note("series", series)
        say(f"{left} kills left; faults: {faults_of(found)}")
    return found


def kill_series(
    campaign: Campaign, seed: int, number: int, most: int, expected: list[dict[str, Any]]
) -> dict[str, Any]:
    """Kills and continues one run until its end."""
    chance, name = random.Random(f"{seed}/{number}"), f"run-{seed}-{number}"
    together = number % _EVERY_TOGETHER == _EVERY_TOGETHER - 1
    shutil.rmtree(campaign.folder / name, ignore_errors=True)
    kills: list[dict[str, Any]] = []
    began = time.monotonic()
    while len(kills) < min(most, _MOST_TOGETHER if together else _MOST_ALONE):
        killed = campaign.kill(name, chance, chance.choice((2, 2, 4)) if together else 1)
        if killed is None:
            break
        kills.append(killed._asdict())
        say(f"{name}: {killed}")
        if killed.saved >= campaign.steps:
            break
    faults = campaign.finish(name, expected, exact=not together)
    if not faults and not any(each["faults"] for each in kills):
        shutil.rmtree(campaign.folder / name)
    return {
        "run": name,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "kills": kills,
        "faults": faults,
    }


def faults_of(found: dict[str, Any]) -> list[str]:
    """All that was not as it should be, in words."""
    faults = [fault for each in found.get("disks", []) for fault in each["faults"]]
    for series in found.get("series", []):
        faults += series["faults"]
        faults += [fault for each in series["kills"] for fault in each["faults"]]
    parts = (found.get(part, {}).get("faults", []) for part in ("flips", "inputs"))
    return [*faults, *itertools.chain(*parts)]


def say(line: str) -> None:
    """Prints progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
