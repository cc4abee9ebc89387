"""The key-value store that all processes of a run share, and the secret that seals it.

This module uses a private part of JAX: `jax.distributed` starts the store but has no public way to
access it.

JAX's coordination service takes values from whoever reaches its port. Process 0 therefore writes a
new secret to the run folder, which all processes share and strangers cannot read, and every value
carries a keyed hash (HMAC-SHA256, RFC 2104) of its key and text.
"""

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

from alload_jax.errors import InputError, reason_of
from alload_jax.files import replacing
from alload_jax.processes import FOR_OTHERS, waits

SECRET_NAME = "cluster.secret"
"""File of the secret in the run folder; only its owner can read it."""
LONGEST_TEXT = 1 << 22
"""Characters of the longest text that is sent or read."""
_VISIBLE_SECONDS = 60
"""How long to wait for a file that another host has written: NFS caches folders."""
_BYTES = 32
_PROOF = 2 * hashlib.sha256().digest_size


class Seal:
    """Puts a proof before texts, and takes off those that are right."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def close(self, key: str, text: str) -> str:
        """Returns a text with its proof.

        Raises:
          ValueError: the text is longer than `LONGEST_TEXT`.
        """
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"{key}: {len(text)} characters; at most {LONGEST_TEXT} can be sent")
        return self._proof(key, text) + text

    def open(self, key: str, sealed: str) -> str | None:
        """Returns the text; None if it is too long, or not of a process that has the secret."""
        if not _PROOF <= len(sealed) <= _PROOF + LONGEST_TEXT:
            return None
        proof, text = sealed[:_PROOF], sealed[_PROOF:]
        right = hmac.compare_digest(proof.encode(), self._proof(key, text).encode())
        return text if right else None

    def _proof(self, key: str, text: str) -> str:
        message = f"{key}\0{text}".encode(errors="surrogatepass")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def create_secret(folder: Path) -> bytes:
    """Writes a new secret to a folder, which is created if necessary.

    Raises:
      OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_bytes(_BYTES)
    with replacing(folder / SECRET_NAME, mode=0o600) as unfinished:
        unfinished.write_bytes(secret)
    return secret


def read_secret(folder: Path, digest: str, seconds: float = _VISIBLE_SECONDS) -> bytes:
    """Reads the secret that process 0 has written; waits until it is visible.

    Args:
      folder: the run folder.
      digest: `digest_of` the secret, which tells it from that of an earlier start.
      seconds: how long to wait.

    Raises:
      InputError: the folder does not show it in time.
    """
    end, reason = time.monotonic() + seconds, "it is not there"
    while True:
        try:
            secret = (folder / SECRET_NAME).read_bytes()
            if digest_of(secret) == digest:
                return secret
            reason = "it is of another start"
        except OSError as error:
            reason = error.strerror or reason
        if time.monotonic() > end:
            raise InputError(
                f"run.folder is {folder}: {SECRET_NAME} that process 0 writes there cannot be read "
                f"({reason}); start all processes with the same config as the same user, and give "
                "all hosts one file system, mounted at the same path"
            )
        time.sleep(0.1)


def digest_of(secret: bytes) -> str:
    """What may be told of a secret."""
    return hashlib.sha256(secret).hexdigest()


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

    @waits(FOR_OTHERS)
    def wait_for(self, key: str) -> str:
        """Returns the value of a key; blocks until some process has set it."""
        key = f"alload/{key}"
        while True:
            sealed = self._client.blocking_key_value_get(key, _UNLIMITED)
            if (text := self._seal.open(key, sealed)) is not None:
                return text
            time.sleep(_FORGED_SECONDS)

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
