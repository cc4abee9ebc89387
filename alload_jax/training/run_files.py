"""The files of a run folder: metrics by step, the environment, JSON written atomically.

In a cluster all processes call these functions, and only the first process writes.
"""

import json
import os
import platform
import sys
import time
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import jax

from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError
from alload_jax.files import open_regular, parse_json, read_json, replacing, require_regular
from alload_jax.training.resume import program

PACKAGES = ("alload-jax", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")
_IMPORTED = time.monotonic()

VALIDATION = "validation/"
"""Names of the figures of a validation begin with it."""


def is_validation(row: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is that of a validation, not of a step."""
    return any(name.startswith(VALIDATION) for name in row)


class MetricsLog:
    """metrics.jsonl with one line per step, and one more for each validation.

    Attributes:
      folder: folder of the run.
      validations: lines of the validations.

    Lines of steps after `resumed_at` come from a run that was interrupted after its last
    checkpoint; they are removed, because the resumed run computes the same values again.
    """

    def __init__(self, folder: Path, resumed_at: int):
        path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["step"] <= resumed_at]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.folder = folder
        self._file = open_own(path, buffering=1)
        self.validations: list[dict[str, Any]] = [row for row in kept if is_validation(row)]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Lines of the steps, read from the file: memory must not grow with the steps."""
        found = read_metrics(self.folder / "metrics.jsonl")
        return [row for row in found if not is_validation(row)]

    def write(self, row: dict[str, Any]) -> None:
        """Appends the metrics of a step or of a validation; `row["step"]` counts from 1.

        Raises:
          InputError: the disk is full.
        """
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise InputError(
                f"{self.folder / 'metrics.jsonl'}: cannot be written ({error.strerror}); make room "
                "and run the same command again"
            ) from error
        if is_validation(row):
            self.validations.append(row)

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):  # a full disk, which `write` has told
            self._file.close()


class BadRecords:
    """The distinct damaged records of a run over all its starts, one per line on disk."""

    def __init__(self, path: Path, cluster: Cluster):
        self._path = path
        self._known = set(cluster.broadcast(partial(_lines, path)))

    def __len__(self) -> int:
        return len(self._known)

    def add(self, problems: tuple[str, ...]) -> list[str]:
        """Adds the problems that are new, and returns them."""
        new = [problem for problem in dict.fromkeys(problems) if problem not in self._known]
        if new:
            self._known.update(new)
            with open_own(self._path) as file:
                file.writelines(f"{problem}\n" for problem in new)
        return new

    def others(self, problems: tuple[str, ...]) -> str:
        """Says where the records are that were met before these; empty if there are none."""
        count = len(self._known.difference(problems))
        if not count:
            return ""
        listed = f"{count} others are" if count > 1 else "another is"
        return f" ({listed} in {self._path}; delete it where they are restored)"


def _lines(path: Path) -> list[str]:
    require_regular(path, "remove it")
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl without an incomplete last line.

    Raises:
      InputError: a line is not a JSON object with a step.
    """
    if not path.exists():
        return []
    require_regular(path, "remove it")
    found = []
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        if not line:
            continue
        place = f"{path}: line {number}"
        row = parse_json(line, place, "remove the line", finite=False)
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or step < 0:
            raise InputError(f"{place} is not a JSON object with a step; remove the line")
        found.append(row)
    return found


def append_environment(path: Path, argv: list[str], step: int) -> None:
    """Appends the environment of this start: versions, devices, host, command."""
    starts = read_json(path) or []
    write_json(path, [*starts, {"step": step} | _environment(argv)])


def _environment(argv: list[str]) -> dict[str, Any]:
    return {
        "command": " ".join([program(), *argv]),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def peak_memory() -> int | None:
    """Returns the maximum peak memory of this process's devices in bytes; None if unknown."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if found]
    return max(peaks, default=None)


def process_seconds() -> float:
    """Seconds since this process started; since its first import of this module without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.monotonic() - _IMPORTED
    return up - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file's text atomically."""
    if not first_process():
        return
    with replacing(path) as unfinished:
        unfinished.write_text(text)


def open_own(path: Path, mode: str = "a", buffering: int = -1) -> IO[str]:
    """Opens a file of the run folder to write to it; in other processes the null device.

    Raises:
      InputError: it is a link or no regular file, as in the folder of somebody else.
    """
    if not first_process():
        return open(os.devnull, "w")
    return open_regular(path, mode, buffering)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
