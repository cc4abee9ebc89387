"""The barrier of the processes that write one checkpoint."""

import sys
import threading
from collections.abc import Callable

from orbax.checkpoint import multihost


def commit_barrier() -> Callable[..., None]:
    """Orbax's barrier, at which a background thread that has failed does not wait.

    Where writing fails in one process, Orbax's thread waits for those of the others before the main
    thread learns of it, and they wait for the files of this process: all for the time-out of twenty
    minutes. At this barrier the failure goes on to the main thread, which ends the run.

    Returns:
      a function for `AsyncOptions.barrier_sync_fn`.
    """
    wait = multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        failure = sys.exc_info()[1]
        if failure is not None and threading.current_thread() is not threading.main_thread():
            raise failure
        wait(key=key, timeout_ms=timeout_ms)

    return barrier
