"""The files of a run folder: metrics by step, the environment, the lock; how to continue.

In a cluster all processes call these functions, and only the first process writes.
"""

import fcntl
import itertools
import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from itertools import filterfalse
from pathlib import Path
from typing import IO

import jax

from alload_jax.data.manifest import MANIFEST_NAME
from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.distributed.initialize import ClusterConfig
from alload_jax.errors import InputError
from alload_jax.files import (
    Json,
    open_regular,
    parse_json,
    read_json,
    remove_unfinished,
    replacing,
    require_regular,
)
from alload_jax.training import EXPERTS


def program() -> str:
    """Returns how the training program was started, such as `python train.py`."""
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.parent.name != "alload_jax":
        return f"python {script.name if script.name == 'train.py' else script}"
    return "alload train" if sys.argv[1:2] == ["train"] else "python train.py"


def resume_command(folder: Path, cluster: ClusterConfig) -> str:
    """Returns the command that resumes a run; in a cluster, the command of each process."""
    command = f"{program()} --config {folder / 'config.yaml'}"
    if cluster.processes is None:
        return command
    return (
        f"{command} --cluster.coordinator {cluster.coordinator} --cluster.processes "
        f"{cluster.processes} --cluster.process <0 to {cluster.processes - 1}>"
    )


def continue_with(folder: Path, cluster: ClusterConfig) -> str:
    """Returns how to resume a run that has stopped, or that had not begun."""
    if not (folder / "config.yaml").exists():
        return "start it again with the same command"
    return f"continue with: {resume_command(folder, cluster)}"


def after_loss(folder: Path, whole: Path, cluster: ClusterConfig) -> str:
    """Returns what to do after a process is lost, and the step that the run resumes from."""
    if not (whole / "config.yaml").exists():
        return "start all processes again"
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    saved = max((int(name) for name in names if name.isdigit()), default=0)
    command = resume_command(whole, cluster)
    return f"start all processes again with: {command} (continues from step {saved})"


PACKAGES = ("alload-jax", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")
_IMPORTED = time.monotonic()

MOST_FOLLOWED = 1000
"""Number of the last steps of earlier starts that a run goes on from."""
VALIDATION = "validation/"
"""Names of the figures of a validation begin with it."""


def is_validation(row: Json) -> bool:
    """Whether a line of metrics.jsonl is that of a validation, not of a step."""
    return any(name.startswith(VALIDATION) for name in row)


class MetricsLog:
    """metrics.jsonl with one line per step, and one more for each validation.

    Attributes:
      folder: folder of the run.
      validations: lines of the validations.
      first: line of the first step of this start; None before it.

    Lines of steps after `resumed_at` come from a run that was interrupted after its last
    checkpoint; they are removed, because the resumed run computes the same values again.
    """

    def __init__(self, folder: Path, resumed_at: int, cluster: Cluster):
        path = folder / "metrics.jsonl"
        # Process 0 replaces the file, and NFS fails others who are reading the one before.
        if not first_process():
            cluster.broadcast(lambda: None)
        self.folder = folder
        self.first: Json | None = None
        self.validations: list[Json] = []
        self._last: deque[Json] = deque(maxlen=MOST_FOLLOWED)
        for row in drop_later(path, resumed_at):
            (self.validations if is_validation(row) else self._last).append(row)
        if first_process():
            cluster.broadcast(lambda: None)
        self._file = open_own(path, buffering=1)

    @property
    def rows(self) -> Iterator[Json]:
        """Lines of the steps, read from the file: memory must not grow with the steps."""
        return filterfalse(is_validation, read_metrics(self.folder / "metrics.jsonl"))

    def losses(self) -> list[tuple[float, float]]:
        """Losses and gradient norms of the last steps of earlier starts."""
        return [(row["loss"], row["grad_norm"]) for row in self._last]

    def write(self, row: Json) -> None:
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
        else:
            self.first = self.first or row

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):  # a full disk, which `write` has told
            self._file.close()


class BadRecords:
    """The distinct damaged records of a run over all its starts, one per line on disk."""

    def __init__(self, path: Path, cluster: Cluster):

        def known() -> list[str]:
            require_regular(path, "remove it")
            return path.read_text(errors="replace").splitlines() if path.exists() else []

        self._path = path
        self._known = set(cluster.broadcast(known))

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


