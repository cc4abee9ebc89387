"""The key-value store that all processes of a run share, hosted by process 0.

This module uses a private part of JAX: `jax.distributed` starts the store but has no public way to
access it.
"""

from typing import Any

from jax._src import distributed

_UNLIMITED = 30 * 24 * 3600 * 1000  # milliseconds; the heartbeat ends a wait that cannot succeed


class KeyValueStore:
    """Strings by key, written and read by any process. Computations do not delay access."""

    def __init__(self) -> None:
        """Uses the store that `coordination.connect` has started."""
        self._client: Any = distributed.global_state.client

    def put(self, key: str, text: str) -> None:
        """Sets the value of a key; replaces an earlier one."""
        self._client.key_value_set(f"alload/{key}", text, allow_overwrite=True)

    def wait_for(self, key: str) -> str:
        """Returns the value of a key; blocks until some process has set it."""
        return self._client.blocking_key_value_get(f"alload/{key}", _UNLIMITED)

    def get_prefix(self, prefix: str) -> dict[str, str]:
        """Returns all values whose keys begin with `prefix/`, by the last part of the key."""
        found = self._client.key_value_dir_get(f"alload/{prefix}/")
        return {key.rpartition("/")[2]: text for key, text in found}
