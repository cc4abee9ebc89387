"""Kernels whose gradient stays in the dtype in which it is computed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from alload_jax.models.common.stacked_kernels import narrow_linears


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

    values: Any
    slot: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.values.shape

    def __getitem__(self, index: Any) -> jax.Array:
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


def narrow_kernels(model: nnx.Module) -> dict[str, jnp.dtype]:
    """Names of the kernels of stacked layers that compute in 16 bits, with the dtype."""
    found = narrow_linears(model)
    return {"/".join(map(str, (*path, "kernel"))): dtype for path, _, dtype in found}


def with_slots(params: Any, slots: Any, names: Any) -> Any:
    """Nested dict of parameters as a model reads them: kernels with slots, and others' values.

    Args:
      params: nested dict of parameters.
      slots: likewise, what is differentiated: the slots of the kernels, and other parameters.
      names: of the kernels with slots.
    """
    values, found = flatten_dict(params, sep="/"), flatten_dict(slots, sep="/")
    slotted = {name: SlottedKernel(values[name], found[name]) for name in names if name in found}
    return unflatten_dict(found | slotted, sep="/")
