"""What both functions mean, in plain jax.numpy: the XLA implementation and the oracle's formula."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layernorm_modulate.implementation import Implementation
from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands, Options
from pallas_kernels.layernorm_modulate.shards import (
    on_shards,
    operand_specs,
    placed,
    specs_of,
    unsupported_sharding,
)


class XlaImplementation(Implementation):
    """`reference`, fused and differentiated by XLA and JAX: for every device and sharding."""

    name = "xla"

    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array | None, jax.Array]:
        """The reference; with segments on each shard, where x can be computed shard by shard."""
        sharding = config.sharding
        whole = sharding is None or unsupported_sharding(operands.x, sharding) is not None
        if config.options.layout != "segment" or whole:
            return reference(operands, config.options)
        run = partial(reference, options=config.options)
        stream = specs_of(config).stream
        on_each = on_shards(config, run, (operand_specs(config),), (stream, stream), check=True)
        return on_each(placed(operands._replace(prepared=None), config))


def reference(operands: Operands, options: Options) -> tuple[jax.Array | None, jax.Array]:
    """h = x + gate·y, then LayerNorm(h)·(1 + scale) + shift; float32 inside.

    h is rounded once to `residual_dtype`, and the norm is that of the rounded h; the modulated
    value is rounded once. Without y, h is x, and only its gradient is zero in padding (segment −1);
    else both are.

    Returns:
      h [B, S, D] (None if it is no result) and the modulated value [B, S, D].
    """
    scale, shift, gate = (
        _per_token(value, operands, options)
        for value in (operands.scale, operands.shift, operands.gate)
    )
    padding = None if operands.segment_ids is None else operands.segment_ids[..., None] < 0
    wide = operands.x.astype(jnp.float32)
    if operands.y is not None:
        # Cleared first: what padding holds must not reach the gate's gradient.
        y = _cleared(operands.y.astype(jnp.float32), padding)
        wide = wide + (y if gate is None else gate * y)
    # Cast from float32 also where it is x, so that its gradients add up in that.
    h = _without_gradient(wide, padding) if options.h == "x" else _cleared(wide, padding)
    h = h.astype(options.residual_dtype)
    wide = _cleared(wide, padding)
    if operands.y is not None:
        wide = _rounded(wide, options.residual_dtype)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + options.eps)
    out = _cleared(normed * (1.0 + scale) + shift, padding).astype(options.out_dtype)
    return (None if options.h is None else h), out


def _per_token(value: jax.Array | None, operands: Operands, options: Options) -> Any:
    """Float32 that broadcasts against [B, S, D]."""
    if value is None:
        return None
    value = value.astype(jnp.float32)
    if options.layout == "row":
        return value[:, None, :]
    if options.layout == "token":
        return value
    assert operands.segment_ids is not None
    rows, ids = jnp.arange(value.shape[0])[:, None], operands.segment_ids
    # Segments beyond the table give NaN (a gather's "fill"), as in the kernel.
    return value.at[rows, jnp.maximum(ids, 0)].get(mode="fill", fill_value=jnp.nan)


def _rounded(value: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 rounded to the digits of `dtype`; the gradient passes unrounded.

    XLA may leave out a cast to `dtype` and back, and differentiating one would round the gradient
    before it is added up.
    """
    kind = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(value, kind.nexp, kind.nmant)
    return value + jax.lax.stop_gradient(rounded - value)


def _cleared(value: jax.Array, padding: jax.Array | None) -> jax.Array:
    return value if padding is None else jnp.where(padding, 0.0, value)


def _without_gradient(value: jax.Array, padding: jax.Array | None) -> jax.Array:
    """The same value, with no gradient in padding."""
    return value if padding is None else jnp.where(padding, jax.lax.stop_gradient(value), value)
