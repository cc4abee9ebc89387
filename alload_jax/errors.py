"""What a user can do wrong, and how a command says so."""

import sys
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave is wrong: one line with the place, the value and the remedy.

    `train.py` and `alload` print it without a traceback and exit with status 2. To callers of
    the library it is a ValueError like any other.
    """


def run_command(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Runs a command's `main`; a user's error becomes one line and status 2, Ctrl-C status 130."""
    try:
        return main(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
