"""The lock of a run folder: two runs must not write to one folder."""

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError
from alload_jax.files import parse_json, remove_unfinished
from alload_jax.training.run_files import open_own

LOCK_NAME = "lock.json"
"""File in a run folder that its run holds, with who that is. It stays when the run ends."""


@contextmanager
def locked(folder: Path, cluster: Cluster) -> Iterator[None]:
    """Holds a run folder's lock, in the first process; the system frees it when that ends.

    Args:
      folder: the run folder.
      cluster: the other processes, which learn that the folder is refused.

    Raises:
      InputError: another run holds it, or a link in it leads out of it, so that the run would write
        to another place.
    """
    if not first_process():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with cluster.report_failures():
        _refuse_links(folder)
    with open_own(folder / LOCK_NAME, "a+") as file:
        with cluster.report_failures():
            _take(file, folder)
        remove_unfinished(folder)
        file.seek(0)
        file.truncate()
        json.dump(_self(), file)
        file.flush()
        yield


def _refuse_links(folder: Path) -> None:
    root = folder.resolve()
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(parent) / name
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                raise InputError(
                    f"{path}: is a link out of the run folder; remove it (run.folder itself may be "
                    "a link)"
                )


def _take(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{folder}: another run trains here{_holder(file)}; stop it, wait for its end, or "
            "choose another run.folder"
        ) from error
    except OSError as error:  # some network file systems have no locks
        print(f"note: {folder}: cannot be locked ({error.strerror}); start no other run there")


def _holder(file: IO[str]) -> str:
    """Who holds the lock, as far as it says so."""
    file.seek(0)
    try:
        known = parse_json(file.read(), LOCK_NAME, "remove it")
        return f" (process {known['process']} on {known['host']} since {known['since']})"
    except (ValueError, KeyError, TypeError):
        return ""


def _self() -> dict[str, object]:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"host": platform.node(), "process": os.getpid(), "since": since}
