"""Whether kernels that are lowered through Triton can run here."""

import importlib

import jax

from pallas_kernels import devices

_OLDEST = 8.0
"""Compute capability below which Triton has no bfloat16."""


def unsupported_here(*, interpret: bool) -> Exception | None:
    """Why kernels cannot run here, as the error to raise; None if they can.

    Args:
      interpret: whether they run in Pallas's interpreter, on any device.
    """
    return missing_lowering() or (None if interpret else unsupported_device())


def missing_lowering() -> Exception | None:
    """Why this JAX cannot lower them, as the error to raise; None if it can."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return NotImplementedError(
            f"JAX {jax.__version__} does not lower Pallas kernels through Triton; "
            "use 'xla' or 'auto'"
        )
    return None


def unsupported_device() -> Exception | None:
    """Why this device cannot run them, as the error to raise; None if it can."""
    device = devices.current_device()
    if device.platform != "gpu":
        return NotImplementedError(
            f"the backend is {device.platform!r}, not 'gpu'; use 'xla' or 'auto', or give "
            "interpret=True to try it without one"
        )
    capability = str(getattr(device, "compute_capability", None))
    if not capability.replace(".", "").isdecimal() or float(capability) < _OLDEST:
        return NotImplementedError(
            f"{device.device_kind} has compute capability {capability}, and it needs NVIDIA's "
            f"{_OLDEST} or later; use 'xla'"
        )
    return None
