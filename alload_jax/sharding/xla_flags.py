"""XLA options that overlap collectives with computation on GPUs."""

import os
from collections.abc import Mapping

OVERLAP_FLAGS = {
    # Starts collectives as early, and waits for them as late, as data dependencies allow.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""Defaults; XLA_FLAGS in the environment takes precedence."""


def with_defaults(flags: str, defaults: Mapping[str, str] = OVERLAP_FLAGS) -> str:
    """Adds to XLA_FLAGS the defaults that it does not set itself."""
    given = {flag.removeprefix("--").split("=")[0] for flag in flags.split()}
    added = (f"--{name}={value}" for name, value in defaults.items() if name not in given)
    return " ".join([*flags.split(), *added])


def set_xla_flags() -> None:
    """Sets XLA_FLAGS for this process. Call it before JAX initializes its devices."""
    os.environ["XLA_FLAGS"] = with_defaults(os.environ.get("XLA_FLAGS", ""))
