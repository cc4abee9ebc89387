"""The lock of a run folder: two runs must not write to one folder."""

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError

LOCK_NAME = "lock.json"
"""File in a run folder that its run holds, with who that is. It stays when the run ends."""


@contextmanager
def locked(folder: Path, cluster: Cluster) -> Iterator[None]:
    """Holds a run folder's lock, in the first process; the system frees it when that ends.

    Args:
      folder: the run folder.
      cluster: the other processes, which learn that the folder is refused.

    Raises:
      InputError: another run holds it.
    """
    if not first_process():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+") as file:
        with cluster.report_failures():
            _take(file, folder)
        file.seek(0)
        file.truncate()
        json.dump(_self(), file)
        file.flush()
        yield


def _take(file: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{folder}: another run trains here{_holder(file)}; stop it, wait for its end, or "
            "choose another run.folder"
        ) from error
    except OSError as error:  # some network file systems have no locks
        print(f"note: {folder}: cannot be locked ({error.strerror}); start no other run there")


def _holder(file: TextIO) -> str:
    """Who holds the lock, as far as it says so."""
    file.seek(0)
    try:
        known = json.load(file)
        return f" (process {known['process']} on {known['host']} since {known['since']})"
    except (ValueError, KeyError, TypeError):
        return ""


def _self() -> dict[str, object]:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"host": platform.node(), "process": os.getpid(), "since": since}
