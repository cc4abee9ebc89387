"""Ends a program without a traceback where Ctrl-C comes while it is imported."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Leaves SIGINT to the system while open, which ends the process; shells report status 130.

    Python's own handler raises KeyboardInterrupt inside of whatever module is being imported. A
    SIGINT that is ignored stays so.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
