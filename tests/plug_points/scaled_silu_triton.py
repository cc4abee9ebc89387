"""The Triton kernels of `scaled_silu`: one program for each token."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def forward(operands, options):
    """[B, S, D]."""
    rows = operands.x.reshape(-1, operands.x.shape[-1])
    (out,) = _call(_forward, [rows, operands.scale[None]], [rows], options)
    return out.reshape(operands.x.shape)


def backward(operands, cotangent, options):
    """Gradients of x, in its dtype, and of the scale, float32."""
    rows, given = (each.reshape(-1, each.shape[-1]) for each in (operands.x, cotangent))
    parts = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    dx, dscale = _call(_backward, [rows, operands.scale[None], given], [rows, parts], options)
    return dx.reshape(operands.x.shape), dscale.sum(axis=0)


def _call(kernel, inputs, outputs, options):
    tokens, width = inputs[0].shape
    block = pl.BlockSpec((1, width), lambda token: (token, 0))
    shared = pl.BlockSpec((1, width), lambda token: (0, 0))
    return pl.pallas_call(
        kernel,
        grid=(tokens,),
        in_specs=[block, shared, *[block] * (len(inputs) - 2)],
        out_specs=[block] * len(outputs),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=options.interpret,
    )(*inputs)


def _forward(x, scale, out):
    z = x[...].astype(jnp.float32) * scale[...].astype(jnp.float32)
    out[...] = (z * jax.nn.sigmoid(z)).astype(out.dtype)


def _backward(x, scale, given, dx, dscale):
    wide, factor = x[...].astype(jnp.float32), scale[...].astype(jnp.float32)
    gate = jax.nn.sigmoid(wide * factor)
    slope = given[...].astype(jnp.float32) * gate * (1 + wide * factor * (1 - gate))
    dx[...] = (slope * factor).astype(dx.dtype)
    dscale[...] = slope * wide
