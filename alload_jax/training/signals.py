"""Ctrl-C, SIGTERM and other reasons to stop; how the program ends, and what it keeps quiet.

Orbax and TensorBoard write in threads of their own. What fails there fails in the main thread as
well, which says it in one line.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from alload_jax.errors import TERMINATION, Terminated, print_stderr

TIME_LIMIT = 255
"""Number of the reason to stop that is not a signal; signals have smaller numbers."""


def stop_name(number: int) -> str:
    """Returns the name of a reason to stop, such as `SIGTERM` or `time limit`, for messages."""
    return "time limit" if number == TIME_LIMIT else signal.Signals(number).name


@contextmanager
def on_signals(act: Callable[[bytes], None]) -> Iterator[None]:
    """Calls `act` in a thread with the numbers of signals as they come.

    Python runs signal handlers in the main thread only, when that has left C++ code. It also writes
    the signal's number to a socket, which the thread reads. A signal that is ignored, or left to
    the system, is not written. The innermost context alone gets the numbers.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def read() -> None:
        while numbers := reading.recv(64):
            act(numbers)

    before = signal.set_wakeup_fd(writing.fileno())
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()
        reader.join()
        reading.close()


PATIENCE_SECONDS = 5.0
"""Time for the main thread to act on SIGTERM before the process is ended."""


@contextmanager
def termination_as_interrupt(status: int, leave: Callable[[int], None]) -> Iterator[None]:
    """Raises Terminated where SIGTERM comes, except while a `StopRequest` is open.

    So threads, processes and temporary folders are cleaned up as after Ctrl-C.

    Args:
      status: exit status of the command.
      leave: ends the process with it; called where the main thread does not leave C++ code in time.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, TERMINATION)
        raise Terminated(status)

    def insist(numbers: bytes) -> None:
        if signal.SIGTERM not in numbers:
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        while signal.getsignal(signal.SIGTERM) is interrupt:
            if time.monotonic() > deadline:
                print_stderr(Terminated(status))
                leave(status)
            time.sleep(0.05)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with on_signals(insist):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """Catches SIGINT, SIGTERM and SIGHUP while open; a second one ends the program immediately.

    If SIGINT or SIGHUP is ignored at the start, it stays ignored: shell scripts start background
    jobs like this to protect them from a Ctrl-C for the script, and nohup from a closed terminal.
    A second SIGHUP is ignored, since the terminal and its shell both send one.

    Attributes:
      number: number of the received signal or other reason to stop; 0 for none.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return bool(self.number)

    def __enter__(self) -> Self:
        before = {number: signal.getsignal(number) for number in self._SIGNALS}
        self._before = {n: each for n, each in before.items() if each is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def request(self, number: int) -> None:
        """Requests a stop unless one is requested already."""
        self.number = self.number or number

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        again = "" if number == signal.SIGHUP else "; repeat the signal to quit immediately"
        with suppress(RuntimeError, OSError):  # the signal came while this thread printed
            print(f"\n{signal.Signals(number).name}: finishing and saving{again}", flush=True)
        self._restore()
        signal.signal(signal.SIGTERM, TERMINATION)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


_LIBRARIES = ("/orbax/", "/asyncio/", "/tensorstore/", "/tensorboardX/", "/humanize/")


def silence_threads() -> None:
    """Drops what these libraries log, and their threads print; for programs, not for libraries.

    A storage that is slow is told by the watchdog, and a checkpoint that a kill has cut by the run.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_worth_saying)
    # A second Ctrl-C may end Orbax between making what saves and awaiting it.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    main = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread() or not _of_library(traceback):
            main(kind, error, traceback)

    def of_others(hook: Callable[[Any], object]) -> Callable[[Any], object]:
        return lambda given: None if _of_library(given.exc_traceback) else hook(given)

    sys.excepthook, threading.excepthook = excepthook, of_others(threading.excepthook)
    sys.unraisablehook = of_others(sys.unraisablehook)


def leave(status: int) -> None:
    """Ends the program; after a failure without waiting for threads that may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(status)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not any(part in record.pathname for part in _LIBRARIES)


def _of_library(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if any(part in traceback.tb_frame.f_code.co_filename for part in _LIBRARIES):
            return True
        traceback = traceback.tb_next
    return False
