"""The kernels' calls: arrays in, arrays out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layernorm_modulate.operands import Operands, Options, Saved
from pallas_kernels.layernorm_modulate.pieces import (
    Grid,
    Pieces,
    even_grid,
    of_all_rows,
    segment_pieces,
)
from pallas_kernels.layernorm_modulate.triton.kernels import (
    backward_kernel,
    forward_kernel,
    sum_backward_kernel,
)
from pallas_kernels.layernorm_modulate.triton.reduction import reduce_partials
from pallas_kernels.layernorm_modulate.triton.rows import Launch
from pallas_kernels.layernorm_modulate.tuning import Blocks

FORWARD, STATISTICS, BACKWARD, SUM_BACKWARD = (
    f"layernorm_modulate_{part}" for part in ("forward", "statistics", "backward", "sum_backward")
)
"""Names of the kernels, as profilers and lowered modules show them."""


class _Cut(NamedTuple):
    """How rows are cut: a grid or a table of pieces, and how many pieces each batch row has."""

    grid: Grid | None
    table: Pieces | None
    per_row: int

    @classmethod
    def of(
        cls, h: jax.Array, scale: jax.Array, of: Operands | Saved, options: Options, blocks: Blocks
    ) -> Any:
        if options.layout == "segment":
            rows, found = scale.shape[1], of.pieces
            if found is None:
                assert of.segment_ids is not None
                block = options.segment_block
                found = segment_pieces(of.segment_ids, rows, block, blocks.programs)
            return cls(None, of_all_rows(found, h.shape[1], rows), found.start.shape[1])
        grid = even_grid(h.shape, options, blocks.programs)
        return cls(grid, None, grid.per_row)


def forward(
    operands: Operands, options: Options, blocks: Blocks, outputs: Sequence[str]
) -> list[jax.Array]:
    """Some of `out` and `h` [B, S, D] and `statistics` [B, S, 2]; no operand may be empty.

    `out` is the modulated value, `h` the residual sum (with y only), and `statistics` mean and
    1/deviation of each of h's (or x's) rows, float32. Nothing else is computed or written.
    """
    x, ids = operands.x, operands.segment_ids
    dtypes = {"out": options.out_dtype, "h": options.residual_dtype, "statistics": jnp.float32}
    rows = x.size // x.shape[-1]
    shapes = {
        name: jax.ShapeDtypeStruct((rows, 2 if name == "statistics" else x.shape[-1]), dtypes[name])
        for name in outputs
    }
    inputs = operands._asdict() | {"segment_ids": None, "pieces": None}
    cut = _Cut.of(x, operands.scale, operands, options, blocks)
    name = STATISTICS if "statistics" in outputs and "out" not in outputs else FORWARD
    result = _call(forward_kernel, name, inputs, ids, shapes, options, blocks, cut)
    return [result[key].reshape(*x.shape[:-1], -1) for key in outputs]


def backward(
    saved: Saved, dh: jax.Array | None, dout: jax.Array | None, options: Options, blocks: Blocks
) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
    """Gradients of x, of y (None without), and of scale, shift and, where there is one, gate.

    Args:
      saved: by the forward.
      dh: [B, S, D] cotangent of h; None without y.
      dout: [B, S, D] cotangent of the modulated value; None where it was not used.

    Returns:
      dx and dy [B, S, D]; the rest as one float32 array [K, *scale.shape], in the order scale,
      shift, gate, or in the layout "token" as K arrays of the operands' dtypes.
    """
    if dout is None:
        assert dh is not None
        return _sum_backward(saved, dh, options, blocks)
    h, batch = saved.h, saved.h.shape[0]
    inputs = saved._asdict() | {"dout": dout, "dh": dh, "shift": None}
    ids = inputs.pop("segment_ids")
    del inputs["pieces"]
    inputs["kept"] = inputs.pop("statistics")
    cut = _Cut.of(h, saved.scale, saved, options, blocks)
    tables = {"scale": saved.scale, "shift": saved.shift}
    tables |= {} if saved.gate is None else {"gate": saved.gate}
    shape = (h.size // h.shape[-1], h.shape[-1])
    shapes = {"dx": jax.ShapeDtypeStruct(shape, options.x_dtype)}
    # Without a gate both gradients are dh, and alike unless they are rounded differently.
    alike = saved.gate is None and options.x_dtype == options.out_dtype
    if dh is not None and not alike:
        shapes["dy"] = jax.ShapeDtypeStruct(shape, options.out_dtype)
    if options.layout == "token":
        for name, value in tables.items():
            shapes[f"d{name}"] = jax.ShapeDtypeStruct(shape, value.dtype)
    else:
        rows = len(tables) * batch * cut.per_row
        shapes["partial"] = jax.ShapeDtypeStruct((rows, shape[1]), jnp.float32)
    result = _call(backward_kernel, BACKWARD, inputs, ids, shapes, options, blocks, cut)
    dx = result["dx"].reshape(h.shape)
    dy = result["dy"].reshape(h.shape) if "dy" in result else None if dh is None else dx
    if options.layout == "token":
        return dx, dy, [result[f"d{name}"].reshape(h.shape) for name in tables]
    sums = reduce_partials(
        result["partial"],
        None if cut.table is None else cut.table.table_row,
        cut.per_row,
        saved.scale.shape,
        options.interpret,
    )
    return dx, dy, sums.reshape(len(tables), *saved.scale.shape)


def _sum_backward(
    saved: Saved, dh: jax.Array, options: Options, blocks: Blocks
) -> tuple[jax.Array, jax.Array, Sequence[jax.Array] | jax.Array]:
    """`backward` of h = x + gate·y alone."""
    zeros = [jnp.zeros(saved.scale.shape, jnp.float32)] * 2
    if saved.gate is None:
        inside = True if saved.segment_ids is None else saved.segment_ids[..., None] >= 0
        kept = jnp.where(inside, dh, jnp.zeros((), dh.dtype))
        tables = zeros if options.layout == "token" else jnp.stack(zeros)
        return kept.astype(options.x_dtype), kept.astype(options.out_dtype), tables
    ids, shape = saved.segment_ids, (dh.size // dh.shape[-1], dh.shape[-1])
    cut = _Cut.of(dh, saved.gate, saved, options, blocks)
    shapes = {
        "dx": jax.ShapeDtypeStruct(shape, options.x_dtype),
        "dy": jax.ShapeDtypeStruct(shape, options.out_dtype),
    }
    if options.layout == "token":
        shapes["dgate"] = jax.ShapeDtypeStruct(shape, saved.gate.dtype)
    else:
        shapes["partial"] = jax.ShapeDtypeStruct((dh.shape[0] * cut.per_row, shape[1]), jnp.float32)
    inputs = {"dh": dh, "y": saved.y, "gate": saved.gate}
    name = SUM_BACKWARD
    result = _call(sum_backward_kernel, name, inputs, ids, shapes, options, blocks, cut)
    dx, dy = (result[key].reshape(dh.shape) for key in ("dx", "dy"))
    if options.layout == "token":
        return dx, dy, [*zeros, result["dgate"].reshape(dh.shape)]
    table_row = None if cut.table is None else cut.table.table_row
    total = reduce_partials(
        result["partial"], table_row, cut.per_row, saved.gate.shape, options.interpret
    )
    return dx, dy, jnp.stack([*zeros, total.reshape(saved.gate.shape)])


def _call(
    kernel: Callable[..., None],
    name: str,
    inputs: dict[str, jax.Array | None],
    ids: jax.Array | None,
    outputs: dict[str, jax.ShapeDtypeStruct],
    options: Options,
    blocks: Blocks,
    cut: _Cut,
) -> dict[str, jax.Array]:
    """Runs a kernel over all pieces; arrays go in and come out as [rows, D]."""
    arrays = {k: v.reshape(-1, v.shape[-1]) for k, v in inputs.items() if v is not None}
    programs = cut.per_row * (cut.grid.batch if cut.grid is not None else 1)
    if ids is not None and cut.table is not None:
        arrays |= {"ids": ids.reshape(-1), **cut.table._asdict()}
        programs = cut.table.start.size
    dim = next(iter(arrays.values())).shape[1]
    launch = Launch((*arrays, *outputs), dim, options, blocks, cut.grid)
    results = pl.pallas_call(
        partial(kernel, launch=launch),
        out_shape=list(outputs.values()),
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=options.interpret,
        name=name,
    )(*arrays.values())
    return dict(zip(outputs, results, strict=True))
