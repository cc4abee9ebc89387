"""Connects this process to JAX's coordination service, which process 0 hosts.

This module uses a private part of JAX: `jax.distributed` detects the launcher but has no public way
to ask what it found.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from threading import Event
from typing import NamedTuple

import jax
from jax._src import clusters

from alload_jax.distributed.coordinator_proxy import CoordinatorProxy, host_and_port
from alload_jax.errors import InputError

CONNECT_SECONDS = 300
"""How long the processes wait for each other at the start."""
_EXTRA_SECONDS = 60
"""How much longer JAX waits: its time-out aborts the process from C++, so ours must come first."""


class ProcessInfo(NamedTuple):
    """The identity of a process in a run of several; the arguments of `jax.distributed.initialize`.

    Attributes:
      coordinator_address: host:port on which process 0 listens.
      num_processes: number of processes of the run.
      process_id: number of this process, from 0.
      local_device_ids: the host's devices that this process uses; None for all visible ones.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None


def process_info_from_launcher() -> ProcessInfo | None:
    """What JAX finds in the environment of Slurm, Open MPI or Kubernetes; None if incomplete.

    Raises:
      RuntimeError: Kubernetes does not answer.
    """
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, CONNECT_SECONDS
    )
    if None in found[:3]:
        return None
    return ProcessInfo(*found)  # type: ignore[arg-type]


def connect(process: ProcessInfo, heartbeat_seconds: float, gone: Event | None = None) -> None:
    """Starts or joins the coordination service; returns when all processes are connected.

    Args:
      process: this process.
      heartbeat_seconds: silence of one process after which JAX itself ends all processes.
      gone: set when process 0 had answered this one and has ended.

    Raises:
      InputError: process 0 cannot listen on its port.
      RuntimeError: the processes did not connect and JAX reported it instead of aborting.
    """
    address = process.coordinator_address
    if process.process_id == 0:
        _require_free(address)
        _tell_who_can_connect(address)
    else:
        address = CoordinatorProxy(address, gone).address
    # The preemption service would install its own handler of SIGTERM in place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        process.num_processes,
        process.process_id,
        process.local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address(process.coordinator_address),
        initialization_timeout=CONNECT_SECONDS + _EXTRA_SECONDS,
        heartbeat_timeout_seconds=round(heartbeat_seconds),
        shutdown_timeout_seconds=60,
    )


def is_loopback(address: str) -> bool:
    """Whether only this host can mean that host:port, so that no other needs to reach it."""
    host, _ = host_and_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_address(address: str) -> str | None:
    """Where process 0 listens: at the one address of this host that a host:port means.

    None for what JAX chooses: JAX_COORDINATOR_BIND_ADDRESS of the environment, or all interfaces.
    It is where the host has several addresses, none of them is this host's, or it is the loopback,
    as in the /etc/hosts of some systems, although others reach this host by that name.
    """
    if is_loopback(address):
        return address
    host, port = host_and_port(address)
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        (own,) = {ipaddress.ip_address(each) for each in found}
        family = socket.AF_INET if own.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((str(own), 0))
    except (OSError, ValueError):
        return None
    if own.is_loopback or own.is_unspecified or _BIND_ADDRESS in os.environ:
        return None
    return f"[{own}]:{port}" if own.version == 6 else f"{own}:{port}"


_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"


def _tell_who_can_connect(address: str) -> None:
    """Says that JAX asks nobody who connects, unless only this host can, or certificates do."""
    if is_loopback(address) or getattr(jax.config, "jax_mtls_ca_file", None):
        return
    place = bind_address(address) or os.environ.get(_BIND_ADDRESS, "all interfaces")
    print(
        f"note: process 0 listens on {place}, where whoever connects can read the config and end "
        "the run; let only the hosts of the run reach it (docs/many-gpus.md)",
        file=sys.stderr,
        flush=True,
    )


def _require_free(address: str) -> None:
    try:
        socket.create_server(("", host_and_port(address)[1])).close()
    except OSError as error:
        raise InputError(
            f"cluster.coordinator is {address}, but process 0 cannot listen there "
            f"({error.strerror}); stop another process 0 that uses the port, or choose a port that "
            "is free and that all hosts can reach"
        ) from error
