"""LayerNorm-Modulate, the public function: checks its arguments and picks the implementation."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.layernorm_modulate.reference import layernorm_modulate_reference

Implementation = Literal["auto", "xla"]

_X_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def layernorm_modulate(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: Implementation = "auto",
) -> jax.Array:
    """y = LayerNorm(x)·(1 + scale) + shift, the adaptive norm of DiT blocks.

    LayerNorm has no affine parameters of its own. Statistics and modulation are float32; the
    result is rounded once (Peebles & Xie, arXiv 2212.09748, adaLN; AdaptiveLoad, arXiv
    2605.17923, section on the fused kernel).

    Args:
      x: [B, S, D] bfloat16, float16 or float32.
      scale: [B, D], float32 or `x.dtype`.
      shift: [B, D], float32 or `x.dtype`.
      eps: added to the variance.
      implementation: "xla", or "auto" for whichever is fastest here (today always "xla").

    Returns:
      [B, S, D] in `x.dtype`.

    Raises:
      ValueError: a shape or dtype does not fit; the message names it.
      NotImplementedError: an implementation that does not exist here.
    """
    _check(x, scale, shift)
    if implementation not in get_args(Implementation):
        raise NotImplementedError(
            f"layernorm_modulate: implementation={implementation!r} does not exist; "
            f"choose one of {', '.join(get_args(Implementation))}"
        )
    return layernorm_modulate_reference(x, scale, shift, eps=eps)


def _check(x: jax.Array, scale: jax.Array, shift: jax.Array) -> None:
    if x.ndim != 3:
        raise ValueError(f"layernorm_modulate: x must be [B, S, D], got shape {x.shape}")
    if x.dtype not in _X_DTYPES:
        raise ValueError(
            f"layernorm_modulate: x is {x.dtype}; it must be bfloat16, float16 or float32"
        )
    for name, value in (("scale", scale), ("shift", shift)):
        if value.shape != (x.shape[0], x.shape[2]):
            raise ValueError(
                f"layernorm_modulate: {name} must be [B, D] = {(x.shape[0], x.shape[2])} "
                f"for x {x.shape}, got {value.shape}"
            )
        if value.dtype not in (jnp.float32, x.dtype):
            raise ValueError(
                f"layernorm_modulate: {name} is {value.dtype}; it must be float32 or {x.dtype}"
            )
