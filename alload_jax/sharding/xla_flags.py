"""XLA's options that let collectives run beside computation on GPUs."""

import os
from collections.abc import Mapping

OVERLAP = {
    # Collectives start as early and end as late as their data allow.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""Set unless XLA_FLAGS already says otherwise."""


def overlapping(flags: str, wanted: Mapping[str, str] = OVERLAP) -> str:
    """XLA_FLAGS with what it does not set itself."""
    given = {flag.removeprefix("--").split("=")[0] for flag in flags.split()}
    added = (f"--{name}={value}" for name, value in wanted.items() if name not in given)
    return " ".join([*flags.split(), *added])


def set_xla_flags() -> None:
    """Sets XLA_FLAGS for this process; before JAX first looks for devices."""
    os.environ["XLA_FLAGS"] = overlapping(os.environ.get("XLA_FLAGS", ""))
