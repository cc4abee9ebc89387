"""Products of linear layers in float8: e4m3 forward, e5m2 for gradients (arXiv 2209.05433).

Each tensor gets a scale from its own largest number, at each use (current scaling), so that no
state is kept and a resumed run repeats each product. Scales are powers of two: scaling rounds
nothing. XLA computes the products of what is scaled back by cuBLASLt's float8 kernels, on NVIDIA
GPUs from Ada on; elsewhere it computes the same values in the dtype of the inputs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from alload_jax.errors import InputError
from alload_jax.models.common.stored import narrow_linears
from pallas_kernels import devices
from pallas_kernels.first_use import COMPARISONS, compared

VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
LEAST_TOKENS = 4096
"""Products over fewer tokens keep their dtype: rounding the kernel would take longer."""
_MEASURED_TOKENS = 16384
"""Of products that are compared."""
_ALIGNED = 16
"""What cuBLASLt's float8 kernels need of inputs and outputs."""
_LARGEST_EXPONENT = 120
"""Of a scale, so that its inverse is a float32."""
_ADA = 8.9
"""The first compute capability with products in float8."""


class Scaled(NamedTuple):
    """A tensor in float8.

    Attributes:
      values: float8, of the tensor's shape, the largest within a factor of two of float8's largest.
      scale: float32 scalar, a power of two; the tensor is values · scale.
    """

    values: jax.Array
    scale: jax.Array

    def read(self, dtype: jnp.dtype) -> jax.Array:
        """values · scale in a dtype with 8 bits of exponent, which holds it exactly."""
        return self.values.astype(dtype) * self.scale.astype(dtype)


def scaled(x: jax.Array, dtype: Any) -> Scaled:
    """Rounds a tensor to float8.

    Args:
      x: bfloat16 or float32 [...]; NaN and infinity make all of it NaN.
      dtype: `VALUES` or `GRADIENTS`.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    one = jnp.where(jnp.isfinite(largest), 1.0, jnp.nan)
    scale = jnp.ldexp(one, jnp.clip(exponent, -_LARGEST_EXPONENT, _LARGEST_EXPONENT))
    return Scaled((x.astype(jnp.float32) / scale).astype(dtype), scale)


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x · kernel, [..., in] and [in, out] → [..., out], all of one dtype; see the module."""
    return _forward(x, kernel)[0]


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    kept = scaled(x, VALUES), scaled(kernel, VALUES)
    left, right = (each.read(x.dtype) for each in kept)
    return lax.dot_general(left, right, (((x.ndim - 1,), (0,)), ((), ()))), kept


def _backward(kept: tuple[Scaled, Scaled], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype, tokens = cotangent.dtype, tuple(range(cotangent.ndim - 1))
    gradient = scaled(cotangent, GRADIENTS).read(dtype)
    x, kernel = (each.read(dtype) for each in kept)
    dx = lax.dot_general(gradient, kernel, (((gradient.ndim - 1,), (1,)), ((), ())))
    return dx, lax.dot_general(x, gradient, ((tokens, tokens), ((), ())))


product.defvjp(_forward, _backward)


def dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
    """In place of `lax.dot_general` in a linear layer; few tokens keep their dtype."""
    if math.prod(x.shape[:-1]) < LEAST_TOKENS:
        return lax.dot_general(x, kernel, dimension_numbers, **options)
    return product(x, kernel)


def fastest_dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
    """As `dot_general` where that is faster, which is measured at first use (`first_use`)."""
    inputs, outputs = kernel.shape
    shapes = (
        jax.ShapeDtypeStruct((_MEASURED_TOKENS, inputs), x.dtype),
        jax.ShapeDtypeStruct((inputs, outputs), x.dtype),
    )
    runs = [lambda given, _, run=run: run(*given) for run in (jnp.matmul, product)]
    faster = _unsupported_device() is None and COMPARISONS.faster(
        f"float8_product {inputs} {outputs} {x.dtype}",
        lambda: compared(runs, lambda *given: given, None, shapes),
    )
    chosen = dot_general if faster else lax.dot_general
    return chosen(x, kernel, dimension_numbers, **options)


def use_float8(model: nnx.Module, *, where_faster: bool) -> None:
    """Gives the linear layers of a model's blocks that compute in bfloat16 products in float8.

    Args:
      model: any model, built or abstract.
      where_faster: only where they are faster.
    """
    for _, layer, dtype in narrow_linears(model):
        aligned = layer.in_features % _ALIGNED == layer.out_features % _ALIGNED == 0
        if aligned and dtype == jnp.bfloat16:
            layer.dot_general = fastest_dot_general if where_faster else dot_general


def unused(model: nnx.Module, tokens: int) -> str:
    """Why a model that should multiply in float8 does not, over so many tokens; "" if it does."""
    told = "model.matmul is float8, but nothing is multiplied in it: "
    if not any(layer.dot_general is dot_general for _, layer, _ in narrow_linears(model)):
        return told + (
            "blocks have no linear layer in bfloat16 whose inputs and outputs are multiples of "
            f"{_ALIGNED}; set model.dtype to bfloat16, or model.matmul to dtype"
        )
    if tokens < LEAST_TOKENS:
        return told + (
            f"micro-batches have at most {tokens:,} tokens, and products over fewer than "
            f"{LEAST_TOKENS:,} keep their dtype; raise planning.m_mem, or set model.matmul to dtype"
        )
    return ""


def require_device() -> None:
    """Checks that the GPU to run on has products in float8; elsewhere their values are the same.

    Raises:
      InputError: it has none.
    """
    reason = _unsupported_device()
    if reason and jax.default_backend() == "gpu":
        raise InputError(f"model.matmul is float8, but {reason}; set it to auto or dtype")


def _unsupported_device() -> str | None:
    """Why the device to run on has no products in float8; None if it has."""
    device = devices.current_device()
    capability = str(getattr(device, "compute_capability", ""))
    known = device.platform == "gpu" and capability.replace(".", "").isdecimal()
    if known and float(capability) >= _ADA:
        return None
    return f"{device.device_kind} has no products in float8, which NVIDIA GPUs have from 8.9 on"
