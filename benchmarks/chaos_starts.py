"""Starts programs of the project quickly: forked from a server that has imported them already.

What a start imports takes longer than a tiny run trains. The server has no device yet, so that each
program has its own, as one that is started from a shell.
"""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROGRAMS = {"train": "alload_jax.run.main", "alload": "alload_jax.cli"}
"""Modules with the function `entry`, by the name of the program."""
_PRELOADED = [*PROGRAMS.values(), "alload_jax.run.training", "orbax.checkpoint", "grain"]
_PRELOADED += ["tensorboardX"]  # which imports PyTorch where it is installed
_ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "",
}
"""Tiny programs compile far longer than they compute, each once; a process has one device."""
_POLL_SECONDS = 0.004


class Started:
    """A program that runs.

    Attributes:
      pid: number of its process.
      out: file of its stdout and, with another ending, of its stderr.
    """

    def __init__(self, process: Any, out: Path):
        self._process, self.out = process, out
        self.pid: int = process.pid

    def status(self) -> int | None:
        """The exit status, negative after a signal; None while it runs."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
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

    def signal(self, number: int) -> None:
        """Sends a signal, unless the program has ended."""
        if self.status() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it and waits for its end."""
        self.signal(signal.SIGKILL)
        self.wait(60)

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
        os.environ.update(_ENVIRONMENT)  # for the server
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, "chaos_starts"])

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        from_shell: bool = False,
    ) -> Started:
        """Starts a program of `PROGRAMS`.

        Args:
          program: its name.
          arguments: its command line.
          environment: variables to set.
          from_shell: start a new interpreter, whose imports can be interrupted too.
        """
        self._count += 1
        out = self._folder / f"{self._count}.out"
        out.touch()
        out.with_suffix(".err").touch()
        if from_shell:
            return Started(self._from_shell(program, arguments, dict(environment or {}), out), out)
        process = self._context.Process(
            target=_enter, args=(program, tuple(arguments), dict(environment or {}), str(out))
        )
        process.start()
        return Started(process, out)

    def _from_shell(
        self, program: str, arguments: Sequence[str], environment: dict[str, str], out: Path
    ) -> Any:
        code = f"from {PROGRAMS[program]} import entry; entry()"
        with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdout=stdout,
                stderr=stderr,
                cwd=self._folder.parent,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            )


def _enter(program: str, arguments: tuple[str, ...], environment: dict[str, str], out: str) -> None:
    """Becomes the program, in a forked process."""
    os.environ.update(environment)
    os.chdir(Path(out).parents[1])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, flags), 1)
    os.dup2(os.open(str(Path(out).with_suffix(".err")), flags), 2)
    sys.argv = ["train.py" if program == "train" else program, *arguments]
    importlib.import_module(PROGRAMS[program]).entry()
