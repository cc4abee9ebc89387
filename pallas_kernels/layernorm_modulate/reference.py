"""What LayerNorm-Modulate means, in plain jax.numpy: the XLA implementation and the oracle."""

import jax
import jax.numpy as jnp


def layernorm_modulate_reference(
    x: jax.Array, scale: jax.Array, shift: jax.Array, *, eps: float
) -> jax.Array:
    """LayerNorm(x)·(1 + scale) + shift in float32, rounded once to `x.dtype`.

    Args:
      x: [B, S, D].
      scale: [B, D], float32 or `x.dtype`.
      shift: [B, D], float32 or `x.dtype`.
      eps: added to the variance.

    Returns:
      [B, S, D] in `x.dtype`.
    """
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + eps)
    gain = 1.0 + scale.astype(jnp.float32)[:, None, :]
    return (normed * gain + shift.astype(jnp.float32)[:, None, :]).astype(x.dtype)
