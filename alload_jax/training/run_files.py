"""The files of a run folder: metrics by step, the environment, JSON written whole.

In a cluster all processes call these alike, and the first one writes.
"""

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError

PACKAGES = ("alload-jax", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")


class MetricsLog:
    """metrics.jsonl, a line per step, and the same as TensorBoard events.

    Lines of steps beyond `resumed_at` come from a run that was cut off after its last checkpoint;
    they are computed again, bit for bit, and so replaced.
    """

    def __init__(self, folder: Path, resumed_at: int):
        path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["step"] <= resumed_at]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.folder = folder
        self._file = _writable(path).open("a", buffering=1)
        self._events = SummaryWriter(
            str(folder / "tensorboard"), purge_step=resumed_at + 1, write_to_disk=first_process()
        )
        self.rows: list[dict[str, Any]] = kept

    def write(self, row: dict[str, Any]) -> None:
        """Appends a step's metrics; `row["step"]` counts from 1."""
        self._file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Writes what is buffered."""
        self._file.close()
        self._events.close()


class BadRecords:
    """The distinct damaged records that a run has met, over all its starts; a line each on disk."""

    def __init__(self, path: Path, cluster: Cluster):
        self._path = path
        self._known = set(
            cluster.broadcast(lambda: path.read_text().splitlines() if path.exists() else [])
        )

    def __len__(self) -> int:
        return len(self._known)

    def add(self, problems: tuple[str, ...]) -> list[str]:
        """Adds what was not known yet, and returns it."""
        new = [problem for problem in dict.fromkeys(problems) if problem not in self._known]
        if new:
            self._known.update(new)
            with _writable(self._path).open("a") as file:
                file.writelines(f"{problem}\n" for problem in new)
        return new


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def append_environment(path: Path, argv: list[str], step: int) -> None:
    """Notes what the run runs on: versions, devices, host, command. An entry for every start."""
    starts = read_json(path) or []
    write_json(path, [*starts, {"step": step} | _environment(argv)])


def _environment(argv: list[str]) -> dict[str, Any]:
    return {
        "command": " ".join(["python", "train.py", *argv]),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is no such file.

    Raises:
      InputError: it holds something else.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error}); fix it or remove it") from error


def peak_memory() -> int | None:
    """Most bytes in use on this process's fullest device so far; None where that is not known."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if found]
    return max(peaks, default=None)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replaces a file's text; a crash leaves the old one or the new one."""
    if not first_process():
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def _writable(path: Path) -> Path:
    """Where this process may write what belongs there."""
    return path if first_process() else Path(os.devnull)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
