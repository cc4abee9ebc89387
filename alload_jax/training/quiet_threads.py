"""Keeps the threads of libraries from printing, and from outliving a program that has failed.

Orbax and TensorBoard write in threads of their own. What fails there fails in the main thread as
well, which says it in one line.
"""

import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any

_LIBRARIES = ("/orbax/", "/asyncio/", "/tensorstore/", "/tensorboardX/", "/humanize/")


def hush_threads() -> None:
    """Drops what these libraries log, and their threads print; for programs, not for libraries.

    A storage that is slow is told by the watchdog, and a checkpoint that a kill has cut by the run.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_worth_saying)
    main, of_threads, of_destructors = sys.excepthook, threading.excepthook, sys.unraisablehook

    def excepthook(kind: Any, error: Any, traceback: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread() or not _of_library(traceback):
            main(kind, error, traceback)

    def of_thread(given: threading.ExceptHookArgs) -> None:
        if not _of_library(given.exc_traceback):
            of_threads(given)

    def of_destructor(given: Any) -> None:
        if not _of_library(given.exc_traceback):
            of_destructors(given)

    sys.excepthook, threading.excepthook = excepthook, of_thread
    sys.unraisablehook = of_destructor


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
