"""Interrupts and damages runs at random, and checks that nothing is lost.

    python benchmarks/chaos.py --kills 100 --seed 0

Interrupts runs of tiny models in every phase, continues them, and compares the result with runs
that were never stopped; fills disks; flips bits in stores, checkpoints and exports; gives hostile
inputs.

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
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_bits import flip_bits
from chaos_disks import fill_disk
from chaos_inputs import INPUTS, give_inputs
from chaos_phases import PHASES
from chaos_report import report
from chaos_runs import STEPS, VARIANTS, Campaign, saved_step

from alload_jax.bench.provenance import provenance
from alload_jax.errors import run_command

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "chaos_cpu.json"
REPORT = ROOT / "docs" / "results" / "chaos" / "report.md"
_MOST = 6
"""Kills in a series."""
_SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGKILL", "SIGKILL", "SIGSTOP")
"""In turn. SIGSTOP is followed by SIGKILL."""


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
    for number in range(options.disks):
        disks = found.get("disks", [])
        note("disks", [*disks, fill_disk(campaign, f"disk-{len(disks)}", number)])
    series, left = found.get("series", []), options.kills
    while left > 0:
        series.append(kill_series(campaign, options.seed, series, left))
        left -= len(series[-1]["kills"])
        note("series", series)
        say(f"{left} kills left; hit: {dict(hits(series))}; faults: {faults_of(found)}")
    return found


def kill_series(
    campaign: Campaign, seed: int, series: list[dict[str, Any]], most: int
) -> dict[str, Any]:
    """Interrupts one run in the phases that were hit least so far, and continues it to its end."""
    chance = random.Random(f"{seed}/{len(series)}")
    name = f"run-{seed}-{len(series)}"
    variant = list(VARIANTS)[len(series) % len(VARIANTS)]
    campaign.reference(variant)
    shutil.rmtree(campaign.folder / name, ignore_errors=True)
    done = sum(len(each["kills"]) for each in series)
    this: dict[str, Any] = {"run": name, "variant": variant, "seed": seed, "kills": []}
    began = time.monotonic()
    while len(this["kills"]) < min(most, _MOST):
        saved = saved_step(campaign.folder / name)
        phase = next_phase(hits([*series, this]), saved, campaign.steps, chance)
        if phase is None:
            break
        number = _SIGNALS[(done + len(this["kills"])) % len(_SIGNALS)]
        killed = campaign.kill(name, variant, phase, number, chance)
        if killed is None:
            break
        this["kills"].append(killed._asdict())
        say(f"{name}: {killed}")
    this["faults"] = campaign.finish(name, variant)
    this["seconds"] = round(time.monotonic() - began, 1)
    if not faults_of({"series": [this]}):
        shutil.rmtree(campaign.folder / name)
    return this


def next_phase(counts: Counter[str], saved: int, steps: int, chance: random.Random) -> str | None:
    """A phase that was hit least so far; None if a run that stands at this step has none of them.

    The end comes last, because it leaves little of the run for other phases.
    """
    possible = set(PHASES) if saved < steps else {"start", "restore", "end"}
    possible -= set() if saved else {"restore"}
    fewest = min(counts[phase] for phase in PHASES if saved or phase != "restore")
    least = [phase for phase in PHASES if phase in possible and counts[phase] == fewest]
    early = [phase for phase in least if phase != "end"]
    return chance.choice(early or least) if least else None


def hits(series: list[dict[str, Any]]) -> Counter[str]:
    """How many kills came in each phase, as the runs have noted; several may be open at once."""
    return Counter(phase for each in series for kill in each["kills"] for phase in kill["phases"])


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
