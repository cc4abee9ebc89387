"""How parameters are stored, of layers in a stack as well: in float32, bfloat16 or float8."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

StoredDtype = Literal["float32", "bfloat16", "float8"]
"""`float8` applies to the kernels of stacked layers; other parameters are then bfloat16."""

DtypeOf = Callable[[str], StoredDtype]
"""The dtype in which the parameter of a name is stored."""

VALUES, SCALE = "values", "scale"
"""The two arrays that stand for a float8 kernel in a nested dict of parameters."""

_STACKED = 3
"""Dimensions of a kernel that is stacked over layers."""
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

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., in, out]."""
        return self.values.shape

    def __getitem__(self, index: int | EllipsisType) -> jax.Array:
        """Part of the kernel in float32; XLA computes it where the layer is applied."""
        return (self.values.astype(jnp.float32) * self.scale)[index]


def is_stacked(name: str, value: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a parameter is the kernels of stacked layers, or one of the two arrays of float8."""
    return value.ndim == _STACKED and name.endswith(
        ("kernel", f"kernel/{VALUES}", f"kernel/{SCALE}")
    )


def quantise(kernel: jax.Array) -> dict[str, jax.Array]:
    """Rounds a kernel [..., in, out] to float8, the largest number of each output to ±448."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    return {VALUES: (kernel / scale).astype(_FLOAT8), SCALE: scale}


def own_dtype(
    name: str, value: jax.Array | jax.ShapeDtypeStruct, dtype: StoredDtype
) -> StoredDtype:
    """How a parameter is stored where those of its kind are stored in a dtype.

    Args:
      name: its name, such as `blocks/self_attention/query/kernel`.
      value: the parameter, of all layers if layers are stacked.
      dtype: of its kind.
    """
    return "bfloat16" if dtype == "float8" and not is_stacked(name, value) else dtype


def converted(value: jax.Array, dtype: StoredDtype) -> PyTree:
    """A parameter in its own dtype; a float8 kernel becomes a dict of two arrays."""
    return quantise(value) if dtype == "float8" else value.astype(jnp.dtype(dtype))


def stored_as(name: str, value: jax.Array, dtype: StoredDtype) -> PyTree:
    """`converted` by its name; arguments as those of `own_dtype`."""
    return converted(value, own_dtype(name, value, dtype))


def stored_tree(params: PyTree, dtype_of: DtypeOf) -> PyTree:
    """Converts a nested dict of parameters."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict(
        {name: stored_as(name, value, dtype_of(name)) for name, value in flat.items()}, sep="/"
    )


def readable(params: PyTree) -> PyTree:
    """Returns a nested dict of parameters as a model reads it, with a `Float8Kernel` for each."""
    if not isinstance(params, dict):
        return params
    if params.keys() == {VALUES, SCALE}:
        return Float8Kernel(params[VALUES], params[SCALE])
    return {name: readable(part) for name, part in params.items()}


def narrow_linears(model: nnx.Module) -> Iterator[tuple[tuple[object, ...], nnx.Linear, jnp.dtype]]:
    """Stacked linear layers that compute in 16 bits: path, layer and dtype of each."""
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.Linear) or len(module.kernel.shape) != _STACKED:
            continue
        if module.dtype is not None and jnp.dtype(module.dtype).itemsize == 2:
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlottedKernel:
    """A kernel that a layer reads, beside the array whose gradient stands for its own.

    A layer that computes in bfloat16 casts its float32 kernel. The product's gradient is bfloat16,
    and that of the cast widens it to float32, which adds nothing and takes twice the memory. The
    gradient of the slot is the one before. A loop over layers stacks it in its own dtype, too.

    Attributes:
      values: [layers, in, out] float32, or those of one layer.
      slot: of the same shape; only its shape and dtype matter.
    """

    values: jax.Array
    slot: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.values.shape

    def __getitem__(self, index: int | EllipsisType) -> jax.Array:
        """Part of the values; its gradient goes to the slot."""
        return _read(self.values, self.slot)[index]


@jax.custom_vjp
def _read(values: jax.Array, slot: jax.Array) -> jax.Array:
    return values


def _forward(values: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    return values, jnp.zeros((0,), slot.dtype)


def _backward(like: jax.Array, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, cotangent.astype(like.dtype)


_read.defvjp(_forward, _backward)


def with_slots(params: PyTree, slots: PyTree, names: Iterable[str]) -> PyTree:
    """Nested dict of parameters as a model reads them: kernels with slots, and others' values.

    Args:
      params: nested dict of parameters.
      slots: likewise, what is differentiated: the slots of the kernels, and other parameters.
      names: of the kernels with slots.
    """
    values, found = flatten_dict(params, sep="/"), flatten_dict(slots, sep="/")
    slotted = {name: SlottedKernel(values[name], found[name]) for name in names if name in found}
    return unflatten_dict(found | slotted, sep="/")
