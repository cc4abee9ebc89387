"""The Triton kernels as an implementation: what they can do, and their derivative."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import devices, triton_support
from pallas_kernels.block_sparse_attention.block_lists import BlockLists
from pallas_kernels.block_sparse_attention.implementation import Implementation
from pallas_kernels.block_sparse_attention.operands import (
    OUTPUT_NAME,
    CallConfig,
    Operands,
    Residuals,
    unsupported_by_kernels,
)
from pallas_kernels.block_sparse_attention.shards import on_shards, unsupported_sharding

# What needs Pallas's Triton lowering is imported where it runs: it is deprecated, and a JAX
# without it must still run the reference.

_MOST_ELEMENTS = 2**31
"""Offsets within an array are 32-bit counts of elements."""


class TritonImplementation(Implementation):
    """The kernels of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True

    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array, jax.Array]:
        """See `Implementation.run`."""
        return _attention(*operands, config)

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """A JAX without the lowering, another device, dtype, width or sharding, or too much."""
        return (
            triton_support.missing_lowering()
            or (None if config.options.interpret else triton_support.unsupported_device())
            or unsupported_by_kernels(operands)
            or devices.unsupported_manual_axes(operands.q)
            or unsupported_sharding(operands.q, config.sharding)
            or _too_large(operands, config)
        )

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """Always: the reference copies the keys of every list."""
        return True


def _too_large(operands: Operands, config: CallConfig) -> Exception | None:
    shards = devices.shards_of(config.sharding, 0) * devices.shards_of(config.sharding, 2)
    arrays = {"q": operands.q, "k": operands.k, "blocks.indices": operands.blocks.indices}
    for name, array in arrays.items():
        if array.size // shards >= _MOST_ELEMENTS:
            return NotImplementedError(
                f"{name} {array.shape} has 2³¹ elements or more on a device; split it over "
                "more devices or calls"
            )
    return None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: BlockLists, config: CallConfig
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.block_sparse_attention.triton import calls

    run = partial(calls.forward, options=config.options)
    return on_shards(config.sharding, run, "forward")(Operands(q, k, v, blocks))


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: BlockLists, config: CallConfig
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    # Named, so that `jax.checkpoint` can keep them: the kernel is then not run again.
    out, lse = (checkpoint_name(x, OUTPUT_NAME) for x in _attention(q, k, v, blocks, config))
    return (out, lse), Residuals(q, k, v, blocks, out, lse)


def _backward(
    config: CallConfig, residuals: Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    from pallas_kernels.block_sparse_attention.triton import calls

    run = partial(calls.backward, options=config.options)
    dq, dk, dv = on_shards(config.sharding, run, "backward")(residuals, *cotangents)
    none = jax.tree.map(lambda each: np.zeros(each.shape, jax.dtypes.float0), residuals.blocks)
    return dq, dk, dv, none


_attention.defvjp(_forward, _backward)
