"""Errors that users can cause, and how commands report them."""

import errno
import io
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from alload_jax.processes import threads_left


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


class Terminated(KeyboardInterrupt):
    """SIGTERM came where a run has nothing to save, such as before its first step.

    Attributes:
      status: exit status of the command.
    """

    def __init__(self, status: int):
        super().__init__("SIGTERM: nothing was left to save; the same command goes on")
        self.status = status


def require_fields(
    section: str, config: object, names: str, holds: Callable[[Any], bool], bound: str
) -> None:
    """Checks values of fields; one that is None is left alone.

    Args:
      section: what stands before a field's name for users, such as `checkpoint.`.
      config: the object that has the fields.
      names: the fields, with spaces between them.
      holds: of a value that is allowed; not of NaN.
      bound: what must be, such as `above 0`.

    Raises:
      InputError: a value is not allowed; it names the field, the value and the bound.
    """
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise InputError(f"{section}{name} is {value}; it must be {bound}")


def require_positive(section: str, config: object, *names: str, most: float = math.inf) -> None:
    """Checks that fields are at least 1 and not above `most`; one that is None is left alone.

    Args:
      section: what stands before a field's name for users, such as `checkpoint.`.
      config: the object that has the fields.
      names: the fields.
      most: of each.

    Raises:
      InputError: one is not; it names the field, the value and the bound.
    """
    for name in names:
        require_positive_value(f"{section}{name}", getattr(config, name), most)


def require_positive_value(name: str, value: float | None, most: float) -> None:
    """`require_positive` of one value."""
    if value is not None and not 1 <= value <= most:
        bound = f"at most {most:,}" if value > most else "at least 1"
        raise InputError(f"{name} is {value}; it must be {bound}")


VALUE_KINDS = {"int": "a whole number", "float": "a finite number", "str": "text, in quotes"}
VALUE_KINDS |= {"bool": "true or false", "tuple": "a list", "dict": "its keys", "NoneType": "null"}
"""Kinds of values, by their names in Python, as a user of YAML knows them."""


def print_stderr(line: object) -> None:
    """Prints a line where warnings and errors go, which Python writes at once."""
    print(line, file=sys.stderr)


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
        text = "".join(
            each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
            for each in text
        )
    if len(text) <= _LONGEST_VALUE:
        return text
    quoted = r"""(?<!\w)('[^']*'|"[^"]*")(?!\w)"""
    text = re.sub(quoted, lambda value: _cut(value[0], _LONGEST_VALUE), text)
    text = re.sub(r"\S+", lambda word: _cut(word[0], _LONGEST_WORD), text)
    return _cut(text, _LONGEST_LINE)


def first_line(error: BaseException) -> str:
    """The first line of an error of a library; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX's runtime says that a device is out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


_USUAL_THREADS = 110
"""Threads of a short training on two CPUs, where it hangs with 60, and other libraries crash."""
_MORE_THREADS = (
    "raise pids.max of the container or job, such as `docker --pids-limit`, TasksMax of systemd"
)


def lacks_threads(error: BaseException) -> bool:
    """Whether an error of Python or of a library says that no thread or process can start."""
    text = str(error)
    return "can't start new thread" in text or "Resource temporarily unavailable" in text


def without_secrets(text: str) -> str:
    """A text without the names, passwords and tokens of the addresses in it."""
    return _SECRETS.sub(lambda part: f"{part[1] or part[2] or part[3]}***", text)


def _cut(text: str, most: int) -> str:
    """A text without its middle, if it is longer than `most` characters."""
    return text if len(text) <= most + 3 else f"{text[: most // 2]}...{text[-most // 2 :]}"


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


TERMINATION = _end if os.getpid() == 1 else signal.SIG_DFL
"""What ends the program at SIGTERM, which the first process of a container cannot leave to the
system: that drops it."""

USER_ERRORS = (InputError, NotImplementedError, OSError, KeyboardInterrupt)
"""Errors that a user can cause; others are faults of the program or of the machine."""


def run_command(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Runs a command's `main` and returns its exit status.

    Errors that a user can cause give one line and status 2: an InputError, an unsupported request,
    a file or folder that cannot be used. Ctrl-C gives status 130, and SIGTERM the one that
    `Terminated` has. Characters that the terminal's encoding lacks are escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python does with stderr
    if TERMINATION is _end:
        signal.signal(signal.SIGTERM, TERMINATION)
    if (left := threads_left()) < _USUAL_THREADS:
        print_stderr(
            f"warning: only {left:.0f} more threads and processes can start here; without about "
            f"{_USUAL_THREADS}, a command may hang or crash: {_MORE_THREADS}"
        )
    try:
        with _interrupts_kept():
            return main(argv)
    except (BrokenPipeError, SystemExit) as error:  # the reader closed the pipe, as `| head` does
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # not that which Rich raises then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as programs that the signal ends: the rest was not done
    except KeyboardInterrupt as error:
        print(reason_of(error), file=sys.stderr)
        return error.status if isinstance(error, Terminated) else 130
    except Exception as error:
        if not isinstance(error, USER_ERRORS) and not lacks_threads(error):
            raise
        print(f"error: {reason_of(error)}", file=sys.stderr)
        return 2


_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space")
_REMEDIES[errno.EMFILE] = "raise `ulimit -n`"


def reason_of(error: BaseException) -> str:
    """The cause of the error in one line."""
    if isinstance(error, InputError | NotImplementedError):
        return one_line(str(error))
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if lacks_threads(error):
        return f"a thread or process cannot start ({first_line(error)}); {_MORE_THREADS}"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            remedy = _REMEDIES.get(error.errno or 0, "name another path")
            reason = f"{error.filename}: {reason}; {remedy}"
        return one_line(" ".join(reason.split()))
    return one_line(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


_SECONDS_TO_RETURN = 0.05


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Sends a signal once more, while open, where its KeyboardInterrupt was raised in vain.

    Python runs the handler wherever the main thread is. In a destructor, or in a callback of a weak
    reference such as `import` makes, it prints the error and goes on: the program would not end.
    """
    before, ended = sys.unraisablehook, threading.Event()

    def send_again(number: int) -> None:
        if not ended.wait(_SECONDS_TO_RETURN):  # the destructor returns in the meantime
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            number = signal.SIGTERM if dropped.exc_type is Terminated else signal.SIGINT
            threading.Thread(target=send_again, args=(number,), daemon=True).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        ended.set()
        sys.unraisablehook = before
