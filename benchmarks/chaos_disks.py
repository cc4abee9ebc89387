"""Runs on a disk that becomes full, and goes on when there is room."""

import random
import subprocess
import time
from typing import Any

from chaos_runs import PATIENCE, Campaign, differences, errors_of

_SIZES = (600, 3000)
"""Kilobytes of the smallest and the largest disk."""


def fill_disk(campaign: Campaign, name: str, seed: int) -> dict[str, Any]:
    """Trains on a small disk until it is full, then on a larger one until the end.

    Only root can mount such a disk.
    """
    kilobytes = random.Random(f"disk/{seed}/{name}").randint(*_SIZES)
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
