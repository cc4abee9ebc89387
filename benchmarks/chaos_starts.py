"""Starts programs of the project quickly: forked from a server that has imported them already.

What a start imports takes longer than a tiny run trains. The server has no device yet, so that each
program has its own, as one that is started from a shell.
"""

import contextlib
import importlib
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos_phases import Aim, install

PROGRAMS = {"train": "alload_jax.run", "alload": "alload_jax.cli"}
"""Modules with the function `entry`, by the name of the program."""
_PRELOADED = [*PROGRAMS.values(), "alload_jax.run.training", "orbax.checkpoint", "grain"]
_PRELOADED += ["chaos_phases", "tensorboardX"]  # which imports PyTorch where it is installed
ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": re.sub(r"\S+device_count=\d+", "", os.environ.get("XLA_FLAGS", "")),
}
"""Tiny programs compile far longer than they compute, each once; a process has one device."""
_POLL_SECONDS = 0.004


class Started:
    """A program that runs.

    Attributes:
      pid: number of its process.
      out: file of its stdout and, with another ending, of its stderr.
      marker: file of the phases that a run of `train` notes.
    """

    def __init__(self, process: Any, out: Path):
        self._process, self.out, self.marker = process, out, out.with_suffix(".phases")
        self.pid: int = process.pid

    def status(self) -> int | None:
        """The exit status, negative after a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """Waits for the end and returns the status; None after so many seconds."""
        self.wait_for(lambda: False, seconds)
        return self.status()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition, the program's end or so many seconds; whether the first came."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.status() is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def kill(self) -> None:
        """Kills it, unless it has ended, and waits for its end."""
        if self.status() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait(60)

    def wait_for_children(self, seconds: float) -> int:
        """Waits until no process that it has started is left; kills and counts those that are."""
        end = time.monotonic() + seconds
        while (left := _group(self.pid)) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return self.out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has printed to stderr."""
        return self.out.with_suffix(".err").read_text(errors="replace")


class Starter:
    """Starts programs; their output lies in files of a folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._count = folder, 0
        os.environ.update(ENVIRONMENT)  # for the server
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, "chaos_starts"])

    def start(self, program: str, arguments: Sequence[str], aim: Aim | None = None) -> Started:
        """Starts a program of `PROGRAMS`.

        Args:
          program: its name.
          arguments: its command line.
          aim: where a run of `train` interrupts itself.
        """
        self._count += 1
        out = self._folder / f"{self._count}.out"
        out.touch()
        out.with_suffix(".err").touch()
        out.with_suffix(".phases").unlink(missing_ok=True)  # of an earlier campaign
        process = self._context.Process(
            target=_enter, args=(program, tuple(arguments), str(out), aim and tuple(aim))
        )
        process.start()
        return Started(process, out)


def _group(pid: int) -> list[int]:
    """The processes that live in the group of a program."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, group = place.read_text().rpartition(")")[2].split()[:3]
            found += [int(place.parent.name)] if int(group) == pid and state != "Z" else []
    return found


def _enter(program: str, arguments: tuple[str, ...], out: str, aim: tuple[Any, ...] | None) -> None:
    """Becomes the program, in a forked process with a group of its own."""
    os.setpgid(0, 0)
    os.chdir(Path(out).parents[1])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, flags), 1)
    os.dup2(os.open(str(Path(out).with_suffix(".err")), flags), 2)
    sys.argv = ["train.py" if program == "train" else program, *arguments]
    if program == "train":
        install(Path(out).with_suffix(".phases"), aim)
    importlib.import_module(PROGRAMS[program]).entry()
