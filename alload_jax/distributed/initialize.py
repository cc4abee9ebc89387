"""Starts a run of several processes: finds out who they are and connects them."""

import os
import re
import socket
import sys
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.coordination import (
    CONNECT_SECONDS,
    SERVICE_FAILED,
    ProcessInfo,
    agree_on_seal,
    connect,
    host_and_port,
    process_info_from_launcher,
    takes_connections,
)
from alload_jax.errors import InputError, first_line, print_stderr, require_fields, require_positive
from alload_jax.processes import lasting

_SILENT_SECONDS = 60
"""How long a process waits for the others before it prints that it is waiting."""
_SECONDS_BETWEEN_LOOKS = 2.0
_MOST_REFUSED = 2
"""Connections in a row that process 0 may refuse, once it has taken one, before it has ended."""


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of a run: detected from the launcher, or given by three flags.

    See docs/many-gpus.md.

    Attributes:
      coordinator: host:port on which process 0 listens and which all others can reach.
      processes: number of processes.
      process: number of this process, from 0.
      detect: whether to ask torchrun, Slurm, Open MPI or Kubernetes (also Kubeflow Trainer) if the
        three flags are not given.
      lost_after: seconds of silence after which a process counts as lost and the others end. One
        that is killed counts as lost at once if others run on its host.
      certificates: folder with cert.pem, key.pem and ca.pem, without which nobody can join or read
        the run; needs JAX 0.11.2. See docs/many-gpus.md.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    detect: bool = True
    lost_after: float = 30.0
    certificates: str | None = None

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in ("coordinator", "processes", "process")}
        missing = [f"cluster.{name}" for name, value in parts.items() if value is None]
        if 0 < len(missing) < len(parts):
            raise InputError(
                f"{' and '.join(missing)} must be given too; give all of cluster.coordinator, "
                "processes and process, or none of them to detect the launcher"
            )
        if self.coordinator is not None and not re.fullmatch(r"\S+:\d+", self.coordinator):
            raise InputError(f"cluster.coordinator is {self.coordinator!r}; give it as host:port")
        if self.coordinator is not None and not 0 < host_and_port(self.coordinator)[1] < 2**16:
            raise InputError(f"cluster.coordinator is {self.coordinator}; ports are 1 to 65535")
        require_positive("cluster.", self, "processes")
        count = self.processes or 1
        bound = f"0 to {count - 1} (cluster.processes - 1)"
        require_fields("cluster.", self, "process", lambda value: 0 <= value <= count - 1, bound)
        require_fields("cluster.", self, "lost_after", lambda value: value >= 2, "at least 2")


def initialize(config: ClusterConfig, folder: str | Path) -> Cluster:
    """Connects the processes of the run, if there are several.

    Call it before anything uses a device.

    Args:
      config: the processes.
      folder: the run folder, where they share a secret.

    Raises:
      InputError: the launcher's information is incomplete, not all processes connected, or they do
        not share the run folder.
    """
    process = _process_info(config)
    if process is None or process.num_processes == 1:
        if config.certificates:
            raise InputError(
                f"cluster.certificates is {config.certificates}, and the run has one process, "
                "which talks to nobody; leave it out, or name the others by cluster.coordinator"
            )
        return Cluster()
    certificates = Path(config.certificates) if config.certificates else None
    _connect(process, max(100.0, 4 * config.lost_after), certificates)
    # Gloo prints from C++ to file descriptor 1, which prints of process 0 then leave.
    # A notebook's stdout is not that file, and stays.
    if process.process_id == 0 and (out := sys.__stdout__) is sys.stdout and out:
        out.flush()
        sys.stdout = lasting(os.dup(1), out.encoding)
    if process.process_id != 0 or "NCCL_DEBUG" not in os.environ:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    seal = agree_on_seal(process.process_id, process.num_processes, Path(folder))
    return Cluster(process, config.lost_after, seal)


def _connect(process: ProcessInfo, heartbeat_seconds: float, certificates: Path | None) -> None:
    """Connects in a thread, since JAX waits in C++ code, which Ctrl-C does not end.

    Prints a notice if the wait is long.

    Raises:
      InputError: as `connect`; the others do not come in time, before JAX would abort the process;
        or process 0 has ended.
    """
    address, connected = process.coordinator_address, Future[None]()

    def run() -> None:
        try:
            connect(process, heartbeat_seconds, certificates)
            connected.set_result(None)
        except Exception as error:
            connected.set_exception(error)

    Thread(target=run, daemon=True).start()
    began, silent, answered, refused = time.monotonic(), True, False, 0
    while not wait([connected], _SECONDS_BETWEEN_LOOKS).done:
        waited, reason = time.monotonic() - began, ""
        taken = takes_connections(address)
        answered, refused = answered or taken is True, refused + 1 if taken is False else 0
        if answered and refused > _MOST_REFUSED:
            reason = "because process 0 has ended"
        elif SERVICE_FAILED.is_set():
            reason = "because process 0 refuses it"
        elif waited > CONNECT_SECONDS:
            reason = f"within {CONNECT_SECONDS} seconds{_resolution_error(process)}"
        if reason:
            raise _not_connected(process, reason)
        if silent and waited > _SILENT_SECONDS:
            silent = False
            print_stderr(
                f"waiting for the other processes at {address}{_resolution_error(process)}"
            )
    try:
        connected.result()
    except RuntimeError as error:
        raise _not_connected(process, first_line(error)) from error


