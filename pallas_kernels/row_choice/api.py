"""Rows taken from one of several arrays, the public function."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.row_choice.implementations import REGISTRY
from pallas_kernels.row_choice.operands import Operands


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
    operands = Operands(rows, choice)
    chosen = REGISTRY.choose(
        "choose_rows", implementation, operands, interpret, interpret=interpret
    )
    return chosen.run(operands, interpret).reshape(parts[0].shape)
