"""What processes that are started by another one have in common."""

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """Leaves Ctrl-C to the first process, and ends this one when the first is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
