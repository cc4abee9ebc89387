"""What processes that are started by another one have in common."""

import multiprocessing
import os
import signal
import sys
import threading


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
