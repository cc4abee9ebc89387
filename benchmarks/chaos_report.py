"""The report of a campaign of faults, in Markdown."""

from typing import Any

from chaos_phases import PHASES
from chaos_runs import EVERY

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")


def report(found: dict[str, Any]) -> str:
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


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, rule, *rows))


def _kills(series: list[dict[str, Any]]) -> str:
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
    return text + "\n\n" + table(["phase", *SIGNALS, "most steps lost", "faults"], rows)


def _row(name: str, kills: list[dict[str, Any]]) -> list[Any]:
    most = max((kill["step"] - kill["saved"] for kill in kills), default=0)
    counts = (sum(kill["signal"] == signal for kill in kills) for signal in SIGNALS)
    return [name, *counts, most, sum(bool(kill["faults"]) for kill in kills)]


def _seeds(series: list[dict[str, Any]]) -> str:
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
    return text + "\n\n" + table(["run", "config", "kills", "seconds", "differences"], rows)


def _disks(disks: list[dict[str, Any]]) -> str:
    text = (
        f"{len(disks)} runs on a disk of {min(each['kilobytes'] for each in disks):,} to "
        f"{max(each['kilobytes'] for each in disks):,} KB that keeps all checkpoints. Each ended "
        "with one line and status 2, and was continued with more room to the losses of a run that "
        "was never stopped, bit for bit."
    )
    faults = [fault for each in disks for fault in each["faults"]]
    return text if not faults else text + "\n\nExcept: " + "; ".join(faults)


def _flips(flips: dict[str, Any]) -> str:
    kinds = ("found", "harmless", "missed")
    rows = [
        [name, *(counts.get(kind, 0) for kind in kinds)] for name, counts in flips["flips"].items()
    ]
    text = (
        "Single bits, each alone. A harmless one is in bytes that nothing is read from: what is "
        f"read is the same. {round(flips['seconds'])} seconds."
    )
    return text + "\n\n" + table(["place", *kinds], rows)


def _inputs(inputs: dict[str, Any]) -> str:
    good = inputs["given"] - len(inputs["faults"])
    text = (
        f"{good} of {inputs['given']} commands ended with one line and status 2, without a "
        f"traceback, in {round(inputs['seconds'])} seconds. They are listed in "
        "`benchmarks/chaos_inputs.py`."
    )
    rest = "\n".join(f"- {fault}" for fault in inputs["faults"])
    return text + (f"\n\nThe others:\n\n{rest}" if rest else "")
