"""Several processes as one run: how they find each other, and what they tell each other."""

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import jax

from alload_jax.errors import USER_ERRORS, InputError, run_command
from alload_jax.sharding.coordination import (
    JOIN_SECONDS,
    Board,
    Member,
    meet,
    member_by_launcher,
)
from alload_jax.sharding.relay import host_and_port
from alload_jax.sharding.watch import Watch

T = TypeVar("T")

_SILENT_SECONDS = 60
"""After which a process that waits for the others says so."""
_APPEARS_SECONDS = 60
"""In which a file that one host has written is there for the others: NFS caches folders."""


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of a run. A launcher says who they are (see docs/clusters.md), or three flags.

    Attributes:
      coordinator: host:port of process 0, on which it listens and which all others reach.
      processes: how many there are.
      process: which this one is, from 0.
      detect: whether Slurm, Open MPI or Kubernetes is asked when nothing is given.
      lost_after: seconds of silence after which a process counts as lost, and the others end.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    detect: bool = True
    lost_after: float = 30.0

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in ("coordinator", "processes", "process")}
        missing = [f"cluster.{name}" for name, value in parts.items() if value is None]
        if 0 < len(missing) < len(parts):
            raise InputError(
                f"{' and '.join(missing)} must be given too; give cluster.coordinator, processes "
                "and process, or none of them, and the launcher is asked"
            )
        if self.coordinator is not None and not re.fullmatch(r"\S+:\d+", self.coordinator):
            raise InputError(f"cluster.coordinator is {self.coordinator!r}; give it as host:port")
        if self.coordinator is not None and not 0 < host_and_port(self.coordinator)[1] < 2**16:
            raise InputError(f"cluster.coordinator is {self.coordinator}; ports are 1 to 65535")
        if self.processes is not None and self.processes < 1:
            raise InputError(f"cluster.processes is {self.processes}; it must be at least 1")
        if self.process is not None and not 0 <= self.process < (self.processes or 1):
            raise InputError(
                f"cluster.process is {self.process}; it must be 0 to {(self.processes or 1) - 1}, "
                "one less than cluster.processes at most"
            )
        if self.lost_after < 2:
            raise InputError(f"cluster.lost_after is {self.lost_after}; it must be at least 2")


def first_process() -> bool:
    """Whether this process is the one that prints and writes files; a lone process is."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def join_cluster(config: ClusterConfig) -> "Cluster":
    """Meets the other processes, if there are any; call it before anything touches a device.

    Raises:
      InputError: the launcher does not say enough, or not all processes came.
    """
    member = _member(config)
    if member is None or member.processes == 1:
        return Cluster()
    try:
        with _patience(member):
            meet(member, heartbeat_seconds=max(100.0, 4 * config.lost_after))
    except RuntimeError as error:
        raise InputError(_not_met(member, _first_line(error))) from error
    if member.process != 0:  # not only Python's own lines: gloo prints too
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return Cluster(member, config.lost_after)


class Cluster:
    """This process among those of the run; in most runs there is no other.

    Leave it by `with`. If a `with` is left by an error, the process says why and ends: at its
    regular end JAX would wait for the others.
    """

    def __init__(self, member: Member | None = None, lost_after: float = 30.0):
        """After `meet`; without a member this process is alone."""
        self.processes = member.processes if member else 1
        self._process = member.process if member else 0
        self._board = Board() if member else None
        self._watch = Watch(self._board, member, lost_after) if self._board and member else None
        self._turn = 0
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._watch is None:
            return
        if error is not None:
            self._watch.fail(error)
            self._watch.leave(_explained(error) if self._status is None else self._status)
        self.gather(None)
        self._watch.close()
        jax.distributed.shutdown()

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Lets the others and the user know of an error before anything here waits for them."""
        try:
            yield
        except BaseException as error:
            if self._watch:
                self._watch.fail(error)
                self._status = _explained(error)
            raise

    def on_loss(self, remedy: Callable[[], str]) -> None:
        """What to advise when a process is lost."""
        if self._watch:
            self._watch.remedy = remedy

    def reached(self, step: int) -> None:
        """Notes the step under way, from 1."""
        if self._watch:
            self._watch.step = step

    def tell(self, find: Callable[[], T]) -> T:
        """What the first process finds, told to all; a JSON value. The others wait for it."""
        if self._board is None:
            return find()
        self._turn += 1
        key = f"told/{self._turn}"
        if self._process == 0:
            self._board.put(key, json.dumps(find()))
        return json.loads(self._board.wait_for(key))

    def gather(self, value: Any) -> list[Any]:
        """What each process has, by process; JSON values. All wait for the last."""
        if self._board is None:
            return [value]
        self._turn += 1
        self._board.put(f"gathered/{self._turn}/{self._process}", json.dumps(value))
        keys = [f"gathered/{self._turn}/{process}" for process in range(self.processes)]
        return [json.loads(self._board.wait_for(key)) for key in keys]

    def require_same(self, values: Mapping[str, Any], remedy: str) -> None:
        """Makes sure that all processes have the same; waits for all.

        Args:
          values: JSON values by name.
          remedy: what to do where they differ.

        Raises:
          InputError: a process has another value than the first, or counts other processes.
        """
        expected = self.tell(lambda: self.processes)
        if expected != self.processes:
            raise InputError(
                f"cluster.processes is {self.processes}, but {expected} in process 0; start all "
                "processes with the same"
            )
        first, *others = self.gather(values)
        for process, theirs in enumerate(others, 1):
            for name in sorted(first.keys() | theirs.keys()):
                value, expected = theirs.get(name), first.get(name)
                if value != expected:
                    raise InputError(
                        f"process {process} of {self.processes}: {name} is {value!r}, but "
                        f"{expected!r} in process 0; {remedy}"
                    )

    def require_shared(self, name: str, folder: Path) -> None:
        """Makes sure that all processes see what the first writes to a folder; waits for all.

        Args:
          name: of the folder's key in the config.
          folder: made if need be.

        Raises:
          InputError: a process doesn't see it.
          OSError: the first cannot write there.
        """
        if self.processes == 1:
            return
        mark = folder / self.tell(partial(_mark, folder))
        seen = self.gather(_appears(mark))
        if self._process == 0:
            mark.unlink()
        if False in seen:
            raise InputError(
                f"{name} is {folder}: what process 0 writes there is not there for process "
                f"{seen.index(False)} of {self.processes}; give all hosts one file system, at the "
                "same path"
            )

    def report(self, step: int, problems: tuple[str, ...]) -> None:
        """Puts down what this process has met in a step, before the others are told to look."""
        if self._board and problems:
            self._board.put(f"problems/{step}/{self._process}", json.dumps(problems))

    def reported(self, step: int) -> tuple[str, ...]:
        """What all processes have put down of a step, by process, each text once."""
        assert self._board is not None
        found = self._board.under(f"problems/{step}")
        texts = [text for process in sorted(found, key=int) for text in json.loads(found[process])]
        return tuple(dict.fromkeys(texts))


