"""Attention by a pair of kernels, differentiable, on each device's part of the arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.block_sparse_attention.block_lists import BlockLists, clamped, invert
from pallas_kernels.block_sparse_attention.operands import (
    NAME,
    OUTPUT_NAME,
    CallConfig,
    Operands,
    Residuals,
)
from pallas_kernels.block_sparse_attention.shards import on_shards
from pallas_kernels.shardwise import differentiated_once


@dataclass(frozen=True)
class Kernels:
    """The calls of kernels, functions of a module, which are equal if they are the same.

    Attributes:
      forward: (operands, options) to the output [R, S, H, D] and the statistics [R, H, S].
      query_gradient: (residuals, cotangents, options) to the gradient of q.
      key_gradients: (residuals, cotangents, inverted lists, options) to those of k and v.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    query_gradient: Callable[..., jax.Array]
    key_gradients: Callable[..., tuple[jax.Array, jax.Array]]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    config: CallConfig,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]."""

    def run(operands: Operands) -> tuple[jax.Array, jax.Array]:
        return kernels.forward(_clamped(operands), config.options)

    return on_shards(config.sharding, run, "forward")(Operands(q, k, v, blocks))


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    config: CallConfig,
    kernels: Kernels,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    results = attention(q, k, v, blocks, config, kernels)
    # Named, so that `jax.checkpoint` can keep them: the kernel is then not run again.
    out, lse = (checkpoint_name(x, OUTPUT_NAME) for x in results)
    return (out, lse), Residuals(q, k, v, blocks, out, lse)


def _backward(
    config: CallConfig,
    kernels: Kernels,
    residuals: Residuals,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    def run(residuals: Residuals, dout: jax.Array, dlse: jax.Array) -> Any:
        residuals = _clamped(residuals)
        read, options = read_cotangents(residuals, dout, dlse), config.options
        dk, dv = kernels.key_gradients(residuals, read, invert(residuals.blocks), options)
        return kernels.query_gradient(residuals, read, options), dk, dv

    on_each = on_shards(config.sharding, run, "backward")
    dq, dk, dv = differentiated_once(NAME, on_each)(residuals, *cotangents)
    none = jax.tree.map(lambda each: np.zeros(each.shape, jax.dtypes.float0), residuals.blocks)
    return dq, dk, dv, none


attention.defvjp(_forward, _backward)

_Some = TypeVar("_Some", Operands, Residuals)


def _clamped(arguments: _Some) -> _Some:
    queries, keys = arguments.q.shape[1], arguments.k.shape[1]
    return arguments._replace(blocks=clamped(arguments.blocks, queries, keys))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cotangents:
    """What both kernels of the backward read of the output.

    Attributes:
      dout: [R, S, H, D] in q's dtype.
      lse: [R, H, S] float32, the statistics, 0 where they are −inf.
      delta: [R, H, S] float32, Σ dout·out − dlse; 0 for queries that are not valid.
    """

    dout: jax.Array
    lse: jax.Array
    delta: jax.Array


def read_cotangents(residuals: Residuals, dout: jax.Array, dlse: jax.Array) -> Cotangents:
    """What both kernels of the backward read.

    Args:
      residuals: of the forward.
      dout: [R, S, H, D], cotangent of the output.
      dlse: [R, H, S] float32, cotangent of the statistics.
    """
    out, lse = residuals.out, residuals.lse
    products = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    some = ~jnp.isneginf(lse)  # NaN stays NaN
    delta = jnp.where(some, products.swapaxes(1, 2) - dlse, 0.0)
    return Cotangents(dout.astype(residuals.q.dtype), jnp.where(some, lse, 0.0), delta)
