"""What a backward kernel reads and writes, and the gradients from it, however it is lowered."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layernorm_modulate.operands import Options, Residuals
from pallas_kernels.layernorm_modulate.row_blocks import EvenRowBlocks, RowBlocks


class BackwardArrays(NamedTuple):
    """Of a backward kernel, by name.

    Attributes:
      inputs: h, dout, saved_statistics and scale, and dh, y and gate where there are any.
      outputs: [rows, D] each: dx; dy unless it is none or equal to dx; the gradients dscale,
        dshift and dgate of the layout "token", or else `partial`, the sums of each row block:
        those of scale, then of shift, then of gate.
    """

    inputs: dict[str, jax.Array | None]
    outputs: dict[str, jax.ShapeDtypeStruct]


def backward_arrays(
    residuals: Residuals,
    dh: jax.Array | None,
    dout: jax.Array,
    options: Options,
    row_blocks: EvenRowBlocks | RowBlocks,
) -> BackwardArrays:
    """The arrays for a call with these residuals and cotangents."""
    h, tables = residuals.h, _tables(residuals)
    inputs = residuals._asdict() | {"dout": dout, "dh": dh, "shift": None}
    del inputs["prepared"], inputs["segment_ids"]
    inputs["saved_statistics"] = inputs.pop("statistics")
    shape = (h.size // h.shape[-1], h.shape[-1])
    outputs = {"dx": jax.ShapeDtypeStruct(shape, options.x_dtype)}
    # Without a gate both gradients are dh, and alike unless they are rounded differently.
    alike = residuals.gate is None and options.x_dtype == options.out_dtype
    if dh is not None and not alike:
        outputs["dy"] = jax.ShapeDtypeStruct(shape, options.out_dtype)
    if options.layout == "token":
        for name, value in tables.items():
            outputs[f"d{name}"] = jax.ShapeDtypeStruct(shape, value.dtype)
    else:
        rows = len(tables) * h.shape[0] * row_blocks.per_row
        outputs["partial"] = jax.ShapeDtypeStruct((rows, shape[1]), jnp.float32)
    return BackwardArrays(inputs, outputs)


def gradients(
    result: Mapping[str, jax.Array],
    residuals: Residuals,
    dh: jax.Array | None,
    options: Options,
    row_blocks: EvenRowBlocks | RowBlocks,
    name: str,
) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
    """What `FusedImplementation.backward` returns, from the outputs; `name` as in `table_sums`."""
    shape, tables = residuals.h.shape, _tables(residuals)
    dx = result["dx"].reshape(shape)
    dy = result["dy"].reshape(shape) if "dy" in result else None if dh is None else dx
    if options.layout == "token":
        return dx, dy, [result[f"d{table}"].reshape(shape) for table in tables]
    sums = table_sums(result["partial"], row_blocks, residuals.scale.shape, options, name)
    return dx, dy, sums.reshape(len(tables), *residuals.scale.shape)


def table_sums(
    partial_sums: jax.Array,
    row_blocks: EvenRowBlocks | RowBlocks,
    table: tuple[int, ...],
    options: Options,
    name: str,
) -> jax.Array:
    """`reduce_partials`, by a kernel of this name, of what row blocks were summed up to."""
    from pallas_kernels.triton.reduction import reduce_partials

    table_row = row_blocks.table_row.reshape(-1) if isinstance(row_blocks, RowBlocks) else None
    return reduce_partials(
        *(partial_sums, table_row, row_blocks.per_row, table, options.interpret), name
    )


def _tables(residuals: Residuals) -> dict[str, jax.Array]:
    """The tables that have gradients; `shift` for its dtype."""
    tables = {"scale": residuals.scale, "shift": residuals.shift}
    return tables | ({} if residuals.gate is None else {"gate": residuals.gate})
