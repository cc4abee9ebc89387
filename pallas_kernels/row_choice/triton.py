"""The kernel of chosen rows, and its call."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.op import Ref
from pallas_kernels.row_choice.api import NAME, RowOperands

_ROWS, _COLUMNS, _WARPS = 16, 512, 4
"""Of a program."""


def choose(operands: RowOperands, interpret: bool) -> jax.Array:
    """[T, D] like the parts; it takes the memory of the last part."""
    parts, choice = operands
    tokens, width = parts[0].shape
    if not parts[0].size:
        return parts[-1]
    columns = min(_COLUMNS, pl.next_power_of_2(width))
    return pl.pallas_call(
        partial(_kernel, tokens=tokens, width=width, columns=columns),
        out_shape=jax.ShapeDtypeStruct((tokens, width), parts[0].dtype),
        grid=(pl.cdiv(tokens, _ROWS), pl.cdiv(width, columns)),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        input_output_aliases={len(parts): 0},
        interpret=interpret,
        name=NAME,
    )(choice, *parts)


def _kernel(choice_ref: Ref, *refs: Ref, tokens: int, width: int, columns: int) -> None:
    """choice [T], parts [T, D] → out [T, D], which begins as the last part."""
    *others, _, out_ref = refs
    rows = pl.program_id(0) * _ROWS + jnp.arange(_ROWS)
    column = pl.program_id(1) * columns + jnp.arange(columns)
    choice = plgpu.load(choice_ref.at[rows], mask=rows < tokens, other=len(others))
    moved = choice != len(others)

    @pl.when(jnp.max(moved.astype(jnp.int32)) > 0)
    def move() -> None:
        inside = (column < width)[None, :]
        where = tuple(jnp.broadcast_arrays(rows[:, None], column[None, :]))
        value = jnp.zeros((_ROWS, columns), out_ref.dtype)
        for number, ref in enumerate(others):
            mask = (choice == number)[:, None] & inside
            value = jnp.where(mask, plgpu.load(ref.at[where], mask=mask, other=0), value)
        plgpu.store(out_ref.at[where], value, mask=moved[:, None] & inside)
