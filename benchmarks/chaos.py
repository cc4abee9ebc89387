"""Interrupts and damages runs at random, and checks that nothing is lost.

    python benchmarks/chaos.py --kills 100 --seed 0

Interrupts runs of tiny models in every phase, continues them, and compares the result with runs
that were never stopped; fills disks; flips bits in stores, checkpoints and exports; gives hostile
inputs.

`--kills`, `--disks`, `--flips` and `--inputs` say how many of each; 0 leaves a part as it was. A
campaign is continued by calling it again with the same seed: kills and disks are added to those in
benchmarks/results/chaos_cpu.json. `--print` only writes the report, build/chaos.md.
"""

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_bits import flip_bits
from chaos_inputs import INPUTS, give_inputs
from chaos_phases import PHASES
from chaos_runs import (
    EVERY,
    PATIENCE,
    STEPS,
    VARIANTS,
    Campaign,
    differences,
    errors_of,
    saved_step,
)

from alload_jax.bench.harness import markdown, provenance
from alload_jax.errors import run_command
from alload_jax.files import Json, replacing

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "chaos_cpu.json"
REPORT = ROOT / "build" / "chaos.md"
_MOST = 6
"""Kills in a series."""
_SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGKILL", "SIGKILL", "SIGSTOP")
"""In turn. SIGSTOP is followed by SIGKILL."""

_DISKS = (600, 3000)
"""Kilobytes of the smallest and the largest disk."""
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")


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


def run_campaign(options: argparse.Namespace, found: Json) -> Json:
    """Runs the parts that are asked for, and writes each when it is done."""

    def note(name: str, content: Any) -> None:
        found[name] = content
        found.update(provenance(("jax", "jaxlib", "orbax-checkpoint", "grain", "numpy")))
        with replacing(options.result) as unfinished:
            unfinished.write_text(json.dumps(found, indent=1) + "\n")

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


def kill_series(campaign: Campaign, seed: int, series: list[Json], most: int) -> Json:
    """Interrupts one run in the phases that were hit least so far, and continues it to its end."""
    chance = random.Random(f"{seed}/{len(series)}")
    name = f"run-{seed}-{len(series)}"
    variant = list(VARIANTS)[len(series) % len(VARIANTS)]
    campaign.reference(variant)
    shutil.rmtree(campaign.folder / name, ignore_errors=True)
    done = sum(len(each["kills"]) for each in series)
    this: Json = {"run": name, "variant": variant, "seed": seed, "kills": []}
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


def hits(series: list[Json]) -> Counter[str]:
    """How many kills came in each phase, as the runs have noted; several may be open at once."""
    return Counter(phase for each in series for kill in each["kills"] for phase in kill["phases"])


def faults_of(found: Json) -> list[str]:
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


# ---------------------------------------------------------------- full disks


def fill_disk(campaign: Campaign, name: str, seed: int) -> Json:
    """Trains on a small disk until it is full, then on a larger one until the end.

    Only root can mount such a disk.
    """
    kilobytes = random.Random(f"disk/{seed}/{name}").randint(*_DISKS)
    began, place = time.monotonic(), campaign.folder / name
    place.mkdir(exist_ok=True)
    mount(f"size={kilobytes}k", str(place))
    try:
        faults = _fill(campaign, name)
        mount("remount,size=200m", str(place))
        faults += _continue(campaign, name)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    seconds = round(time.monotonic() - began, 1)
    return {"disk": name, "kilobytes": kilobytes, "seconds": seconds, "faults": faults}


