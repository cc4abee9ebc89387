"""The Mosaic GPU kernels of a bias with GELU, and their calls.

A program has some columns, and walks through consecutive tokens. The backward adds up its part of
the bias's gradient in registers, and XLA adds the programs' parts. Nothing is atomic: equal inputs
give equal bits.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bias_gelu.api import GeluOperands, gelu, gelu_and_slope
from pallas_kernels.mosaic_rows import (
    Refs,
    begun_ring,
    columns_of,
    even_rows,
    in_chunks,
    ring_scratch,
    run_walks,
)
from pallas_kernels.op import Plain
from pallas_kernels.walks import LANES, Pace, chunks_of, way_of

FORWARD_PACE, BACKWARD_PACE = Pace(16, 12, 90_000), Pace(16, 4, 90_000)


_WRITTEN = {"out": "x", "dx": "dout"}
"""Outputs, and what stood in the slots that they are written to."""


def kernel(ref: Refs, along: int, across: int) -> None:
    """x, bias → GELU of their sum; or with `dout` → gradient of x, sums of the bias's, [GELU].

    Programs are so many along the tokens and along the width.
    """
    program, (tokens, chunks, _) = lax.axis_index("program"), ref["x"].shape
    place, number = program // across, lax.rem(program, jnp.int32(across))
    columns = columns_of(chunks * LANES, across, number)
    streams = [name for name in ("x", "dout") if name in ref]
    written = {stream: ref[name] for name, stream in _WRITTEN.items() if name in ref}
    ring = begun_ring(ref, streams, 0, columns, even_rows(place, tokens, along))
    bias = columns.of(ref["bias"], 0)
    biases = [piece.load(bias, optimized=False) for piece in columns.pieces]

    power = partial(_power_and_reciprocal, exact=ref["x"].dtype == jnp.float32)

    def work(row: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        slot = ring.wait(row)
        ring.fetch_last(row)
        more = []
        for number, (piece, of_piece) in enumerate(zip(columns.pieces, biases, strict=True)):
            z = piece.load(slot["x"]) + of_piece
            if not sums:
                piece.store(slot["x"], gelu(z, power))
                continue
            out, slope = gelu_and_slope(z, power)
            dx = piece.load(slot["dout"]) * slope
            piece.store(slot["dout"], dx)
            if "out" in ref:
                piece.store(slot["x"], out)
            more.append(sums[number] + dx)
        ring.write(row, written)
        return more

    zeros = [piece.zeros() for piece in columns.pieces] if "partial" in ref else []
    sums = lax.fori_loop(ring.start, ring.stop, work, zeros)
    for piece, total in zip(columns.pieces, sums, strict=False):
        piece.store(columns.of(ref["partial"], place), total)
    plgpu.wait_smem_to_gmem(0)


def _power_and_reciprocal(exponent: jax.Array, exact: bool) -> tuple[jax.Array, jax.Array]:
    """As in the Triton kernels; a reciprocal by itself would be divided for, which is slow.

    The square of a root is right to 5 units in the last place of float32, and to one after a step
    of Newton's method.
    """
    power = jnp.exp2(exponent)
    root = lax.rsqrt(1 + power)
    reciprocal = root * root
    return power, reciprocal * (2 - (1 + power) * reciprocal) if exact else reciprocal


FORWARD, BACKWARD = "bias_gelu_mosaic_forward", "bias_gelu_mosaic_backward"
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(operands: GeluOperands, options: Plain) -> jax.Array:
    """Like x."""
    del options
    (out,) = call(FORWARD, operands, {}, ("out",), FORWARD_PACE)
    return out


def backward(
    operands: GeluOperands, cotangent: jax.Array, options: Plain, with_output: bool = False
) -> tuple[jax.Array, ...]:
    """Gradients of x, in its dtype, and of the bias, float32; then the output, where asked for."""
    del options
    names = ("dx", "out") if with_output else ("dx",)
    dx, *out, sums = call(BACKWARD, operands, {"dout": cotangent}, names, BACKWARD_PACE)
    return dx, sums.sum(axis=0), *out


def call(
    name: str,
    operands: GeluOperands,
    cotangents: Mapping[str, jax.Array],
    outputs: tuple[str, ...],
    pace: Pace,
) -> list[jax.Array]:
    """Outputs like x, and in the backward the programs' sums of the bias's gradient."""
    x, dim = in_chunks(operands.x), operands.x.shape[-1]
    tokens, chunks, _ = x.shape
    streams = {"x": x, **{each: in_chunks(value) for each, value in cotangents.items()}}
    across = -(-chunks // pace.chunks)
    columns = chunks_of(dim, across)
    way = way_of(LANES * columns, sum(each.dtype.itemsize for each in streams.values()), pace, 1)
    assert way is not None
    along = max(1, min(tokens, way.programs // across))
    shapes = {each: jax.ShapeDtypeStruct(x.shape, x.dtype) for each in outputs}
    if cotangents:
        shapes["partial"] = jax.ShapeDtypeStruct((along, chunks, LANES), jnp.float32)
    inputs = {**streams, "bias": in_chunks(operands.bias)}
    scratch = ring_scratch(streams, 1, columns, way.slots)
    static, programs = {"along": along, "across": across}, along * across
    found = run_walks(kernel, name, static, programs, 1, inputs, shapes, scratch, approx_math=True)
    like = [operands.x.shape] * len(outputs) + [(along, dim)] * bool(cotangents)
    return [result.reshape(shape) for result, shape in zip(found.values(), like, strict=True)]
