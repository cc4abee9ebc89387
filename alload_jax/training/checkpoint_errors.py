"""Says in one line what Orbax, TensorStore and the operating system report of a checkpoint."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alload_jax.errors import InputError, LostConnectionError

_COMMUNICATION = re.compile(
    "Gloo|NCCL|coordination service|Connection (?:reset|closed|refused)|DEADLINE_EXCEEDED|"
    "UNAVAILABLE|Barrier timed out",
)
"""Words of errors that say nothing about files."""
_OS_REASONS = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Read-only file system|"
    "Permission denied|Input/output error|Stale file handle|Transport endpoint is not connected"
)


def raise_if_lost(place: Path, doing: str, error: Exception) -> None:
    """Raises LostConnectionError if an error says nothing about files.

    Args:
      place: folder of the checkpoint.
      doing: what the processes did, such as `read it`.
      error: what Orbax has raised.
    """
    if _COMMUNICATION.search(str(error)):
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LostConnectionError(
            f"{place}: the processes lost each other while they {doing} ({reason}); start all "
            "processes again"
        ) from error


def reason_of_storage(error: Exception) -> str:
    """What the operating system said, out of the lines of Orbax and TensorStore."""
    found = _OS_REASONS.search(str(error))
    return found[0] if found else (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def as_input_error(place: Path, remedy: str) -> Iterator[None]:
    """Converts errors of Orbax to InputErrors; Orbax also raises plain Exceptions."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise_if_lost(place, "read it", error)
        raise InputError(f"{place}: this checkpoint cannot be read ({reason}); {remedy}") from error
