"""Errors that users can cause, and how commands report them."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from alload_jax.lost_interrupts import interrupts_kept


class InputError(ValueError):
    """Invalid input: one line with the place, the value and the remedy.

    `train.py` and `alload` print it without a traceback and exit with status 2. For callers of the
    library it is a ValueError.
    """


class LostConnectionError(InputError):
    """The processes of a run lost each other, perhaps because one of them has ended.

    A process that meets it waits for what is known of the others before it reports it.
    """


def refuse_special(path: Path) -> None:
    """Refuses a path that names something other than a file, which reading may wait for for ever.

    Raises:
      InputError: it is a folder, a FIFO, a socket, a device or a link to nothing.
    """
    if not path.is_file() and (path.exists() or path.is_symlink()):
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "no regular file"
        raise InputError(f"{path}: is {what}; put the file there, or remove it")


USER_ERRORS = (InputError, NotImplementedError, OSError, KeyboardInterrupt)
"""Errors that a user can cause; others are faults of the program or of the machine."""


def run_command(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Runs a command's `main` and returns its exit status.

    Errors that a user can cause give one line and status 2: an InputError, an unsupported request,
    a file or folder that cannot be used. Ctrl-C gives status 130.
    """
    try:
        with interrupts_kept():
            return main(argv)
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        print(reason_of(error), file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"error: {reason_of(error)}", file=sys.stderr)
        return 2


def reason_of(error: BaseException) -> str:
    """The cause of the error in one line."""
    if isinstance(error, InputError | NotImplementedError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            reason = f"{error.filename}: {reason}; name another path"
        return " ".join(reason.split())
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
