"""What a user can do wrong, and how a command says so."""

import os
import sys
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave is wrong: one line with the place, the value and the remedy.

    `train.py` and `alload` print it without a traceback and exit with status 2. To callers of
    the library it is a ValueError like any other.
    """


USER_ERRORS = (InputError, NotImplementedError, OSError, KeyboardInterrupt)
"""What a user can cause; all else is a fault of the program or of the machine."""


def run_command(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Runs a command's `main`; returns its exit status.

    What a user can cause becomes one line and status 2: an InputError, something asked for that
    cannot be done here, a file or folder that cannot be used. Ctrl-C gives status 130.
    """
    try:
        return main(argv)
    except BrokenPipeError:  # whoever read the output has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        print(reason_of(error), file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"error: {reason_of(error)}", file=sys.stderr)
        return 2


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, InputError | NotImplementedError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            reason = f"{error.filename}: {reason}; name another place"
        return " ".join(reason.split())
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
