"""Where and in which precision PyTorch computes."""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alload_jax.errors import InputError

_PACKAGES = ("torch", "diffusers", "transformers")


def require_packages(user: str) -> None:
    """Checks that PyTorch and its libraries are installed, without importing them.

    Args:
      user: what needs them, for the message.

    Raises:
      InputError: one is missing.
    """
    if any(importlib.util.find_spec(name) is None for name in _PACKAGES):
        raise InputError(
            f"{user} needs torch, diffusers and transformers; install alload-jax[prepare]"
        )


def device_count() -> int:
    """Number of GPUs that PyTorch sees; 0 without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())


def choose_device(asked: str | None) -> Any:
    """The `torch.device` that was asked for; None takes a GPU if there is one.

    On the CPU, PyTorch's threads are limited to the cores that this process may use.
    """
    import torch

    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
    return device


def choose_dtype(asked: str | None, device: Any) -> Any:
    """The `torch.dtype` of that name; None takes bfloat16 on a GPU and float32 elsewhere."""
    import torch

    return getattr(torch, asked or ("bfloat16" if device.type == "cuda" else "float32"))


@contextmanager
def inference() -> Iterator[None]:
    """Computes without gradients and with algorithms that repeat their results."""
    import torch

    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
    with torch.inference_mode(), flags:
        yield


def share_memory() -> None:
    """Leaves GPU memory to encoders that JAX would take at its start; call it before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def release_memory() -> None:
    """Gives the GPU memory of encoders that are no longer used back, for JAX to take."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
