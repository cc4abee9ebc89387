"""The host's memory, of which devices may use a part."""

import os
from pathlib import Path

from alload_jax.errors import InputError

POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable: GiB of the host's memory that the GPUs of a process may use."""
_POOL_OF_XLA = 64
"""What XLA takes where it is not set."""
_SHARE = 0.5
"""Of the memory; the rest is for data and for the system."""
_GIB = 1 << 30
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The limit of a container, in bytes, or `max`; in the second and in the first version."""
_NODES = Path("/dev")


def set_pool() -> None:
    """Lets the GPUs of this process use half of the host's memory, if that is more than XLA would.

    The variable in the environment takes precedence. Call it before JAX initializes its devices.
    """
    usable = int(_usable_bytes() / _GIB)
    if usable > _POOL_OF_XLA:
        os.environ.setdefault(POOL, str(usable))


def bytes_of_one(own: int, *, on_gpus: bool) -> float:
    """Bytes of this host's memory that one of its devices may use.

    Processes see their own devices alone. GPUs are counted by their nodes in /dev, of which a
    container has those that it may use.

    Args:
      own: devices of this process.
      on_gpus: whether they are GPUs.

    Raises:
      InputError: the environment's limit is no number.
    """
    gpus = sum(each.name[6:].isdigit() for each in _NODES.glob("nvidia*"))
    budget = _usable_bytes() / max(gpus, own)
    return min(budget, pool_bytes() / own) if on_gpus else budget


def _usable_bytes() -> float:
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    given = [each.read_text().strip() for each in _LIMITS if each.exists()]
    return _SHARE * min([memory, *(float(limit) for limit in given if limit != "max")])


def pool_bytes() -> float:
    """Bytes of the host's memory that the GPUs of this process may use, by the environment.

    Raises:
      InputError: its limit is no number.
    """
    given = os.environ.get(POOL, str(_POOL_OF_XLA))
    try:
        return float(given) * _GIB
    except ValueError as error:
        raise InputError(f"{POOL} is {given!r}; give a number of GiB") from error
