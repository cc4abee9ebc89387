"""The host's memory, of which devices may use a part."""

import os
from pathlib import Path

import jax

_SHARE = 0.5
"""Of the memory; the rest is for data and for the system."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The limit of a container, in bytes, or `max`."""
_NODES = Path("/dev")


def host_budget() -> float:
    """Bytes of this host's memory that one of its devices may use.

    Processes see their own devices alone. GPUs are counted by their nodes in /dev, of which a
    container has those that it may use.
    """
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = _LIMIT.read_text().strip() if _LIMIT.exists() else "max"
    if limit != "max":
        memory = min(memory, float(limit))
    gpus = sum(each.name[6:].isdigit() for each in _NODES.glob("nvidia*"))
    return _SHARE * memory / max(gpus, jax.local_device_count())
