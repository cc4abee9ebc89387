"""How parameters that are not trained are stored: in float32, bfloat16 or float8."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

StoredDtype = Literal["float32", "bfloat16", "float8"]
"""`float8` applies to the kernels of stacked layers; other parameters are then bfloat16."""

DtypeOf = Callable[[str], StoredDtype]
"""The dtype in which the parameter of a name is stored."""

VALUES, SCALE = "values", "scale"
"""The two arrays that stand for a float8 kernel in a nested dict of parameters."""

_FLOAT8 = jnp.float8_e4m3fn
_LARGEST = 448.0
"""Largest number of float8_e4m3fn."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8Kernel:
    """A kernel in float8 with a scale for each output, which a layer reads as float32.

    Attributes:
      values: [..., in, out] float8_e4m3fn.
      scale: [..., 1, out] float32.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., in, out]."""
        return self.values.shape

    def __getitem__(self, index: Any) -> jax.Array:
        """Part of the kernel in float32; XLA computes it where the layer is applied."""
        return (self.values.astype(jnp.float32) * self.scale)[index]


def quantise(kernel: jax.Array) -> dict[str, jax.Array]:
    """Rounds a kernel [..., in, out] to float8, the largest number of each output to ±448."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    return {VALUES: (kernel / scale).astype(_FLOAT8), SCALE: scale}


def stored_as(name: str, value: jax.Array, dtype: StoredDtype) -> Any:
    """Converts a parameter; a float8 kernel becomes a dict of two arrays.

    Args:
      name: its name, such as `blocks/self_attention/query/kernel`.
      value: the parameter, of all layers if layers are stacked.
      dtype: how it is stored.
    """
    if dtype != "float8":
        return value.astype(jnp.dtype(dtype))
    if name.endswith("kernel") and value.ndim == 3:
        return quantise(value)
    return value.astype(jnp.bfloat16)


def stored_tree(params: Any, dtype_of: DtypeOf) -> Any:
    """Converts a nested dict of parameters."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict(
        {name: stored_as(name, value, dtype_of(name)) for name, value in flat.items()}, sep="/"
    )


def readable(params: Any) -> Any:
    """Returns a nested dict of parameters as a model reads it, with a `Float8Kernel` for each."""
    if not isinstance(params, dict):
        return params
    if params.keys() == {VALUES, SCALE}:
        return Float8Kernel(params[VALUES], params[SCALE])
    return {name: readable(part) for name, part in params.items()}