def _mark(folder: Path) -> str:
    """Writes an empty file of a new name, which it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".shared-{uuid.uuid4().hex}"
    mark.touch()
    return mark.name


def _appears(mark: Path) -> bool:
    end = time.monotonic() + _APPEARS_SECONDS
    while not mark.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def _patience(member: Member) -> Iterator[None]:
    """Says after a while that it waits, and in the end gives up, where JAX would abort."""

    def say() -> None:
        reason = _reason_to_wait(member)
        print(f"waiting for the other processes at {member.coordinator}{reason}", file=sys.stderr)

    def give_up() -> None:
        reason = f"within {JOIN_SECONDS} seconds{_reason_to_wait(member)}"
        print(f"error: {_not_met(member, reason)}", file=sys.stderr, flush=True)
        os._exit(2)

    timers = [Timer(_SILENT_SECONDS, say), Timer(JOIN_SECONDS, give_up)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        with _interruptible():
            yield
    finally:
        for timer in timers:
            timer.cancel()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process though its main thread waits in C++, where no handler of Python runs.

    The signal's number comes through a socket as well, which another thread reads.
    """
    told, tell = socket.socketpair()
    tell.setblocking(False)

    def read() -> None:
        while numbers := told.recv(64):
            if signal.SIGINT in numbers:
                print("interrupted", file=sys.stderr, flush=True)
                os._exit(130)

    before = signal.set_wakeup_fd(tell.fileno())
    reader = Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        tell.close()
        reader.join()
        told.close()


def _reason_to_wait(member: Member) -> str:
    host, _ = host_and_port(member.coordinator)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f": {host}: {error.strerror}"
    return ""


def _not_met(member: Member, reason: str) -> str:
    return (
        f"process {member.process} of {member.processes} did not meet the others at "
        f"{member.coordinator} ({reason}); start each of them once, with its own cluster.process, "
        "and choose a port of the first one's host that is open to all"
    )


def _member(config: ClusterConfig) -> Member | None:
    if config.coordinator is not None:
        assert config.processes is not None
        assert config.process is not None
        return Member(config.coordinator, config.processes, config.process)
    launcher = _launcher() if config.detect else None
    if launcher is None:
        return None
    remedy = (
        "give --cluster.coordinator, --cluster.processes and --cluster.process, or "
        "--cluster.detect false if this process runs alone"
    )
    try:
        member = member_by_launcher()
    except RuntimeError as error:
        raise InputError(f"{launcher}: {_first_line(error)}; {remedy}") from error
    if member is None:
        raise InputError(f"{launcher}: JAX cannot tell who the processes are; {remedy}")
    return member


def _launcher() -> str | None:
    """Who started several processes; None for a lone one, in a job or not."""
    # Not SLURM_NTASKS: an allocation has it too, in whose shell a lone process may be started.
    if _tasks("SLURM_STEP_NUM_TASKS") > 1:
        return "Slurm"
    if _tasks("OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys():
        return "Kubernetes"
    return None


def _tasks(variable: str) -> int:
    text = os.environ.get(variable, "1")
    if not text.isdecimal():
        raise InputError(
            f"{variable} is {text!r} in the environment, where a launcher puts a number; unset it, "
            "or give --cluster.detect false"
        )
    return int(text)


def _explained(error: BaseException) -> int:
    """Prints an error as a command does; returns the exit status."""
    if not isinstance(error, USER_ERRORS):
        traceback.print_exception(error)
        return 1

    def fail(_: list[str]) -> NoReturn:
        raise error

    return run_command(fail, sys.argv)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
