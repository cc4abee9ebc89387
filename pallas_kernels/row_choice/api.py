"""Rows taken from one of several arrays, in the memory of the last."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.op import Call, Implementation, Plain, Reference, Registry

NAME = "choose_rows"
"""Of the kernel too, as profilers and lowered modules show it."""
_LEAST_BYTES = 2**20
"""Of a part, below which a launch takes longer than XLA's selects."""


class RowOperands(NamedTuple):
    """Rows and which of them are chosen.

    Attributes:
      parts: [T, D] arrays of one dtype.
      choice: [T] int32, a part's number for each row; −1 for zeros.
    """

    parts: tuple[jax.Array, ...]
    choice: jax.Array


def reference(operands: RowOperands, options: Plain) -> jax.Array:
    """A chain of selects."""
    del options
    parts, choice = operands
    chosen = jnp.zeros_like(parts[0])
    for number, part in enumerate(parts):
        chosen = jnp.where((choice == number)[:, None], part, chosen)
    return chosen


class RowKernel(Implementation[RowOperands, Plain]):
    """The Triton kernel, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True

    @override
    def unsupported_reason(self, operands: RowOperands, call: Call[Plain]) -> Exception | None:
        """Another device or JAX, a checking shard_map."""
        return devices.unsupported_triton(operands.parts[0], interpret=call.options.interpret)

    @override
    def faster_than_reference(self, operands: RowOperands, call: Call[Plain]) -> bool:
        """It moves a part of what XLA's selects move."""
        return operands.parts[0].nbytes >= _LEAST_BYTES

    @override
    def run(self, operands: RowOperands, call: Call[Plain]) -> jax.Array:
        """The result takes the memory of the last part."""
        # Imported where it runs: a JAX without Pallas's Triton lowering must run the other one.
        kernel = import_module("pallas_kernels.row_choice.triton")
        return kernel.choose(operands, call.options.interpret)


REGISTRY: Registry[Implementation[RowOperands, Plain]] = Registry(reference=Reference(reference))
REGISTRY.register(RowKernel())


def choose_rows(
    parts: Sequence[jax.Array],
    choice: jax.Array,
    *,
    implementation: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """parts[choice[t]][t] for each row t; zeros where the choice is −1.

    What is not chosen is not read: it may be NaN, or never written. The kernel works in the memory
    of the last part, if nothing else needs that, and then moves only rows of the other parts and
    zeros.

    Args:
      parts: [T, ...] floats or integers of one shape and dtype, at least one. The result has no
        derivative.
      choice: [T] int32, from −1 to len(parts) − 1.
      implementation: "triton" (the kernel), "xla" (selects by XLA, which read all parts), or
        "auto": the kernel on NVIDIA GPUs that can run it, unless the parts are small.
      interpret: run the kernel ("auto" means "triton" then) in Pallas's interpreter.

    Returns:
      [T, ...] like the parts.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: this device cannot run the kernel.
    """
    alike = len(parts) > 0 and all(each.shape == parts[0].shape for each in parts)
    if not alike or not parts[0].ndim:
        shapes = ", ".join(str(each.shape) for each in parts) or "none"
        raise ValueError(f"choose_rows: parts have the shapes {shapes}; give one [T, ...] for all")
    dtype = parts[0].dtype
    numbers = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not numbers or any(each.dtype != dtype for each in parts):
        dtypes = ", ".join(str(each.dtype) for each in parts)
        raise ValueError(
            f"choose_rows: parts have the dtypes {dtypes}; give one of floats or integers for all"
        )
    if choice.shape != parts[0].shape[:1] or choice.dtype != jnp.int32:
        raise ValueError(
            f"choose_rows: choice is {choice.dtype} of shape {choice.shape}; "
            f"give int32 of shape {parts[0].shape[:1]}"
        )
    width = math.prod(parts[0].shape[1:])
    rows = tuple(jax.lax.stop_gradient(each).reshape(len(choice), width) for each in parts)
    operands = RowOperands(rows, choice)
    call = Call(Plain(interpret), None)
    chosen = REGISTRY.choose(NAME, implementation, operands, call, interpret=interpret)
    return chosen.run(operands, call).reshape(parts[0].shape)
