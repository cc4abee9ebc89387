"""The kernels' calls: arrays in, arrays out."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layernorm_modulate.backward_arrays import (
    backward_arrays,
    gradients,
    table_sums,
)
from pallas_kernels.layernorm_modulate.operands import Operands, Options, Residuals
from pallas_kernels.layernorm_modulate.row_blocks import EvenRowBlocks, RowBlocks, row_blocks_of
from pallas_kernels.layernorm_modulate.triton.division import Blocks
from pallas_kernels.layernorm_modulate.triton.kernels import (
    backward_kernel,
    forward_kernel,
    h_backward_kernel,
)
from pallas_kernels.layernorm_modulate.triton.rows import Launch

FORWARD, STATISTICS, BACKWARD, H_BACKWARD, REDUCE = (
    f"layernorm_modulate_{part}"
    for part in ("forward", "statistics", "backward", "h_backward", "reduce")
)
"""Names of the kernels, as profilers and lowered modules show them."""


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
    inputs = operands._asdict() | {"segment_ids": None, "prepared": None}
    row_blocks = row_blocks_of(operands, options, blocks.programs)
    name = STATISTICS if "statistics" in outputs and "out" not in outputs else FORWARD
    result = _call(forward_kernel, name, inputs, ids, shapes, options, blocks, row_blocks)
    return [result[key].reshape(*x.shape[:-1], -1) for key in outputs]


def backward(
    residuals: Residuals,
    dh: jax.Array | None,
    dout: jax.Array | None,
    options: Options,
    blocks: Blocks,
) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
    """Gradients of x, of y (None without), and of scale, shift and, where there is one, gate.

    Args:
      residuals: of the forward.
      dh: [B, S, D] cotangent of h; None without y.
      dout: [B, S, D] cotangent of the modulated value; None where it was not used.

    Returns:
      dx and dy [B, S, D]; the rest as one float32 array [K, *scale.shape], in the order scale,
      shift, gate, or in the layout "token" as K arrays of the operands' dtypes.
    """
    if dout is None:
        assert dh is not None
        return _h_backward(residuals, dh, options, blocks)
    row_blocks = row_blocks_of(residuals, options, blocks.programs)
    arrays = backward_arrays(residuals, dh, dout, options, row_blocks)
    ids = residuals.segment_ids
    result = _call(
        *(backward_kernel, BACKWARD, arrays.inputs, ids, arrays.outputs),
        *(options, blocks, row_blocks),
    )
    return gradients(result, residuals, dh, options, row_blocks, REDUCE)


def _h_backward(
    residuals: Residuals, dh: jax.Array, options: Options, blocks: Blocks
) -> tuple[jax.Array, jax.Array, Sequence[jax.Array] | jax.Array]:
    """`backward` of h = x + gate·y alone."""
    zeros = [jnp.zeros(residuals.scale.shape, jnp.float32)] * 2
    if residuals.gate is None:
        inside = True if residuals.segment_ids is None else residuals.segment_ids[..., None] >= 0
        dsum = jnp.where(inside, dh, jnp.zeros((), dh.dtype))
        tables = zeros if options.layout == "token" else jnp.stack(zeros)
        return dsum.astype(options.x_dtype), dsum.astype(options.out_dtype), tables
    ids, shape = residuals.segment_ids, (dh.size // dh.shape[-1], dh.shape[-1])
    row_blocks = row_blocks_of(residuals, options, blocks.programs)
    shapes = {"dy": jax.ShapeDtypeStruct(shape, options.out_dtype)}
    if ids is not None:
        # Padding's gradient is zero. Elsewhere that of x is dh itself.
        shapes["dx"] = jax.ShapeDtypeStruct(shape, options.x_dtype)
    if options.layout == "token":
        shapes["dgate"] = jax.ShapeDtypeStruct(shape, residuals.gate.dtype)
    else:
        shapes["partial"] = jax.ShapeDtypeStruct(
            (dh.shape[0] * row_blocks.per_row, shape[1]), jnp.float32
        )
    inputs = {"dh": dh, "y": residuals.y, "gate": residuals.gate}
    name = H_BACKWARD
    result = _call(h_backward_kernel, name, inputs, ids, shapes, options, blocks, row_blocks)
    dx = result["dx"].reshape(dh.shape) if "dx" in result else dh.astype(options.x_dtype)
    dy = result["dy"].reshape(dh.shape)
    if options.layout == "token":
        return dx, dy, [*zeros, result["dgate"].reshape(dh.shape)]
    total = table_sums(*(result["partial"], row_blocks, residuals.gate.shape, options, REDUCE))
    return dx, dy, jnp.stack([*zeros, total.reshape(residuals.gate.shape)])


def _call(
    kernel: Callable[..., None],
    name: str,
    inputs: dict[str, jax.Array | None],
    ids: jax.Array | None,
    outputs: dict[str, jax.ShapeDtypeStruct],
    options: Options,
    blocks: Blocks,
    row_blocks: EvenRowBlocks | RowBlocks,
) -> dict[str, jax.Array]:
    """Runs a kernel over all row blocks; arrays go in and come out as [rows, D]."""
    arrays = {k: v.reshape(-1, v.shape[-1]) for k, v in inputs.items() if v is not None}
    if ids is not None and isinstance(row_blocks, RowBlocks):
        arrays["ids"] = ids.reshape(-1)
        arrays |= {name: part.reshape(-1) for name, part in row_blocks._asdict().items()}
    dim = next(iter(arrays.values())).shape[1]
    even = row_blocks if isinstance(row_blocks, EvenRowBlocks) else None
    launch = Launch((*arrays, *outputs), dim, options, blocks, even)
    results = pl.pallas_call(
        partial(kernel, launch=launch),
        out_shape=list(outputs.values()),
        grid=(row_blocks.total,),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=options.interpret,
        name=name,
    )(*arrays.values())
    return dict(zip(outputs, results, strict=True))
