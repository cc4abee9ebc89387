"""Waits that only a hang ends: a busy machine may take any time."""

import contextlib
import random
import socket
import time
from pathlib import Path

PATIENCE = 3600
"""Seconds after which a test or a whole run hangs, on the busiest machine."""


def wait_until(condition, process=None, ended=False):
    """Waits until the condition holds and returns its value.

    A process that ends meanwhile ends the wait as an error, unless its end is expected.
    """
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process is None or ended or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)
    return found


def alive(pid):
    """Whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port():
    """A port that is free, and that the system gives to no connection meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no port is free")
