"""Whether kernels that are lowered through Mosaic GPU can run here."""

import importlib

import jax

from pallas_kernels import devices

_NEEDED = "9.0"
"""Compute capability of Hopper, whose instructions for matrix products the kernels use."""


def missing_lowering() -> Exception | None:
    """Why this JAX cannot lower them, as the error to raise; None if it can."""
    try:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:
        return NotImplementedError(
            f"JAX {jax.__version__} does not lower Pallas kernels through Mosaic GPU; use 'auto'"
        )
    return None


def unsupported_device() -> Exception | None:
    """Why this device cannot run them, as the error to raise; None if it can."""
    device = devices.current_device()
    if device.platform != "gpu":
        return NotImplementedError(
            f"the backend is {device.platform!r}, not 'gpu'; use 'xla' or 'auto'"
        )
    capability = str(getattr(device, "compute_capability", None))
    if capability != _NEEDED:
        return NotImplementedError(
            f"{device.device_kind} has compute capability {capability}, and it needs NVIDIA's "
            f"{_NEEDED} (H100, H200); use 'triton' or 'auto'"
        )
    return None
