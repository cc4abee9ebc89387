"""Acts on signals while the main thread is in C++ code."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread


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
    reader = Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()
        reader.join()
        reading.close()
