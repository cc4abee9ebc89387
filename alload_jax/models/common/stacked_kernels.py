"""The kernels of stacked layers that compute in 16 bits."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from alload_jax.models.common.stored import Float8Kernel

_STACKED = 3
"""Dimensions of a kernel that is stacked over layers."""
_NARROW = 2
"""Bytes of a number."""


def narrow_linears(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], nnx.Linear, jnp.dtype]]:
    """Stacked linear layers that compute in 16 bits: path, layer and dtype of each."""
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.Linear) or len(module.kernel.shape) != _STACKED:
            continue
        if module.dtype is not None and jnp.dtype(module.dtype).itemsize == _NARROW:
            yield path, module, jnp.dtype(module.dtype)


def with_cast_kernels(layers: nnx.Module) -> nnx.Module:
    """A copy of stacked layers whose kernels have the dtype in which they compute.

    Layers that are compiled one by one then read parts of the cast kernels. Each would otherwise
    copy its part in float32 first, and cast it in the forward and again in the backward pass.
    Kernels in float8 stay as they are.
    """
    copy = nnx.clone(layers)
    for _, module, dtype in narrow_linears(copy):
        if not isinstance(module.kernel.get_value(), Float8Kernel):
            module.kernel = nnx.Param(module.kernel[...].astype(dtype))
    return copy
