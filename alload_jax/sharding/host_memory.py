"""The host's memory, of which devices may use a part, and flags of XLA that depend on it."""

import os
from pathlib import Path

from alload_jax.errors import InputError
from alload_jax.processes import control_groups

POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable: GiB of the host's memory that the GPUs of a process may use."""
_POOL_OF_XLA = 64
"""What XLA takes where it is not set."""
_SHARE = 0.5
"""Of the memory; the rest is for data and for the system."""
_GIB = 1 << 30
_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The limit of a control group, in bytes, or `max`; in the second and in the first version."""
_NODES = Path("/dev")


def set_pool() -> None:
    """Lets the GPUs of this process use half of the host's memory, if that is more than XLA would.

    The variable in the environment takes precedence. Call it before JAX initializes its devices.
    """
    usable = int(_SHARE * host_bytes() / _GIB)
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
    budget = _SHARE * host_bytes() / max(gpus, own)
    return min(budget, pool_bytes() / own) if on_gpus else budget


def host_bytes() -> float:
    """Bytes of this host's memory, or of the control groups', as a container has or a job."""
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits = (group / name for group in control_groups("memory") for name in _LIMITS)
    given = [each.read_text().strip() for each in limits if each.exists()]
    return min([memory, *(float(limit) for limit in given if limit != "max")])


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


DEFAULT_FLAGS = {
    # Starts collectives as early, and waits for them as late, as data dependencies allow.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # The scan over layers writes all of the stacks that it keeps for the backward pass; without
    # this, XLA fills them with zeros before.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": "true",
    # cuBLAS adds the bias of a linear layer as it writes the product. XLA's own Triton products
    # take the bias with them when they are compared with cuBLAS; when they lose, a pass over the
    # product adds it. XLA may apply a constant factor of such a sum to the product alone
    # (openxla/xla issue 46110): models must not scale a layer's output by a constant number.
    "xla_gpu_enable_triton_gemm": "false",
}
"""XLA_FLAGS in the environment takes precedence."""


def with_defaults(flags: str) -> str:
    """Adds to XLA_FLAGS the `DEFAULT_FLAGS` that it does not set itself.

    XLA takes a value that does not begin with "-" for the path of a file of flags. It stays as it
    is.
    """
    if flags.strip() and not flags.lstrip().startswith("-"):
        return flags
    given = {flag.removeprefix("--").split("=")[0] for flag in flags.split()}
    added = (f"--{name}={value}" for name, value in DEFAULT_FLAGS.items() if name not in given)
    return " ".join([*flags.split(), *added])


def set_xla_flags() -> None:
    """Sets XLA_FLAGS for this process, and what its GPUs may use of the host's memory.

    Call it before JAX initializes its devices.
    """
    os.environ["XLA_FLAGS"] = with_defaults(os.environ.get("XLA_FLAGS", ""))
    set_pool()
