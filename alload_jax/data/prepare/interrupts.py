"""Ctrl-C at moments that must not be interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defers Ctrl-C to the end, where it raises KeyboardInterrupt.

    For starting and stopping other processes, which leaves them or this one in disorder if it is
    interrupted. Processes that are started do not hear Ctrl-C: this process ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    # Handlers of Python are not inherited, but the mask is.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
    if pending:
        raise KeyboardInterrupt
