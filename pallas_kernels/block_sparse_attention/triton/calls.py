"""The kernels' calls: arrays in, arrays out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sparse_attention.block_lists import invert, longest_first
from pallas_kernels.block_sparse_attention.operands import Operands, Options, Residuals
from pallas_kernels.block_sparse_attention.triton.kernels import (
    Launch,
    dkv_kernel,
    dq_kernel,
    forward_kernel,
)
from pallas_kernels.block_sparse_attention.triton.tuning import Pass, tiles_for

NAMES: dict[Pass, str] = {
    "forward": "block_sparse_attention_forward",
    "dq": "block_sparse_attention_dq",
    "dkv": "block_sparse_attention_dkv",
}
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(operands: Operands, options: Options) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]; no operand may be empty."""
    q, k, v, blocks = operands
    order = longest_first(blocks.counts)
    rows, tokens, heads, _ = q.shape
    shapes = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32),
    ]
    lists = (blocks.indices, blocks.counts, order, blocks.query_tokens, blocks.key_tokens)
    out, lse = _call("forward", forward_kernel, operands, options, (q, k, v, *lists), shapes)
    return out, lse


def backward(
    residuals: Residuals, dout: jax.Array, dlse: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, each in its shape and dtype.

    Args:
      residuals: of the forward.
      dout: [R, S, H, D], cotangent of the output.
      dlse: [R, H, S] float32, cotangent of the statistics.
      options: of the call.
    """
    q, k, v, blocks, out, lse = residuals
    operands = Operands(q, k, v, blocks)
    products = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    delta = products.swapaxes(1, 2) - jnp.where(jnp.isfinite(lse), dlse, 0.0)
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    shared = (q, k, v, dout.astype(q.dtype), lse, delta)
    tokens = (blocks.query_tokens, blocks.key_tokens)
    lists = (blocks.indices, blocks.counts, longest_first(blocks.counts))
    shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    (dq,) = _call("dq", dq_kernel, operands, options, (*shared, *lists, *tokens), shape)
    found = invert(blocks)
    lists = (found.queries, found.offsets, longest_first(jnp.diff(found.offsets)))
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (k, v)]
    dk, dv = _call("dkv", dkv_kernel, operands, options, (*shared, *lists, *tokens), shapes)
    return dq, dk, dv


def _call(
    kernel: Pass,
    body: Callable[..., None],
    operands: Operands,
    options: Options,
    arrays: Sequence[jax.Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> Any:
    """Runs a kernel with a program for each tile of each head."""
    blocks, (rows, _, heads, width) = operands.blocks, operands.q.shape
    tiles = tiles_for(kernel, blocks.query_block, blocks.key_block)
    launch = Launch(heads, width, blocks.query_block, blocks.key_block, options.scale, tiles)
    if kernel == "dkv":
        programs = blocks.key_tokens.shape[1] * (blocks.key_block // tiles.key)
    else:
        programs = blocks.query_tokens.shape[1] * (blocks.query_block // tiles.query)
    return pl.pallas_call(
        partial(body, launch=launch),
        out_shape=list(shapes),
        grid=(rows * heads * programs,),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=options.interpret,
        name=NAMES[kernel],
    )(*arrays)
