"""Trackers that are services of others: called in a thread, so that they cannot stop training."""

import importlib.util
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, reason_of
from alload_jax.files import read_json
from alload_jax.training.run_files import write_json

_PENDING = 10_000
"""The most calls that wait for a service; further ones are dropped."""
_FAILURES = 3
"""Number of failed calls in a row after which a service is not called again."""
PATIENCE = 60.0
"""Seconds that a run waits at its end for a service to take what is pending."""

PICTURES = (".png",)
CLIPS = (".gif", ".mp4")


class Service(Protocol):
    """A tracking service; its methods may be slow or fail, and are called in one thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        ...

    def show(self, step: int, name: str, path: Path) -> None:
        """See `Tracker.show`; the file is a picture or a clip."""
        ...

    def close(self) -> None:
        """Ends the tracked run; it is opened again by the next call."""
        ...


def require_package(tracker: str, package: str, command: str) -> None:
    """Raises InputError if a tracker's package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"trackers: {tracker} is not installed; run: {command}")


class InBackground:
    """A `Tracker` that hands calls to a service in a thread and never fails or waits long.

    The first failure is reported in one line; after some in a row the service is given up.
    """

    def __init__(self, name: str, service: Service, patience: float = PATIENCE):
        """Names the service in messages; `patience` is in seconds."""
        self._name, self._service, self._patience = name, service, patience
        self._calls: queue.Queue[Callable[[], None] | threading.Event] = queue.Queue(_PENDING)
        self._thread: threading.Thread | None = None
        self._warned = self._given_up = False
        self._failures = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._call(partial(self._service.log, step, dict(values)))

    def show(self, step: int, name: str, path: Path) -> None:
        """See `Tracker.show`; other files than pictures and clips are not shown."""
        if path.suffix.lower() in (*PICTURES, *CLIPS):
            self._call(partial(self._service.show, step, name, path))

    def close(self) -> None:
        """See `Tracker.close`; gives up what takes longer than the patience."""
        if self._thread is None or self._given_up:
            return
        done = threading.Event()
        self._call(self._service.close)
        self._call(done)
        if not done.wait(self._patience):
            self._give_up(f"took longer than {self._patience:.0f} s to finish")

    def _call(self, call: Callable[[], None] | threading.Event) -> None:
        if not first_process() or self._given_up:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"does not answer, and {_PENDING:,} calls wait")

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if isinstance(call, threading.Event):
                call.set()
            elif not self._given_up:
                self._attempt(call)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._failures = 0
        except Exception as error:  # whatever a service raises, the run goes on
            self._failures += 1
            self._given_up = self._failures >= _FAILURES
            self._warn(reason_of(error))

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            print(
                f"warning: trackers: {self._name}: {' '.join(reason.split())[:300]}; training goes "
                "on, and metrics.jsonl has the figures",
                file=sys.stderr,
                flush=True,
            )


class TrackedRuns:
    """trackers.json in the run folder: the id of the tracked run by service and place.

    A resumed run continues its tracked runs; a run from the start begins new ones.
    """

    def __init__(self, folder: Path, resumed_at: int):
        self._path = folder / "trackers.json"
        self._resumed = resumed_at > 0

    def known(self, place: str) -> str | None:
        """Returns the id of the tracked run to continue; None for a new one."""
        found = (read_json(self._path) or {}).get(place) if self._resumed else None
        return None if found is None else str(found)

    def keep(self, place: str, run: str) -> None:
        """Stores the id of a tracked run, which later starts and calls continue."""
        write_json(self._path, (read_json(self._path) or {}) | {place: run})
        self._resumed = True


def new_id() -> str:
    """Returns a random id of eight hexadecimal digits."""
    return secrets.token_hex(4)
