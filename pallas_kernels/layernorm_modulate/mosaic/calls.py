"""The kernel's call: arrays in, arrays out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.layernorm_modulate.backward_arrays import (
    BackwardArrays,
    backward_arrays,
    gradients,
)
from pallas_kernels.layernorm_modulate.mosaic.columns import WARPS
from pallas_kernels.layernorm_modulate.mosaic.kernels import STREAMS, backward_kernel
from pallas_kernels.layernorm_modulate.mosaic.rows import Launch
from pallas_kernels.layernorm_modulate.mosaic.tuning import LANES, Way, chunks_of, programs_of
from pallas_kernels.layernorm_modulate.mosaic.walks import Walks, walks_of
from pallas_kernels.layernorm_modulate.operands import Options, Residuals
from pallas_kernels.layernorm_modulate.row_blocks import (
    EvenRowBlocks,
    RowBlocks,
    even_row_blocks,
)

BACKWARD, REDUCE = (f"layernorm_modulate_mosaic_{part}" for part in ("backward", "reduce"))
"""Names of the kernels, as profilers and lowered modules show them."""


def backward(
    residuals: Residuals,
    dh: jax.Array | None,
    dout: jax.Array,
    options: Options,
    way: Way,
    walks: Walks | None = None,
) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
    """Gradients of x, of y (None without), and of scale, shift and, where there is one, gate.

    Args:
      residuals: of the forward, in the layout "row" or "segment"; h has x's dtype.
      dh: [B, S, D] cotangent of h; None without y.
      dout: [B, S, D] cotangent of the modulated value.
      options: of the call.
      way: of the kernel.
      walks: `walks_of` the segments, if they were prepared.

    Returns:
      dx and dy [B, S, D]; the rest as one float32 array [K, *scale.shape], in the order scale,
      shift, gate.
    """
    row_blocks: EvenRowBlocks | RowBlocks
    walked: EvenRowBlocks | Walks
    if options.layout == "row":
        walked = row_blocks = even_row_blocks(residuals.h.shape, options, programs_of(way))
    else:
        ids, tables = residuals.segment_ids, residuals.scale.shape[1]
        assert ids is not None
        if walks is None:
            walks = walks_of(ids, tables, options.segment_block, programs_of(way))
        walked = walks.flattened(ids.shape[1], tables)
        row_blocks = walked.row_blocks
    arrays = backward_arrays(residuals, dh, dout, options, row_blocks)
    result = _call(arrays, residuals.segment_ids, way, walked)
    return gradients(result, residuals, dh, options, row_blocks, REDUCE)


def _call(
    arrays: BackwardArrays,
    ids: jax.Array | None,
    way: Way,
    walks: Walks | EvenRowBlocks,
) -> dict[str, jax.Array]:
    """Runs the kernel; rows go in and come out as chunks of `LANES` columns."""
    inputs = {k: v for k, v in arrays.inputs.items() if v is not None}
    dim, statistics = inputs["h"].shape[-1], inputs.pop("saved_statistics")
    total = dim // LANES
    given = {name: value.reshape(-1, total, LANES) for name, value in inputs.items()}
    given["saved_statistics"] = statistics.reshape(-1, 2)
    if isinstance(walks, Walks):
        assert ids is not None
        programs, row_blocks, even = walks.first.size, walks.row_blocks.total, None
        lists = {"ids": ids, "first": walks.first, "end": walks.end}
        lists |= walks.row_blocks._asdict()
        given |= {name: each.reshape(-1) for name, each in lists.items()}
    else:
        programs, row_blocks, even = walks.total, walks.total, walks
    scratch = _scratch({name: given[name].dtype for name in STREAMS if name in given}, dim, way)
    names = (*given, *arrays.outputs, *scratch)
    launch = Launch(names, dim, way, even, row_blocks)
    results = plgpu.kernel(
        partial(backward_kernel, launch=launch),
        out_type=[
            jax.ShapeDtypeStruct((shape.shape[0], total, LANES), shape.dtype)
            for shape in arrays.outputs.values()
        ],
        scratch_types=list(scratch.values()),
        # Each thread writes only what it alone has read, and barriers stand where others' is read.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=(programs,),
        grid_names=("program",),
        num_threads=way.groups,
        thread_name="group",
        kernel_name=BACKWARD,
    )(*given.values())
    named = zip(arrays.outputs.items(), results, strict=True)
    return {name: result.reshape(shape.shape) for (name, shape), result in named}


def _scratch(streams: dict[str, jnp.dtype], dim: int, way: Way) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    groups, _, slots = way
    shape = (groups, slots, chunks_of(dim, groups), LANES)
    return {
        **{f"{name}_slots": plgpu.SMEM(shape, dtype) for name, dtype in streams.items()},
        "arrived": plgpu.Barrier(num_arrivals=len(streams), num_barriers=(groups, slots)),
        "row_sums": plgpu.SMEM((2, groups, 2, WARPS), jnp.float32),
        "summed": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
    }
