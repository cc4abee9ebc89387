"""XLA options of training steps on GPUs."""

import os
from collections.abc import Mapping

from alload_jax.sharding.host_memory import set_pool

OVERLAP_FLAGS = {
    # Starts collectives as early, and waits for them as late, as data dependencies allow.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""They overlap collectives with computation."""
DEFAULT_FLAGS = OVERLAP_FLAGS | {
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


def with_defaults(flags: str, defaults: Mapping[str, str] = DEFAULT_FLAGS) -> str:
    """Adds to XLA_FLAGS the defaults that it does not set itself.

    XLA takes a value that does not begin with "-" for the path of a file of flags. It stays as it
    is.
    """
    if flags.strip() and not flags.lstrip().startswith("-"):
        return flags
    given = {flag.removeprefix("--").split("=")[0] for flag in flags.split()}
    added = (f"--{name}={value}" for name, value in defaults.items() if name not in given)
    return " ".join([*flags.split(), *added])


def set_xla_flags() -> None:
    """Sets XLA_FLAGS for this process, and what its GPUs may use of the host's memory.

    Call it before JAX initializes its devices.
    """
    os.environ["XLA_FLAGS"] = with_defaults(os.environ.get("XLA_FLAGS", ""))
    set_pool()
