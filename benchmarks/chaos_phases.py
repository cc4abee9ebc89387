"""What a run is doing, noted by the run itself, and its interruption in a chosen phase.

`install` wraps functions of the project in the process of a run. The run keeps a file, the marker,
with the phases that are open, so that what was hit is known whatever was aimed at.
"""

import contextlib
import functools
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orbax.checkpoint import AsyncCheckpointer

_FUNCTIONS = {
    "restore": "alload_jax.training.restore:state_of_checkpoint",
    "compile": "alload_jax.run.training:_compile",
    "steps": "alload_jax.training.loop:Loop._step",
    "validation": "alload_jax.training.callbacks.validating:Validating.act",
    "sampling": "alload_jax.training.callbacks.drawing:Drawing.act",
    "end": "alload_jax.run.training:_finish",
}
"""The function that a phase is the time of. Until the first is called, a run is in `start`."""
PHASES = ("start", *_FUNCTIONS, "saving", "commit")
"""Saving is from the call of Orbax until its thread commits: metadata, checksums and the rename."""
_WIDTH = 256


class Aim(NamedTuple):
    """Where a run interrupts itself.

    Attributes:
      phase: one of `PHASES`.
      time: at which time that the phase begins, from 1.
      delay: seconds after that; where the phase is shorter, the run interrupts itself at its end.
      signal: name of the signal.
    """

    phase: str
    time: int
    delay: float
    signal: str


class Marked(NamedTuple):
    """What a marker says.

    Attributes:
      phases: those that are open.
      signal: name of the signal that the run has sent itself; empty for none.
    """

    phases: tuple[str, ...] = ()
    signal: str = ""


def read_marker(marker: Path) -> Marked:
    """What a run has noted last; nothing if it has not begun."""
    try:
        found = json.loads(marker.read_text())
    except (FileNotFoundError, ValueError):
        return Marked()
    return Marked(tuple(found["phases"]), found["signal"])


def read_seconds(marker: Path) -> dict[str, list[float]]:
    """How long each phase took, each time, in a run of that marker."""
    found: dict[str, list[float]] = {}
    for line in marker.with_suffix(".seconds").read_text().splitlines():
        phase, seconds = line.split()
        found.setdefault(phase, []).append(float(seconds))
    return found


class Phases:
    """The open phases of this process."""

    def __init__(self, marker: Path, aim: Aim | None):
        self._aim, self._times, self._signalled = aim, 0, False
        self._open: dict[str, float] = {}
        self._lock = threading.RLock()
        self._marker = os.open(marker, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        self._seconds = marker.with_suffix(".seconds").open("a", buffering=1)
        self.open("start")

    def open(self, phase: str) -> None:
        """Notes that a phase begins; if it is the one aimed at, the time of its delay begins."""
        with self._lock:
            if phase != "start":
                self.close("start")
            self._open[phase] = time.monotonic()
            self._note("")
            if self._aim and phase == self._aim.phase:
                self._times += 1
                if self._times == self._aim.time:
                    threading.Thread(target=self._wait, args=(self._aim,), daemon=True).start()

    def close(self, phase: str) -> None:
        """Notes that a phase is over, if it is open."""
        with self._lock:
            if self._aim and phase == self._aim.phase and self._times == self._aim.time:
                self._interrupt(self._aim.signal)
            if (began := self._open.pop(phase, None)) is not None:
                self._seconds.write(f"{phase} {time.monotonic() - began:.4f}\n")
                self._note("")

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Opens a phase for the time of a context."""
        self.open(phase)
        try:
            yield
        finally:
            self.close(phase)

    def _wait(self, aim: Aim) -> None:
        time.sleep(aim.delay)
        self._interrupt(aim.signal)

    def _interrupt(self, name: str) -> None:
        with self._lock:  # no phase begins or ends between the note and the signal
            if not self._signalled:
                self._note(name)
                os.kill(os.getpid(), signal.Signals[name])

    def _note(self, name: str) -> None:
        if not self._signalled:
            text = json.dumps({"phases": list(self._open), "signal": name})
            os.pwrite(self._marker, text.ljust(_WIDTH).encode(), 0)
            self._signalled = bool(name)


def install(marker: Path, aim: Sequence[Any] | None) -> None:
    """Wraps the functions of this process that phases are made of.

    Args:
      marker: file to note the open phases in.
      aim: the fields of an `Aim`; None for a run that is not interrupted.
    """
    phases = Phases(marker, None if aim is None else Aim(*aim))
    for phase, place in _FUNCTIONS.items():
        _wrap(place, functools.partial(_in_phase, phases, phase))
    _wrap("orbax.checkpoint:CheckpointManager.save", functools.partial(_before, phases, "saving"))

    make = AsyncCheckpointer._make_on_commit_callback

    def committing(*arguments: Any, **options: Any) -> Callable[[], None]:
        commit = make(*arguments, **options)

        def callback() -> None:
            phases.close("saving")
            with phases.during("commit"):
                commit()

        return callback

    AsyncCheckpointer._make_on_commit_callback = committing


def _wrap(place: str, wrapped: Callable[[Any], Any]) -> None:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, owner)
    setattr(owner, name, wrapped(getattr(owner, name)))


def _in_phase(phases: Phases, phase: str, function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with phases.during(phase):
            return function(*arguments, **options)

    return call


def _before(phases: Phases, phase: str, function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        phases.open(phase)
        return function(*arguments, **options)

    return call
