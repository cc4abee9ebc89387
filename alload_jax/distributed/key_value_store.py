"""The key-value store that all processes of a run share, hosted by process 0.

This module uses a private part of JAX: `jax.distributed` starts the store but has no public way to
access it.
"""

import time
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

from alload_jax.distributed.secret import (
    LONGEST_TEXT,
    Seal,
    create_secret,
    digest_of,
    read_secret,
)
from alload_jax.errors import InputError, reason_of

_UNLIMITED = 30 * 24 * 3600 * 1000  # milliseconds; the heartbeat ends a wait that cannot succeed
_AGREE_SECONDS = 120
"""How long a process may take to read the secret."""
_READ_SECONDS = 3.0
"""Time for the others to read a reason before process 0, which hosts the store, ends."""
_FORGED_SECONDS = 0.2
"""Time between two looks at a key that a stranger has written."""


class KeyValueStore:
    """Strings by key, written and read by any process. Computations do not delay access.

    Values without the run's proof are passed over, as if nobody had written them.
    """

    def __init__(self, seal: Seal, client: Any = None):
        """Uses the store that `coordination.connect` has started, or another client."""
        self._client: Any = client or distributed.global_state.client
        self._seal = seal

    def put(self, key: str, text: str) -> None:
        """Sets the value of a key; replaces an earlier one."""
        key = f"alload/{key}"
        self._client.key_value_set(key, self._seal.close(key, text), allow_overwrite=True)

    def wait_for(self, key: str) -> str:
        """Returns the value of a key; blocks until some process has set it."""
        key = f"alload/{key}"
        while (text := self._seal.open(key, self._get(key))) is None:
            time.sleep(_FORGED_SECONDS)
        return text

    def _get(self, key: str) -> str:
        return self._client.blocking_key_value_get(key, _UNLIMITED)

    def get_prefix(self, prefix: str) -> dict[str, str]:
        """Returns all values whose keys begin with `prefix/`, by the last part of the key."""
        found = self._client.key_value_dir_get(f"alload/{prefix}/")
        opened = {key: self._seal.open(key, sealed) for key, sealed in found}
        return {key.rpartition("/")[2]: text for key, text in opened.items() if text is not None}


def agree_on_seal(process: int, processes: int, folder: Path, client: Any = None) -> Seal:
    """Process 0 writes a new secret to the run folder, the others read it. A collective operation.

    Args:
      process: number of this process.
      processes: number of all.
      folder: the run folder.
      client: of the store; None for JAX's.

    Raises:
      InputError: a process cannot write or read the secret; all raise the same.
    """
    client = client or distributed.global_state.client
    secret, said = b"", ""
    try:
        if process == 0:
            secret = create_secret(folder)
            client.key_value_set("secret/digest", digest_of(secret))
        elif digest := _read(client, "secret/digest"):
            secret = read_secret(folder, digest)
    except (InputError, OSError) as error:
        said = f"process {process} of {processes}: {reason_of(error)}"
        if process == 0:
            client.key_value_set("secret/digest", "")
    client.key_value_set(f"secret/{process}", f"={said}")
    answers = [_read(client, f"secret/{n}")[1:] for n in range(processes)]
    if problem := next(filter(None, answers), ""):
        if process == 0:
            time.sleep(_READ_SECONDS)
        raise InputError(problem)
    return Seal(secret)


def _read(client: Any, key: str) -> str:
    """A value that has no proof yet.

    Raises:
      InputError: nobody writes it in time.
    """
    try:
        return client.blocking_key_value_get(key, 1000 * _AGREE_SECONDS)[:LONGEST_TEXT]
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"the processes lost each other at the start (no {key} within {_AGREE_SECONDS} "
            "seconds); start all processes again"
        ) from error
