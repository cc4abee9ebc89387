"""What the function means, in plain jax.numpy: the XLA implementation and the oracle's formula."""

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm_rotary.implementation import Implementation
from pallas_kernels.rms_norm_rotary.operands import CallConfig, Operands, Options, heads_shape


class XlaImplementation(Implementation):
    """`reference`, fused and differentiated by XLA and JAX: for every device and sharding."""

    name = "xla"

    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """The reference."""
        return reference(operands, config.options)


def reference(operands: Operands, options: Options) -> jax.Array:
    """RMSNorm of x, then its rotation, float32 inside: [B, S, H, head_dim] in x's dtype."""
    wide = operands.x.astype(jnp.float32)
    # Of the float32 gradients, before these are rounded to x's dtype.
    wide = wide if operands.bias is None else _holding(wide, operands.bias)
    heads = heads_shape(wide, options)
    wide = wide.reshape(heads) if options.per_head else wide
    mean = jnp.square(wide).mean(axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean + options.eps) * operands.weight.astype(jnp.float32)
    normed = normed.reshape(heads)
    if operands.cos is not None and operands.sin is not None:
        normed = _rotated(normed, operands.cos[..., None, :], operands.sin[..., None, :])
    return normed.astype(operands.x.dtype)


@jax.custom_vjp
def _holding(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x, float32, whose gradients the bias gets as well."""
    return x


def _forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.zeros((0,), bias.dtype)


def _backward(like: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    summed = gradient.sum(axis=tuple(range(gradient.ndim - 1)))
    return gradient, summed.astype(like.dtype)


_holding.defvjp(_forward, _backward)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Channel pairs (2i, 2i + 1) turned by angle i."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape)
