"""Errors that users can cause, and how commands report them."""

import os
import re
import sys
from collections.abc import Callable

from alload_jax.lost_interrupts import interrupts_kept


class InputError(ValueError):
    """Invalid input: one line with the place, the value and the remedy.

    `train.py` and `alload` print it without a traceback and exit with status 2. For callers of the
    library it is a ValueError. Values in it may be from anybody: see `one_line`.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


class LostConnectionError(InputError):
    """The processes of a run lost each other, perhaps because one of them has ended.

    A process that meets it waits for what is known of the others before it reports it.
    """


_SECRETS = re.compile(
    r"(?i)(https?://)[^\s/@]+@|(://)[^\s/@:]*:[^\s/@]+@"
    r"|([?&;](?:password|passwd|pwd|token|secret|api_?key)=)[^\s&;'\"]+"
)
"""What is secret in addresses, behind a part that is not."""
_LONGEST_VALUE = 100
_LONGEST_WORD = 300
_LONGEST_LINE = 1200
"""Characters of a quoted value, of a path or another word, and of a line of output."""


def one_line(text: str) -> str:
    """A text that may hold what files say, as one line of a terminal.

    Passwords in addresses are left out. Control characters, ends of lines and others that cannot be
    printed are escaped as in `repr`. Long values lose their middle, so that the place before them
    and the remedy after them stay.
    """
    text = without_secrets(text)
    if not text.isprintable():
        text = "".join(each if each.isprintable() else _escaped(each) for each in text)
    if len(text) <= _LONGEST_VALUE:
        return text
    quoted = r"""(?<!\w)('[^']*'|"[^"]*")(?!\w)"""
    text = re.sub(quoted, lambda value: _cut(value[0], _LONGEST_VALUE), text)
    text = re.sub(r"\S+", lambda word: _cut(word[0], _LONGEST_WORD), text)
    return _cut(text, _LONGEST_LINE)


def without_secrets(text: str) -> str:
    """A text without the names, passwords and tokens of the addresses in it."""
    return _SECRETS.sub(lambda part: f"{part[1] or part[2] or part[3]}***", text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def _cut(text: str, most: int) -> str:
    """A text without its middle, if it is longer than `most` characters."""
    return text if len(text) <= most + 3 else f"{text[: most // 2]}...{text[-most // 2 :]}"


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
        return one_line(str(error))
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            reason = f"{error.filename}: {reason}; name another path"
        return one_line(" ".join(reason.split()))
    return one_line(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
