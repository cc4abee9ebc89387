"""Brings Ctrl-C back where Python drops it."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS_TO_RETURN = 0.05


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Sends SIGINT once more, while open, where KeyboardInterrupt was raised in vain.

    Python runs the handler wherever the main thread is. In a destructor, or in a callback of a weak
    reference such as `import` makes, it prints the error and goes on: the program would not end.
    """
    before, ended = sys.unraisablehook, threading.Event()

    def send_again() -> None:
        if not ended.wait(_SECONDS_TO_RETURN):  # the destructor returns in the meantime
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def hook(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            threading.Thread(target=send_again, daemon=True).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        ended.set()
        sys.unraisablehook = before
