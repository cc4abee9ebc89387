"""The Triton kernels of a bias with GELU, and their calls.

A program takes some columns of some tokens at a time. The backward computes the derivative from x
again, and each program adds up its part of the bias's gradient in registers and writes it once;
another kernel adds the programs' rows in a fixed order. Nothing is atomic, so that equal inputs
give equal bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import PyTree

from pallas_kernels.bias_gelu.api import GeluOperands, gelu, gelu_and_slope
from pallas_kernels.op import Plain, Ref
from pallas_kernels.triton_tiles import Blocks, reduce_partials

FORWARD_BLOCKS = Blocks(512, 2, 2)
BACKWARD_BLOCKS = Blocks(256, 4, 4, per_core=8)
"""After a sweep on an NVIDIA H200; what they reach is in benchmarks/results/bias_gelu_h200.json."""


@dataclass(frozen=True)
class GeluLaunch:
    """What is static in a kernel.

    Attributes:
      tokens, dim: of x [tokens, dim].
      blocks: how the kernel works through them.
      along, across: programs along the tokens and along the width.
      interpret: whether the kernel runs in Pallas's interpreter, which knows no PTX.
    """

    tokens: int
    dim: int
    blocks: Blocks
    along: int
    across: int
    interpret: bool

    @property
    def steps(self) -> int:
        """Blocks of tokens of a program, at most."""
        return -(-self.tokens // (self.along * self.blocks.tokens))

    def program(self) -> tuple[jax.Array, jax.Array]:
        """Number of the program along the tokens, and its columns. Neighbours take neighbours."""
        number = pl.program_id(0)
        start = number % self.across * self.blocks.width
        return number // self.across, start + jnp.arange(self.blocks.width)

    def indices(
        self, program: jax.Array, step: jax.Array | int, columns: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Indices of a block, and which of them exist.

        The programs share the tokens in turn, so that those that run at one time read what lies
        close together.
        """
        token = (step * self.along + program) * self.blocks.tokens + jnp.arange(self.blocks.tokens)
        shape = (self.blocks.tokens, self.blocks.width)
        where = (jnp.broadcast_to(token[:, None], shape), jnp.broadcast_to(columns[None], shape))
        mask = where[0] < self.tokens
        return where, mask if self.columns_fit else mask & (where[1] < self.dim)

    def power_and_reciprocal(self, exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """p = 2^exponent and 1 / (1 + p).

        By single instructions, which are right to 2 units in the last place. The usual ones guard
        against numbers that do not occur here, and take longer than the memory does.
        """
        if self.interpret:
            power = jnp.exp2(exponent)
            return power, 1 / (1 + power)
        power = _instruction("ex2.approx.ftz.f32", exponent)
        return power, _instruction("rcp.approx.ftz.f32", 1 + power)

    @property
    def columns_fit(self) -> bool:
        """Whether no block reaches beyond the width."""
        return self.dim % self.blocks.width == 0

    def row(self, columns: jax.Array) -> jax.Array | None:
        """Which columns exist; None for all."""
        return None if self.columns_fit else columns < self.dim


def forward_kernel(x_ref: Ref, bias_ref: Ref, out_ref: Ref, *, launch: GeluLaunch) -> None:
    """x, bias → GELU of their sum."""
    program, columns = launch.program()
    bias = _load_bias(bias_ref, columns, launch)
    where, mask = launch.indices(program, 0, columns)
    z = _load(x_ref, where, mask).astype(jnp.float32) + bias
    plgpu.store(
        out_ref.at[where], gelu(z, launch.power_and_reciprocal).astype(out_ref.dtype), mask=mask
    )


def backward_kernel(
    x_ref: Ref,
    bias_ref: Ref,
    dout_ref: Ref,
    dx_ref: Ref,
    partial_ref: Ref,
    *out_ref: Ref,
    launch: GeluLaunch,
) -> None:
    """x, bias, gradient of the output → gradient of x, sums of the bias's, [the output]."""
    program, columns = launch.program()
    bias = _load_bias(bias_ref, columns, launch)

    def fetch(step: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        # Beyond the last token nothing is loaded.
        where, mask = launch.indices(program, step, columns)
        return _load(x_ref, where, mask), _load(dout_ref, where, mask)

    def body(step: jax.Array, state: PyTree) -> PyTree:
        (x, dout), total = state
        following = fetch(step + 1)
        out, slope = gelu_and_slope(x.astype(jnp.float32) + bias, launch.power_and_reciprocal)
        dx = dout.astype(jnp.float32) * slope
        where, mask = launch.indices(program, step, columns)
        for ref, value in ((dx_ref, dx), *((ref, out) for ref in out_ref)):
            plgpu.store(ref.at[where], value.astype(ref.dtype), mask=mask)
        return following, total + dx

    zeros = jnp.zeros((launch.blocks.tokens, launch.blocks.width), jnp.float32)
    total = lax.fori_loop(0, launch.steps, body, (fetch(0), zeros))[1]
    where = jnp.full_like(columns, 0) + program, columns
    plgpu.store(partial_ref.at[where], jnp.sum(total, axis=0), mask=launch.row(columns))


def _load(ref: Ref, where: tuple[jax.Array, jax.Array], mask: jax.Array) -> jax.Array:
    return plgpu.load(ref.at[where], mask=mask, other=0.0)


def _load_bias(ref: Ref, columns: jax.Array, launch: GeluLaunch) -> jax.Array:
    """[1, columns] float32."""
    mask = launch.row(columns)
    other = None if mask is None else 0.0
    loaded = plgpu.load(ref.at[jnp.zeros_like(columns), columns], mask=mask, other=other)
    return loaded.astype(jnp.float32)[None, :]


def _instruction(name: str, x: jax.Array) -> jax.Array:
    """An instruction of PTX on each element, float32."""
    (result,) = plgpu.elementwise_inline_asm(
        f"{name} $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


FORWARD, BACKWARD, REDUCE = (f"bias_gelu_{part}" for part in ("forward", "backward", "reduce"))
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(operands: GeluOperands, options: Plain) -> jax.Array:
    """Like x."""
    x = _rows(operands.x)
    launch = _launch(x, FORWARD_BLOCKS, options)
    (out,) = _call(forward_kernel, FORWARD, (x, operands.bias[None]), [x], launch)
    return out.reshape(operands.x.shape)


def backward(
    operands: GeluOperands, cotangent: jax.Array, options: Plain, with_output: bool = False
) -> tuple[jax.Array, ...]:
    """Gradients of x, in its dtype, and of the bias, float32; then the output, where asked for."""
    x = _rows(operands.x)
    launch = _launch(x, BACKWARD_BLOCKS, options)
    sums = jax.ShapeDtypeStruct((launch.along, launch.dim), jnp.float32)
    given = (x, operands.bias[None], _rows(cotangent))
    # The gradient of x takes the memory of the cotangent, and the output that of x: nothing else
    # needs them in a backward pass, or XLA copies them before.
    in_place = {2: 0} if cotangent.dtype == x.dtype else {}
    outputs = (x, sums, x) if with_output else (x, sums)
    in_place |= {0: 2} if with_output else {}
    dx, partial_sums, *out = _call(backward_kernel, BACKWARD, given, outputs, launch, in_place)
    table = (1, launch.dim)
    dbias = reduce_partials(partial_sums, None, launch.along, table, options.interpret, REDUCE)
    return dx.reshape(operands.x.shape), dbias[0], *(o.reshape(operands.x.shape) for o in out)


def _rows(x: jax.Array) -> jax.Array:
    """[tokens, D]."""
    return x.reshape(-1, x.shape[-1])


def _launch(x: jax.Array, blocks: Blocks, options: Plain) -> GeluLaunch:
    tokens, dim = x.shape
    across = -(-dim // blocks.width)
    programs = blocks.programs(tokens, across)
    return GeluLaunch(tokens, dim, blocks, programs, across, options.interpret)


def _call(
    kernel: Callable[..., None],
    name: str,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.Array | jax.ShapeDtypeStruct],
    launch: GeluLaunch,
    in_place: Mapping[int, int] | None = None,
) -> list[jax.Array]:
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
