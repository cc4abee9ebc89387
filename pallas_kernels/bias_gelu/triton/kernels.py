"""What the kernels do with a block of tokens and columns at a time."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.bias_gelu.triton.tuning import Blocks

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
"""GELU(z) = z·sigmoid(_LINEAR·z + _CUBIC·z³), which is its tanh form."""
_BASE_2 = 1 / math.log(2)
"""exp(u) = exp2(_BASE_2·u)."""


@dataclass(frozen=True)
class Launch:
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

    def program(self) -> tuple[Any, jax.Array]:
        """Number of the program along the tokens, and its columns. Neighbours take neighbours."""
        number = pl.program_id(0)
        start = number % self.across * self.blocks.columns
        return number // self.across, start + jnp.arange(self.blocks.columns)

    def place(self, program: Any, step: Any, columns: jax.Array) -> tuple[Any, Any]:
        """Indices of a block, and which of them exist; None for all.

        The programs share the tokens in turn, so that those that run at one time read what lies
        close together.
        """
        token = (step * self.along + program) * self.blocks.tokens + jnp.arange(self.blocks.tokens)
        shape = (self.blocks.tokens, self.blocks.columns)
        where = (jnp.broadcast_to(token[:, None], shape), jnp.broadcast_to(columns[None], shape))
        mask = where[0] < self.tokens
        return where, mask if self.columns_fit else mask & (where[1] < self.dim)

    @property
    def columns_fit(self) -> bool:
        """Whether no block reaches beyond the width."""
        return self.dim % self.blocks.columns == 0

    def row(self, columns: jax.Array) -> Any:
        """Which columns exist; None for all."""
        return None if self.columns_fit else columns < self.dim


def forward_kernel(x_ref: Any, bias_ref: Any, out_ref: Any, *, launch: Launch) -> None:
    """x, bias → GELU of their sum."""
    program, columns = launch.program()
    bias = _load_bias(bias_ref, columns, launch)
    where, mask = launch.place(program, 0, columns)
    z = _load(x_ref, where, mask).astype(jnp.float32) + bias
    plgpu.store(out_ref.at[where], _gelu(z, launch).astype(out_ref.dtype), mask=mask)


def backward_kernel(
    x_ref: Any,
    bias_ref: Any,
    dout_ref: Any,
    dx_ref: Any,
    partial_ref: Any,
    *out_ref: Any,
    launch: Launch,
) -> None:
    """x, bias, gradient of the output → gradient of x, sums of the bias's, [the output]."""
    program, columns = launch.program()
    bias = _load_bias(bias_ref, columns, launch)

    def fetch(step: Any) -> tuple[jax.Array, jax.Array]:
        # Beyond the last token nothing is loaded.
        where, mask = launch.place(program, step, columns)
        return _load(x_ref, where, mask), _load(dout_ref, where, mask)

    def body(step: Any, state: Any) -> Any:
        (x, dout), total = state
        following = fetch(step + 1)
        out, slope = _value_and_slope(x.astype(jnp.float32) + bias, launch)
        dx = dout.astype(jnp.float32) * slope
        where, mask = launch.place(program, step, columns)
        for ref, value in ((dx_ref, dx), *((ref, out) for ref in out_ref)):
            plgpu.store(ref.at[where], value.astype(ref.dtype), mask=mask)
        return following, total + dx

    zeros = jnp.zeros((launch.blocks.tokens, launch.blocks.columns), jnp.float32)
    total = lax.fori_loop(0, launch.steps, body, (fetch(0), zeros))[1]
    where = jnp.full_like(columns, 0) + program, columns
    plgpu.store(partial_ref.at[where], jnp.sum(total, axis=0), mask=launch.row(columns))


def _load(ref: Any, where: Any, mask: Any) -> jax.Array:
    return plgpu.load(ref.at[where], mask=mask, other=0.0)


def _load_bias(ref: Any, columns: jax.Array, launch: Launch) -> jax.Array:
    """[1, columns] float32."""
    mask = launch.row(columns)
    other = None if mask is None else 0.0
    loaded = plgpu.load(ref.at[jnp.zeros_like(columns), columns], mask=mask, other=other)
    return loaded.astype(jnp.float32)[None, :]


def _gelu(z: jax.Array, launch: Launch) -> jax.Array:
    return z * _gates(z, launch)[0]


def _value_and_slope(z: jax.Array, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """GELU and its derivative."""
    gate, slope = _gates(z, launch)
    return z * gate, gate + slope * (z * (_LINEAR + 3 * _CUBIC * (z * z)))


def _gates(z: jax.Array, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """GELU(z) / z, the sigmoid's value, and its slope.

    By the exponential of what is not above 0, so that neither overflows nor cancels.
    """
    argument = z * (_BASE_2 * _LINEAR + _BASE_2 * _CUBIC * (z * z))
    power, upper = _power_and_reciprocal(-jnp.abs(argument), launch)
    lower = power * upper
    return jnp.where(argument >= 0, upper, lower), upper * lower


def _power_and_reciprocal(exponent: jax.Array, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """p = 2^exponent and 1 / (1 + p).

    By single instructions, which are right to 2 units in the last place. The usual ones guard
    against numbers that do not occur here, and take longer than the memory does.
    """
    if launch.interpret:
        power = jnp.exp2(exponent)
        return power, 1 / (1 + power)
    power = _instruction("ex2.approx.ftz.f32", exponent)
    return power, _instruction("rcp.approx.ftz.f32", 1 + power)


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
