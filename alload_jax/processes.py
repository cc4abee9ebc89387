"""What programs and the processes that they start have in common: imports, Ctrl-C, their end."""

import multiprocessing
import os
import signal
import sys
import threading
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


def hush_resource_tracker() -> None:
    """Keeps Python's helper from printing that it cleans up after a run that ended at once.

    To call before the first worker starts: the helper gets the options for warnings.
    """
    option = "ignore:resource_tracker:UserWarning"
    if option not in sys.warnoptions:
        sys.warnoptions.append(option)


def follow_parent() -> None:
    """Leaves Ctrl-C to the first process, and ends this one when the first is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
