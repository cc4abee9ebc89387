"""The kernels' calls: arrays in, arrays out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sparse_attention.block_lists import InvertedLists
from pallas_kernels.block_sparse_attention.differentiable import Cotangents
from pallas_kernels.block_sparse_attention.kernel_lists import key_lists, query_lists
from pallas_kernels.block_sparse_attention.operands import Operands, Options, Residuals
from pallas_kernels.block_sparse_attention.triton.kernels import (
    Launch,
    dkv_kernel,
    dq_kernel,
    forward_kernel,
)
from pallas_kernels.block_sparse_attention.triton.tuning import Pass, Tiles, tiles_for

NAMES: dict[Pass, str] = {
    "forward": "block_sparse_attention_forward",
    "dq": "block_sparse_attention_dq",
    "dkv": "block_sparse_attention_dkv",
}
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(
    operands: Operands, options: Options, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]; no operand may be empty.

    Args:
      operands: of the call.
      options: of the call.
      tiles: of the kernel; None for those that were measured as fastest.
    """
    q, k, v, blocks = operands
    rows, tokens, heads, _ = q.shape
    shapes = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32),
    ]
    call = Call("forward", forward_kernel, tiles)
    out, lse = _run(call, operands, options, (q, k, v, query_lists(blocks)), shapes)
    return out, lse


def query_gradient(
    residuals: Residuals, read: Cotangents, options: Options, tiles: Tiles | None = None
) -> jax.Array:
    """The gradient of q; `tiles` as in `forward`."""
    q, k, v, blocks = residuals[:4]
    arrays = (q, k, v, read.dout, read.lse, read.delta, query_lists(blocks))
    shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    call = Call("dq", dq_kernel, tiles)
    (dq,) = _run(call, Operands(q, k, v, blocks), options, arrays, shape)
    return dq


def key_gradients(
    residuals: Residuals,
    read: Cotangents,
    inverted: InvertedLists,
    options: Options,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v; `tiles` as in `forward`."""
    q, k, v, blocks = residuals[:4]
    arrays = (q, k, v, read.dout, read.lse, read.delta, key_lists(blocks, inverted))
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (k, v)]
    call = Call("dkv", dkv_kernel, tiles)
    dk, dv = _run(call, Operands(q, k, v, blocks), options, arrays, shapes)
    return dk, dv


class Call(NamedTuple):
    """A kernel to run.

    Attributes:
      kernel: which one.
      body: what a program does.
      tiles: as in `forward`.
    """

    kernel: Pass
    body: Callable[..., None]
    tiles: Tiles | None


def _run(
    call: Call,
    operands: Operands,
    options: Options,
    arrays: Sequence[Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> Any:
    """Runs a kernel with a program for each tile of each head."""
    blocks, (rows, _, heads, width) = operands.blocks, operands.q.shape
    tiles = call.tiles or tiles_for(call.kernel, blocks.query_block)
    launch = Launch(heads, width, blocks.query_block, blocks.key_block, options.scale, tiles)
    if call.kernel == "dkv":
        programs = blocks.key_tokens.shape[1] * (blocks.key_block // tiles.key)
    else:
        programs = blocks.query_tokens.shape[1] * (blocks.query_block // tiles.query)
    return pl.pallas_call(
        partial(call.body, launch=launch),
        out_shape=list(shapes),
        grid=(rows * heads * programs,),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=options.interpret,
        name=NAMES[call.kernel],
    )(*arrays)
