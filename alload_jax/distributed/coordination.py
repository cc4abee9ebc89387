"""JAX's coordination service: how processes meet, and the key-value store they share.

The one file that reaches behind JAX's public API: `jax.distributed` starts the service, but neither
says what a launcher told it nor hands out the store.
"""

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax._src import clusters, distributed

from alload_jax.distributed.coordinator_proxy import CoordinatorProxy, host_and_port
from alload_jax.errors import InputError

JOIN_SECONDS = 300
"""How long processes wait for each other at the start."""
_LONGER = 60
"""By so many seconds than that JAX waits, which aborts from C++ in the end."""
_FOREVER = 30 * 24 * 3600 * 1000  # milliseconds; whoever waits is ended by its watch if need be


class Member(NamedTuple):
    """A process of a cluster.

    Attributes:
      coordinator: host:port at which process 0 is met.
      processes: how many there are.
      process: which this one is.
      local_devices: numbers of the host's devices that it takes; None for all that it sees.
    """

    coordinator: str
    processes: int
    process: int
    local_devices: Sequence[int] | None = None


def member_by_launcher() -> Member | None:
    """What JAX finds in the environment of Slurm, Open MPI or Kubernetes; None if it is not enough.

    Raises:
      RuntimeError: Kubernetes does not answer.
    """
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, JOIN_SECONDS
    )
    if None in found[:3]:
        return None
    return Member(*found)  # type: ignore[arg-type]


def meet(member: Member, heartbeat_seconds: float) -> None:
    """Waits until all processes are there.

    Args:
      member: this process.
      heartbeat_seconds: after which JAX ends every process because one is silent.

    Raises:
      InputError: process 0 cannot listen at its port.
      RuntimeError: they did not meet, as far as JAX says so and does not abort.
    """
    if member.process == 0:
        _require_free(member.coordinator)
    address = (
        member.coordinator if member.process == 0 else CoordinatorProxy(member.coordinator).address
    )
    # Its handler of SIGTERM would keep the signal from ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        member.processes,
        member.process,
        member.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_SECONDS + _LONGER,
        heartbeat_timeout_seconds=round(heartbeat_seconds),
        shutdown_timeout_seconds=60,
    )


def _require_free(coordinator: str) -> None:
    try:
        socket.create_server(("", host_and_port(coordinator)[1])).close()
    except OSError as error:
        raise InputError(
            f"cluster.coordinator is {coordinator}, but process 0 cannot listen there "
            f"({error.strerror}); is there another process 0? Else choose a port that is free and "
            "open to all"
        ) from error


class KeyValueStore:
    """Texts that any process pins up and all can read. Reading is not delayed by computations."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def put(self, key: str, text: str) -> None:
        """Pins up a text, in place of an earlier one."""
        self._client.key_value_set(f"alload/{key}", text, allow_overwrite=True)

    def wait_for(self, key: str) -> str:
        """The text under a key, once it is there."""
        return self._client.blocking_key_value_get(f"alload/{key}", _FOREVER)

    def under(self, prefix: str) -> dict[str, str]:
        """All texts now under keys that begin with `prefix/`, by the rest of their keys."""
        found = self._client.key_value_dir_get(f"alload/{prefix}/")
        return {key.rpartition("/")[2]: text for key, text in found}
