"""Interrupts and damages runs at random, and checks that nothing is lost.

    python benchmarks/chaos.py --kills 100 --seed 0

Interrupts runs of tiny models in every phase, continues them, and compares the result with runs
that were never stopped; fills disks; flips bits in stores, checkpoints and exports; gives hostile
inputs.

`--kills`, `--disks`, `--flips` and `--inputs` say how many of each; 0 leaves a part as it was. A
campaign is continued by calling it again with the same seed: kills and disks are added to those in
benchmarks/results/chaos_cpu.json.

Runs note the phases that are open, saving and commit in a thread beside the others; a kill counts
for each phase that was open when the signal came, whatever was aimed at. Each run is continued to
its end and compared, bit for bit, with one of its config that was never stopped; where the number
of processes changes, losses are compared, within 1e-4.
"""

import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from chaos_bits import flip_bits
from chaos_inputs import INPUTS, give_inputs
from chaos_phases import PHASES
from chaos_runs import PATIENCE, STEPS, VARIANTS, Campaign, differences, errors_of, saved_step

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.errors import run_command
from alload_jax.files import Json

ROOT = Path(__file__).parents[1]
_MOST = 6
"""Kills in a series."""
_SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGKILL", "SIGKILL", "SIGSTOP")
"""In turn. SIGSTOP is followed by SIGKILL."""

_DISKS = (600, 3000)
"""Kilobytes of the smallest and the largest disk."""


def main(argv: list[str]) -> int:
    """Runs the parts that are asked for, and writes each; status 1 if something is wrong."""
    parser = benchmark_parser(__doc__, ROOT / "benchmarks" / "results" / "chaos_cpu.json")
    add = parser.add_argument
    add("--kills", type=int, default=300, help="kills to add (default 300)")
    add("--disks", type=int, default=5, help="full disks to add (default 5)")
    add("--flips", type=int, default=1000, help="flipped bits (default 1000)")
    add("--inputs", type=int, default=len(INPUTS), help=f"inputs (default {len(INPUTS)})")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=STEPS, help=f"of a run (default {STEPS})")
    add("--work", type=Path, default=ROOT / "runs" / "chaos")
    options = parser.parse_args(argv)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    record = Record(options.out, ("jax", "jaxlib", "orbax-checkpoint", "grain", "numpy"))
    commands = [*found.get("commands", []), record.content.pop("command")]
    record.content = found = found | record.content | {"commands": commands}
    campaign = Campaign(options.work.absolute(), options.steps)
    if options.inputs:
        found["inputs"] = give_inputs(campaign, INPUTS[: options.inputs])
        record.write()
    if options.flips:
        found["flips"] = flip_bits(campaign, options.flips, options.seed)
        record.write()
    for number in range(options.disks):
        name = f"disk-{len(found.get('disks', []))}"
        record.add(fill_disk(campaign, name, number), to="disks")
    series, left = found.setdefault("series", []), options.kills
    while left > 0:
        record.add(kill_series(campaign, options.seed, series, left), to="series")
        left -= len(series[-1]["kills"])
        print(f"{left} kills left; hit: {dict(hits(series))}", flush=True)
    faults = faults_of(found)
    print("\n".join(faults) or "nothing was lost")
    return 1 if faults else 0


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
        print(f"{name}: {killed}", flush=True)
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
        flags = [*campaign.flags(f"{name}/run"), "--checkpoint.keep", "1000"]
        run = campaign.starter.start("train", flags)
        status, lines, faults = run.wait(PATIENCE), errors_of(run.stderr), []
        if status is None:
            run.kill()
            faults = ["a full disk does not end the run"]
        elif status != 2 or len(lines) != 1:
            faults = [f"status {status}, {lines}"]
        mount("remount,size=200m", str(place))
        run = campaign.starter.start("train", campaign.flags(f"{name}/run"))
        if (status := run.wait(PATIENCE)) != 0:
            faults.append(f"the run cannot be continued: {status}, {errors_of(run.stderr)}")
        else:
            faults += differences(place / "run", campaign.reference(), exact=True)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    seconds = round(time.monotonic() - began, 1)
    return {"disk": name, "kilobytes": kilobytes, "seconds": seconds, "faults": faults}


def mount(options: str, place: str) -> None:
    """Mounts a file system in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