def _resolution_error(process: ProcessInfo) -> str:
    """Why the coordinator's host name cannot be resolved; "" if it can."""
    host, _ = host_and_port(process.coordinator_address)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f": {host}: {error.strerror}"
    return ""


def _not_connected(process: ProcessInfo, reason: str) -> InputError:
    return InputError(
        f"process {process.process_id} of {process.num_processes} could not connect to the others "
        f"at {process.coordinator_address} ({reason}); start each process once, with its own "
        "cluster.process, and choose a port of process 0's host that all hosts can reach"
    )


_OF_KUBERNETES = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"}


def _process_info(config: ClusterConfig) -> ProcessInfo | None:
    if config.coordinator is not None:
        assert config.processes is not None
        assert config.process is not None
        return ProcessInfo(config.coordinator, config.processes, config.process)
    by_variables = config.detect and "JAX_NUM_PROCESSES" in os.environ
    if by_variables and _task_count("JAX_NUM_PROCESSES") > 1:
        return _process_of_variables()
    # What torchrun starts in a step of Slurm is more than the step's tasks. Scripts that set only
    # ranks leave it to Slurm which GPUs a task has.
    count = _task_count("WORLD_SIZE") if config.detect else 1
    if count > 1 and "RANK" in os.environ:
        is_task = count == _task_count("SLURM_STEP_NUM_TASKS")
        if "LOCAL_RANK" in os.environ or not is_task:
            return _process_of_torchrun()
    # Not SLURM_NTASKS: it is also set in the shell of an allocation, where a single process may
    # be started by hand.
    if config.detect and _task_count("SLURM_STEP_NUM_TASKS") > 1:
        launcher = "Slurm"
    elif config.detect and _task_count("OMPI_COMM_WORLD_SIZE") > 1:
        launcher = "Open MPI"
    elif config.detect and not by_variables and os.environ.keys() >= _OF_KUBERNETES:
        launcher = "Kubernetes"
    elif count > 1:
        raise InputError(
            f"WORLD_SIZE is {count}, but RANK is not set, which says which of "
            f"the processes this is; start it by torchrun, or {_REMEDY}"
        )
    else:
        return None
    try:
        process = process_info_from_launcher()
    except RuntimeError as error:
        raise InputError(f"{launcher}: {first_line(error)}; {_REMEDY}") from error
    if process is None:
        raise InputError(f"{launcher}: JAX cannot detect the processes of the run; {_REMEDY}")
    return process


def _process_of_variables() -> ProcessInfo:
    """The process by the variables that Kubeflow Trainer sets for JAX: one for each host."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, count, process = (os.environ.get(name, "") for name in names)
    try:
        ClusterConfig(address, int(count), int(process))
    except (InputError, ValueError) as error:
        said = ", ".join(f"{name} is {os.environ.get(name)!r}" for name in names)
        raise InputError(f"{said}, which is no process of a run; {_REMEDY}") from error
    return ProcessInfo(address, int(count), int(process))


def _process_of_torchrun() -> ProcessInfo:
    """The process by the variables that torchrun, and launchers like it, set for PyTorch.

    Where torchrun itself listens on MASTER_PORT, JAX takes the next port. Processes of one host
    have a GPU each.
    """
    count, process = _task_count("WORLD_SIZE"), _task_count("RANK")
    host, port = os.environ.get("MASTER_ADDR", ""), _task_count("MASTER_PORT", "0")
    port += os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not host or not 0 < port < 2**16 or process >= count:
        raise InputError(
            f"WORLD_SIZE is {count}, RANK {process}, MASTER_ADDR {host!r} and MASTER_PORT "
            f"{os.environ.get('MASTER_PORT', '')!r}, which is no process of a run; {_REMEDY}"
        )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    alone = _task_count("LOCAL_WORLD_SIZE") == 1
    return ProcessInfo(address, count, process, None if alone else [_task_count("LOCAL_RANK", "0")])


_REMEDY = (
    "give --cluster.coordinator, --cluster.processes and --cluster.process, or "
    "--cluster.detect false to run this process alone"
)


def _task_count(variable: str, default: str = "1") -> int:
    text = os.environ.get(variable, default)
    if not text.isdecimal():
        raise InputError(
            f"environment variable {variable} is {text!r}; it must be a number, as launchers set "
            "it; unset it, or give --cluster.detect false"
        )
    return int(text)
