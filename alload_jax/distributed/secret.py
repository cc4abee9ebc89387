"""A secret that the processes of one start share, and messages that carry its proof.

JAX's coordination service takes values from whoever reaches its port. Process 0 therefore writes a
new secret to the run folder, which all processes share and strangers cannot read, and every value
carries a keyed hash (HMAC-SHA256, RFC 2104) of its key and text.
"""

import hashlib
import hmac
import secrets
import time
from pathlib import Path

from alload_jax.errors import InputError
from alload_jax.files import replacing

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
