"""Records date, commit, device and versions of a measurement."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """Date, commit, GPU and driver (None without nvidia-smi), versions, and XLA_FLAGS if given.

    The commit is None outside a checkout, and ends in `+` where its files were changed.
    """
    device, driver = _nvidia_smi()
    versions = {"python": platform.python_version()} | {name: _version(name) for name in packages}
    flags = os.environ.get("XLA_FLAGS")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "device": device,
        "driver": driver,
        "versions": versions,
    } | ({"xla_flags": flags} if flags else {})


def _version(package: str) -> str | None:
    """The version; None if no package of this name is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _nvidia_smi() -> tuple[str | None, str | None]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None, None
    device, driver = found.stdout.splitlines()[0].rsplit(",", 1)
    return device.strip(), driver.strip()
