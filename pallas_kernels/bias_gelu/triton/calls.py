"""The kernels' calls: arrays in, arrays out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.bias_gelu.operands import Operands, Options
from pallas_kernels.bias_gelu.triton import tuning
from pallas_kernels.bias_gelu.triton.kernels import Launch, backward_kernel, forward_kernel
from pallas_kernels.triton.reduction import reduce_partials

FORWARD, BACKWARD, REDUCE = (f"bias_gelu_{part}" for part in ("forward", "backward", "reduce"))
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(operands: Operands, options: Options) -> jax.Array:
    """Like x."""
    x = _rows(operands.x)
    launch = _launch(x, tuning.FORWARD, options)
    (out,) = _call(forward_kernel, FORWARD, (x, operands.bias[None]), [x], launch)
    return out.reshape(operands.x.shape)


def backward(
    operands: Operands, cotangent: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x, in its dtype, and of the bias, float32."""
    dx, dbias = _backward(operands, cotangent, options, with_output=False)
    return dx, dbias


def output_and_backward(
    operands: Operands, cotangent: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`backward`, and the output, like x."""
    dx, dbias, out = _backward(operands, cotangent, options, with_output=True)
    return dx, dbias, out


def _backward(
    operands: Operands, cotangent: jax.Array, options: Options, *, with_output: bool
) -> list[jax.Array]:
    x = _rows(operands.x)
    launch = _launch(x, tuning.BACKWARD, options)
    sums = jax.ShapeDtypeStruct((launch.along, launch.dim), jnp.float32)
    given = (x, operands.bias[None], _rows(cotangent))
    # The gradient of x takes the memory of the cotangent, and the output that of x: nothing else
    # needs them in a backward pass, or XLA copies them before.
    in_place = {2: 0} if cotangent.dtype == x.dtype else {}
    outputs = [x, sums, x] if with_output else [x, sums]
    in_place |= {0: 2} if with_output else {}
    dx, partial_sums, *out = _call(backward_kernel, BACKWARD, given, outputs, launch, in_place)
    table = (1, launch.dim)
    dbias = reduce_partials(partial_sums, None, launch.along, table, options.interpret, REDUCE)
    return [dx.reshape(operands.x.shape), dbias[0], *(o.reshape(operands.x.shape) for o in out)]


def _rows(x: jax.Array) -> jax.Array:
    """[tokens, D]."""
    return x.reshape(-1, x.shape[-1])


def _launch(x: jax.Array, blocks: tuning.Blocks, options: Options) -> Launch:
    tokens, dim = x.shape
    programs = tuning.programs(blocks, tokens, dim)
    return Launch(tokens, dim, blocks, *programs, options.interpret)


def _call(
    kernel: Callable[..., None],
    name: str,
    inputs: Sequence[jax.Array],
    outputs: Sequence[Any],
    launch: Launch,
    in_place: Mapping[int, int] | None = None,
) -> Any:
    """Runs a kernel; the outputs have the shapes and dtypes of `outputs`.

    `in_place` says by numbers which input's memory an output takes.
    """
    return pl.pallas_call(
        partial(kernel, launch=launch),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs],
        grid=(launch.along * launch.across,),
        compiler_params=plgpu.CompilerParams(num_warps=launch.blocks.num_warps, num_stages=1),
        input_output_aliases=dict(in_place or {}),
        interpret=launch.interpret,
        name=name,
    )(*inputs)
