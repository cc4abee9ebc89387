"""The kernels' calls: arrays in, arrays out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.rms_norm_rotary.operands import Operands, Options, heads_shape, rows_of
from pallas_kernels.rms_norm_rotary.triton import tuning
from pallas_kernels.rms_norm_rotary.triton.kernels import Launch, backward_kernel, forward_kernel
from pallas_kernels.triton.reduction import reduce_partials

FORWARD, BACKWARD, REDUCE = (
    f"rms_norm_rotary_{part}" for part in ("forward", "backward", "reduce")
)
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(operands: Operands, options: Options) -> jax.Array:
    """[B, S, D // head_dim, head_dim]."""
    x = operands.x
    blocks = tuning.forward_blocks(x.shape[-1], options.per_head)
    out = jax.ShapeDtypeStruct((rows_of(x), x.shape[-1]), x.dtype)
    (result,) = _call(forward_kernel, FORWARD, operands, (), [out], options, blocks)
    return result.reshape(heads_shape(x, options))


def backward(operands: Operands, cotangent: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    """Gradients of x, in its dtype, and of the weight and the bias, if there is one, float32."""
    x = operands.x
    blocks = tuning.backward_blocks(x.shape[-1], options.per_head)
    shape = (rows_of(x), x.shape[-1])
    programs = tuning.programs(blocks, shape[0])
    summed = operands.bias is not None and tuning.sums_bias(x.shape[-1], options.per_head)
    vectors = 2 if summed else 1
    outputs = [
        jax.ShapeDtypeStruct(shape, x.dtype),
        jax.ShapeDtypeStruct((vectors * programs, shape[1]), jnp.float32),
    ]
    given = (cotangent.reshape(shape),)
    dx, partial_sums = _call(backward_kernel, BACKWARD, operands, given, outputs, options, blocks)
    table = (vectors, shape[1])
    sums = reduce_partials(partial_sums, None, programs, table, options.interpret, REDUCE)
    dweight, *dbias = sums
    if options.per_head:
        dweight = dweight.reshape(-1, options.head_dim).sum(axis=0)
    if operands.bias is not None and not summed:
        dbias = [dx.astype(jnp.float32).sum(axis=0)]
    return dx.reshape(x.shape), dweight, *dbias


def _call(
    kernel: Callable[..., None],
    name: str,
    operands: Operands,
    given: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    options: Options,
    blocks: tuning.Blocks,
) -> Any:
    """Runs a kernel over all tokens; arrays go in and come out as [tokens, channels]."""
    x = operands.x.reshape(-1, operands.x.shape[-1])
    angles = (part for part in (operands.cos, operands.sin) if part is not None)
    tables = [part.reshape(-1, part.shape[-1]) for part in angles]
    weight = operands.weight.reshape(1, -1)
    programs = tuning.programs(blocks, len(x))
    tokens, dim = x.shape
    table_tokens = len(tables[0]) if tables else 0
    launch = Launch(tokens, dim, options, blocks, programs, table_tokens)
    return pl.pallas_call(
        partial(kernel, launch=launch),
        out_shape=list(outputs),
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=options.interpret,
        name=name,
    )(x, weight, *given, *tables)