def read_metrics(path: Path) -> Iterator[Json]:
    """Reads the lines of a metrics.jsonl one by one, without an incomplete last line.

    Raises:
      InputError: a line is not a JSON object with a step.
    """
    if not path.exists():
        return
    require_regular(path, "remove it")
    with path.open(errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line == "\n" or not line.endswith("\n"):
                continue
            place = f"{path}: line {number}"
            row = parse_json(line, place, "remove the line", finite=False)
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is not int or step < 0:
                raise InputError(f"{place} is not a JSON object with a step; remove the line")
            yield row


def drop_later(path: Path, step: int) -> Iterator[Json]:
    """Yields the lines of a metrics.jsonl up to a step; then the others are removed.

    Raises:
      InputError: a line is not a JSON object with a step.
    """
    kept = (row for row in read_metrics(path) if row["step"] <= step)
    if not first_process() or not path.exists():
        yield from kept
        return
    with replacing(path) as unfinished, unfinished.open("w") as file:
        for row in kept:
            file.write(json.dumps(row) + "\n")
            yield row


def set_aside_metrics(folder: Path) -> str:
    """Renames the metrics of a run that begins again, as it has no checkpoint.

    Returns:
      What to say of them; "" if there are none.
    """
    path = folder / "metrics.jsonl"
    last = deque(read_metrics(path) if first_process() else (), maxlen=1)
    if not last:
        return ""
    names = (path.with_name(f"metrics-{number}.jsonl") for number in itertools.count(1))
    aside = path.rename(next(each for each in names if not each.exists()))
    return (
        f"{folder}: has no checkpoint, so the run begins at step 0 again; the metrics of "
        f"{last[0]['step']:,} steps before are kept in {aside.name}"
    )


def append_environment(path: Path, argv: list[str], step: int) -> None:
    """Appends the environment of this start: versions, devices, host, command."""

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    environment = {
        "step": step,
        "command": " ".join([program(), *argv]),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: version(name) for name in PACKAGES},
    }
    write_json(path, [*(read_json(path) or []), environment])


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


def write_json(path: Path, content: object) -> None:
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


LOCK_NAME = "lock.json"
"""File in a run folder that its run holds, with who that is. It stays when the run ends."""


_WRITTEN = ("config.yaml", "data.json", "metrics.jsonl", "summary.json", LOCK_NAME)
_HOLDER = '{"host": '
"""How the content of a lock begins, of which a kill may leave less."""


CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""


def is_run(place: str | Path) -> bool:
    """Returns whether a path is a run folder with checkpoints."""
    return (Path(place) / CHECKPOINTS).is_dir()


def run_around(place: Path) -> Path | None:
    """The run folder of a path that is its folder of checkpoints, or lies in it."""
    place = place.absolute()
    near = (each.parent for each in (place, *place.parents) if each.name == CHECKPOINTS)
    return next((run for run in near if (run / "environment.json").is_file()), None)


def require_run_or_new(folder: Path) -> None:
    """Refuses a folder without a run that holds data, or files that a run would replace.

    Raises:
      InputError: it does.
    """
    if is_run(folder) or any((folder / name).exists() for name in ("environment.json", EXPERTS[0])):
        return
    if (folder / MANIFEST_NAME).exists():
        raise InputError(f"{folder}: is a data folder; name another run.folder")
    if run := run_around(folder):
        raise InputError(f"{folder}: is a part of the run {run}; name another run.folder")
    for path in filter(Path.exists, (folder / name for name in _WRITTEN)):
        if path.name == LOCK_NAME and path.is_file():
            begin = path.read_bytes()[: len(_HOLDER)].decode(errors="replace")
            if _HOLDER.startswith(begin):
                continue
        raise InputError(
            f"{path}: no run wrote this file, which this one would replace; move it, or "
            "choose another run.folder"
        )


@contextmanager
def locked(folder: Path, cluster: Cluster) -> Iterator[None]:
    """Holds a run folder's lock, in the first process; the system frees it when that ends.

    Args:
      folder: the run folder.
      cluster: the other processes, which learn that the folder is refused.

    Raises:
      InputError: another run holds it, or it is no run's: see `require_run_or_new`; or a link in
        it leads out of it, so that the run would write to another place.
    """
    if not first_process():
        yield
        return
    root = folder.resolve()
    with cluster.report_failures():
        for parent, folders, files in os.walk(root):
            for path in (Path(parent) / name for name in (*folders, *files)):
                if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                    raise InputError(
                        f"{path}: is a link out of the run folder; remove it (run.folder itself "
                        "may be a link)"
                    )
        require_run_or_new(folder)
        require_regular(folder, "make the folder that it leads to, or name another run.folder")
        folder.mkdir(parents=True, exist_ok=True)
    with open_own(folder / LOCK_NAME, "a+") as file:
        with cluster.report_failures():
            _take(file, folder)
        remove_unfinished(folder)
        file.seek(0)
        file.truncate()
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        json.dump({"host": platform.node(), "process": os.getpid(), "since": since}, file)
        file.flush()
        yield


def _take(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = lost = ""
        with suppress(ValueError, KeyError, TypeError):  # as far as the file says it
            known = parse_json(file.read(), LOCK_NAME, "remove it")
            holder = f" (process {known['process']} on {known['host']} since {known['since']})"
            if known["host"] != platform.node():
                lost = f"; if that host is lost and its lock stays, as on NFS 3, remove {LOCK_NAME}"
        raise InputError(
            f"{folder}: another run trains here{holder}; stop it, wait for its end, or choose "
            f"another run.folder{lost}"
        ) from error
    except OSError as error:  # some network file systems have no locks
        print(f"note: {folder}: cannot be locked ({error.strerror}); start no other run there")
