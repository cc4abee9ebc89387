"""How the processes of a run find each other."""

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread, Timer

from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.coordination import JOIN_SECONDS, Member, meet, member_by_launcher
from alload_jax.distributed.coordinator_proxy import host_and_port
from alload_jax.errors import InputError

_SILENT_SECONDS = 60
"""After which a process that waits for the others says so."""


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


def initialize(config: ClusterConfig) -> Cluster:
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