def mount(options: str, place: str) -> None:
    """Mounts a file system in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)


def _fill(campaign: Campaign, name: str) -> list[str]:
    flags = ["--checkpoint.keep", "1000"]
    run = campaign.starter.start("train", [*campaign.flags(f"{name}/run"), *flags])
    status = run.wait(PATIENCE)
    lines = errors_of(run.stderr)
    if status is None:
        run.kill()
        return ["a full disk does not end the run"]
    return [] if status == 2 and len(lines) == 1 else [f"status {status}, {lines}"]


def _continue(campaign: Campaign, name: str) -> list[str]:
    run = campaign.starter.start("train", campaign.flags(f"{name}/run"))
    if (status := run.wait(PATIENCE)) != 0:
        return [f"the run cannot be continued: {status}, {errors_of(run.stderr)}"]
    return differences(campaign.folder / name / "run", campaign.reference(), exact=True)


# ---------------------------------------------------------------- the report


def report(found: Json) -> str:
    """Tables of what a campaign has done and found."""
    series = found.get("series", [])
    parts = [
        "# Runs under faults",
        "Written by `python benchmarks/chaos.py` (`make chaos`) from "
        "[chaos_cpu.json](../../../benchmarks/results/chaos_cpu.json). "
        f"jax {found.get('versions', {}).get('jax')}, {found.get('date')}.",
    ]
    if series:
        parts += ["## Kills", _kills(series), _seeds(series)]
    if disks := found.get("disks"):
        parts += ["## Full disks", _disks(disks)]
    if flips := found.get("flips"):
        parts += ["## Flipped bits", _flips(flips)]
    if inputs := found.get("inputs"):
        parts += ["## Hostile inputs", _inputs(inputs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _kills(series: list[Json]) -> str:
    kills = [kill for each in series for kill in each["kills"]]
    rows = [
        _row(phase, [kill for kill in kills if phase in kill["phases"]])
        for phase in (*PHASES, "none")
    ]
    rows = [row for row in rows if any(row[1:])] + [_row("all", kills)]
    together = sum(kill["processes"] > 1 for kill in kills)
    lost = sum(max(0, kill["step"] - kill["saved"]) for kill in kills) / max(1, len(kills))
    aimed = sum(kill["aim"] in kill["phases"] for kill in kills)
    text = (
        f"{len(kills)} kills of {len(series)} runs, {together} of them of one of two or four "
        f"processes. Runs note the phases that are open, saving and commit in a thread beside the "
        f"others; a kill counts for each phase that was open when the signal came, whatever was "
        f"aimed at ({aimed} hit their aim). A checkpoint is saved every {EVERY} steps, so that at "
        f"most {2 * EVERY} steps may be lost: those since the newest checkpoint, and those of the "
        f"save in flight. On average {lost:.1f} were. SIGSTOP is followed by SIGKILL."
    )
    return text + "\n\n" + markdown(["phase", *SIGNALS, "most steps lost", "faults"], rows)


def _row(name: str, kills: list[Json]) -> list[Any]:
    most = max((kill["step"] - kill["saved"] for kill in kills), default=0)
    counts = (sum(kill["signal"] == signal for kill in kills) for signal in SIGNALS)
    return [name, *counts, most, sum(bool(kill["faults"]) for kill in kills)]


def _seeds(series: list[Json]) -> str:
    rows = [
        [each["run"], each["variant"], len(each["kills"]), round(each["seconds"]),
         "; ".join(each["faults"]) or "none"]
        for each in series
    ]  # fmt: skip
    text = (
        "Each run was continued to its end and compared with one of its config that was never "
        "stopped, bit for bit: steps, samples, losses, validations, the steps of the checkpoints, "
        "the arrays of the last, and exports of models of text. Where the number of processes "
        "changed, steps, samples and losses are compared, within 1e-4. The name of a run holds "
        "its seed."
    )
    return text + "\n\n" + markdown(["run", "config", "kills", "seconds", "differences"], rows)


def _disks(disks: list[Json]) -> str:
    text = (
        f"{len(disks)} runs on a disk of {min(each['kilobytes'] for each in disks):,} to "
        f"{max(each['kilobytes'] for each in disks):,} KB that keeps all checkpoints. Each ended "
        "with one line and status 2, and was continued with more room to the losses of a run that "
        "was never stopped, bit for bit."
    )
    faults = [fault for each in disks for fault in each["faults"]]
    return text if not faults else text + "\n\nExcept: " + "; ".join(faults)


def _flips(flips: Json) -> str:
    kinds = ("found", "harmless", "missed")
    rows = [
        [name, *(counts.get(kind, 0) for kind in kinds)] for name, counts in flips["flips"].items()
    ]
    text = (
        "Single bits, each alone. A harmless one is in bytes that nothing is read from: what is "
        f"read is the same. {round(flips['seconds'])} seconds."
    )
    return text + "\n\n" + markdown(["place", *kinds], rows)


def _inputs(inputs: Json) -> str:
    good = inputs["given"] - len(inputs["faults"])
    text = (
        f"{good} of {inputs['given']} commands ended with one line and status 2, without a "
        f"traceback, in {round(inputs['seconds'])} seconds. They are listed in "
        "`benchmarks/chaos_inputs.py`."
    )
    rest = "\n".join(f"- {fault}" for fault in inputs["faults"])
    return text + (f"\n\nThe others:\n\n{rest}" if rest else "")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
