"""The Mosaic GPU kernels, and their calls.

A program has the walks of a multiprocessor, each through consecutive rows, so that their registers
fit. Each of a walk's groups of 128 threads has columns of its own: it copies its part of the rows
to come into shared memory with the tensor memory accelerator, and registers hold little more than
one row, its columns of scale, shift and gate, and in the backward the float32 sums of their
gradients. Results are written where the row stood and copied from there. The groups exchange their
sums over a row.

Where a segment ends within a walk's rows it writes its sums and goes on, so that walks are as long
as those of rows without segments. Nothing is atomic: equal inputs give equal bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import PyTree

from pallas_kernels.layernorm_modulate.operands import (
    Gradients,
    NormOperands,
    NormOptions,
    NormResiduals,
)
from pallas_kernels.layernorm_modulate.row_blocks import (
    IMPOSSIBLE,
    PADDING,
    EvenRowBlocks,
    RowBlock,
    Walks,
    backward_arrays,
    for_each_row_block,
    gradients,
    row_blocks_of,
)
from pallas_kernels.mosaic_rows import (
    Columns,
    Piece,
    Refs,
    RowRing,
    begun_ring,
    columns_of,
    in_chunks,
    ring_scratch,
    row_sums,
    run_walks,
    sums_scratch,
)
from pallas_kernels.walks import LANES, Way, chunks_of


@dataclass(frozen=True)
class MosaicNormLaunch:
    """What is static in a kernel.

    Attributes:
      dim: width of a row.
      way: of the kernel.
      streams: of its refs, those that are loaded row by row.
      eps: added to the variance.
      even: the rows of each walk.
      row_blocks: how many there are.
    """

    dim: int
    way: Way
    streams: tuple[str, ...]
    eps: float
    even: EvenRowBlocks
    row_blocks: int

    @property
    def programs(self) -> int:
        """Each has as many walks as a multiprocessor."""
        return pl.cdiv(self.even.total, self.way.per_core)


STREAMS = ("h", "dout", "dh", "y")
"""Loaded row by row."""
WRITTEN = {"dx": "h", "dy": "dout"}
"""Outputs, and the streams in whose place they are written: dtypes are equal."""

Thread = tuple[jax.Array, jax.Array]
"""Its group's number of those of its walk, and the walk's first turn of sums."""
Tables = dict[str, jax.Array]
"""Rows of tables, or sums over rows that are their gradients, for a piece of a group's columns."""


def kernel(ref: Refs, launch: MosaicNormLaunch, work: Callable[..., None]) -> None:
    """Works on each row block of a walk: (block, launch, refs by name, ring, its thread)."""
    number, groups = lax.axis_index("group"), launch.way.groups
    of_program, group = lax.div(number, groups), lax.rem(number, groups)
    # Those with a row more are of as many multiprocessors as there are.
    walk = of_program * launch.programs + lax.axis_index("program")

    @pl.when(walk < launch.even.total)
    def _() -> None:
        columns, rows = columns_of(launch.dim, groups, group), launch.even.place(walk)[:2]
        ring = begun_ring(ref, launch.streams, number, columns, rows)
        one = partial(work, launch=launch, ref=ref, ring=ring, thread=(group, 2 * of_program))
        for_each_row_block(launch.even, ref, walk, one)
        plgpu.wait_smem_to_gmem(0)


def forward_block(
    block: RowBlock, launch: MosaicNormLaunch, ref: Refs, ring: RowRing, thread: Thread
) -> None:
    """x, [y, gate], scale, shift → [h], out, [mean and 1/deviation].

    The norm is that of the rounded h, which its slot holds.
    """
    (group, turn), pieces, branch = thread, ring.columns.pieces, "y" if "y" in ref else "x"
    tables = _tables(block, ref, ring.columns)
    written = {"x": ref["h"]} if "h" in ref else {}
    written[branch] = ref["out"]

    def work(row: jax.Array, _: None) -> None:
        slot = ring.wait(row)
        for piece, table in zip(pieces, tables, strict=True):
            if "y" in ref:
                y = piece.load(slot["y"])
                y = y * table["gate"] if "gate" in ref else y
                piece.store(slot["x"], piece.load(slot["x"]) + y)
        rows = [piece.load(slot["x"]) for piece in pieces]
        (total,) = row_sums(ref, turn, group, list(zip(pieces, rows, strict=True)))
        mean = total / launch.dim
        ring.fetch_last(row)
        squares = [(piece, (h - mean) * (h - mean)) for piece, h in zip(pieces, rows, strict=True)]
        (total,) = row_sums(ref, turn + 1, group, squares)
        rstd = lax.rsqrt(total / launch.dim + launch.eps)
        for piece, h, table in zip(pieces, rows, tables, strict=True):
            piece.store(slot[branch], (h - mean) * rstd * table["gain"] + table["shift"])
        ring.write(row, written)
        if "statistics" in ref:
            ref["statistics"][row, 0] = mean
            ref["statistics"][row, 1] = rstd

    _for_each_row(block, ref, turn, ring, written, work, None)


def backward_block(
    block: RowBlock, launch: MosaicNormLaunch, ref: Refs, ring: RowRing, thread: Thread
) -> None:
    """h and its statistics, dout, [dh, y, gate], scale → dx, [dy], sums of tables' gradients."""
    (group, turn), columns, pieces = thread, ring.columns, ring.columns.pieces
    written = {stream: name for name, stream in WRITTEN.items() if name in ref}
    tables = _tables(block, ref, columns)
    gated, into = "gate" in ref, {stream: ref[name] for stream, name in written.items()}

    def work(row: jax.Array, carry: PyTree) -> PyTree:
        sums, (mean, rstd) = carry
        following = _statistics(ref, row + 1)
        slot = ring.wait(row)

        def loaded(piece: Piece) -> tuple[jax.Array, jax.Array]:
            """dout, and the normed row."""
            return piece.load(slot["dout"]), (piece.load(slot["h"]) - mean) * rstd

        rows = [loaded(piece) for piece in pieces]
        terms = [
            (piece, dout * table["gain"], dout * table["gain"] * normed)
            for piece, table, (dout, normed) in zip(pieces, tables, rows, strict=True)
        ]
        gains, products = row_sums(ref, turn + lax.rem(row, jnp.int32(2)), group, terms)
        mean_grad, variance_grad = gains / launch.dim * rstd, products / launch.dim * rstd
        ring.fetch_last(row)
        more = []
        for piece, table, row_part, total in zip(pieces, tables, rows, sums, strict=True):
            dout, normed = loaded(piece) if launch.way.reloads else row_part
            dh = (dout * table["gain"] * rstd - mean_grad) - normed * variance_grad
            grads = {"dscale": dout * normed, "dshift": dout}
            if "dh" in ref:
                dh = dh + piece.load(slot["dh"])
            if gated:
                grads["dgate"] = dh * piece.load(slot["y"])
            outputs = {"dx": dh, "dy": dh * table["gate"] if gated else dh}
            for stream, name in written.items():
                piece.store(slot[stream], outputs[name])
            more.append({name: total[name] + grad for name, grad in grads.items()})
        ring.write(row, into)
        return more, following

    names = ("dscale", "dshift", *(["dgate"] if gated else []))
    zeros = [{name: piece.zeros() for name in names} for piece in pieces]
    begin = (zeros, _statistics(ref, block.start))
    sums, _ = _for_each_row(block, ref, turn, ring, into, work, begin)
    for n, name in enumerate(names):
        part = columns.of(ref["partial"], n * launch.row_blocks + block.number)
        for piece, total in zip(pieces, sums, strict=True):
            piece.store(part, total[name])


def _tables(block: RowBlock, ref: Refs, columns: Columns) -> list[Tables]:
    """1 + scale, and shift and gate if needed, of each piece; NaN where no table row can serve."""
    row, poison = jnp.maximum(block.table_row, 0), None
    if "first" in ref:
        poison = jnp.where(block.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), jnp.float32(0))

    def load(name: str, piece: Piece) -> jax.Array:
        value = piece.load(columns.of(ref[name], row), optimized=False)
        return value if poison is None else value + poison

    others = [name for name in ("shift", "gate") if name in ref]
    return [
        {"gain": load("scale", piece) + 1.0, **{name: load(name, piece) for name in others}}
        for piece in columns.pieces
    ]


def _statistics(ref: Refs, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and 1/deviation of a row, or of the last row."""
    statistics = ref["saved_statistics"]
    row = jnp.minimum(row, statistics.shape[0] - 1)
    return statistics[row, 0], statistics[row, 1]


def _for_each_row(
    block: RowBlock,
    ref: Refs,
    turn: jax.Array,
    ring: RowRing,
    written: Refs,
    work: Callable[[jax.Array, PyTree], PyTree],
    carry: PyTree,
) -> PyTree:
    """Works on each row; of padding, which may hold anything, writes zeros in place of streams."""
    if "first" not in ref:
        return lax.fori_loop(block.start, block.stop, work, carry)
    stop = jnp.where(block.table_row == PADDING, block.start, block.stop)

    def clear(row: jax.Array, _: None) -> None:
        slot = ring.wait(row)
        ring.fetch_last(row)
        for stream in written:
            for piece in ring.columns.pieces:
                piece.store(slot[stream], piece.zeros())
        ring.write(row, written)

    lax.fori_loop(stop, block.stop, clear, None)
    # Rows without sums disturb their turns: no group may write what another has still to read.
    summed = ref["summed"].at[turn]
    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)
    return lax.fori_loop(block.start, stop, work, carry)


FORWARD, BACKWARD, REDUCE = (
    f"layernorm_modulate_mosaic_{part}" for part in ("forward", "backward", "reduce")
)
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(
    operands: NormOperands, options: NormOptions, way: Way, *, statistics: bool
) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
    """What `FusedImplementation.forward` returns.

    Args:
      operands: in the layout "row" or "segment"; x has the dtype of h, and y, or else x, of out.
      options: of the call.
      way: of the kernel.
      statistics: whether mean and 1/deviation of each row are wanted, [B, S, 2] float32.
    """
    x = operands.x
    rows = x.size // x.shape[-1]
    outputs = {"out": jax.ShapeDtypeStruct((rows, x.shape[-1]), options.out_dtype)}
    if options.h == "sum":
        outputs["h"] = jax.ShapeDtypeStruct(outputs["out"].shape, options.residual_dtype)
    if statistics:
        outputs["statistics"] = jax.ShapeDtypeStruct((rows, 2), jnp.float32)
    inputs = {name: getattr(operands, name) for name in ("x", "y", "scale", "shift", "gate")}
    row_blocks = row_blocks_of(operands, options, way.per_core)
    result = _call(FORWARD, inputs, outputs, ("x", "y"), way, options, row_blocks)
    h, saved = result.get("h"), result.get("statistics")
    return (
        None if h is None else h.reshape(x.shape),
        result["out"].reshape(x.shape),
        None if saved is None else saved.reshape(*x.shape[:2], 2),
    )


def backward(
    residuals: NormResiduals,
    dh: jax.Array | None,
    dout: jax.Array,
    options: NormOptions,
    way: Way,
) -> Gradients:
    """Gradients of x, of y (None without), and of scale, shift and, where there is one, gate.

    Args:
      residuals: of the forward, in the layout "row" or "segment"; h has x's dtype.
      dh: [B, S, D] cotangent of h; None without y.
      dout: [B, S, D] cotangent of the modulated value.
      options: of the call.
      way: of the kernel.
    """
    row_blocks = row_blocks_of(residuals, options, way.per_core)
    inputs, outputs = backward_arrays(residuals, dh, dout, options, row_blocks)
    result = _call(BACKWARD, inputs, outputs, STREAMS, way, options, row_blocks)
    return gradients(result, residuals, dh, options, row_blocks, REDUCE)


def _call(
    name: str,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    loaded: tuple[str, ...],
    way: Way,
    options: NormOptions,
    row_blocks: EvenRowBlocks | Walks,
) -> dict[str, jax.Array]:
    """Runs a kernel; rows go in and come out as chunks of `LANES` columns.

    Args:
      name: of the kernel.
      inputs, outputs: by name; statistics [B, S, 2] or [rows, 2], others [..., D].
      loaded: names of the inputs that are loaded row by row.
      way, options: of the kernel.
      row_blocks: that its programs walk through.
    """
    arrays = {k: v for k, v in inputs.items() if v is not None}
    streams = {each: in_chunks(arrays[each]) for each in loaded if each in arrays}
    dim = arrays[loaded[0]].shape[-1]
    given = {
        each: value.reshape(-1, 2) if each == "saved_statistics" else in_chunks(value)
        for each, value in arrays.items()
    }
    if isinstance(row_blocks, EvenRowBlocks):
        even = row_blocks
    else:
        given |= row_blocks.refs()
        batch, each = row_blocks.first.shape
        even = EvenRowBlocks(batch, len(streams[loaded[0]]) // batch, each)
    together = way.groups * way.per_core
    scratch = ring_scratch(streams, together, chunks_of(dim, way.groups), way.slots)
    scratch |= sums_scratch(way.groups, way.per_core)
    launch = MosaicNormLaunch(dim, way, tuple(streams), options.eps, even, row_blocks.total)
    work = forward_block if name == FORWARD else backward_block
    shapes = {
        each: jax.ShapeDtypeStruct(
            (rows, dim // LANES, LANES) if width == dim else (rows, width), shape.dtype
        )
        for each, shape in outputs.items()
        for rows, width in [shape.shape]
    }
    body, static = partial(kernel, work=work), {"launch": launch}
    found = run_walks(body, name, static, launch.programs, together, given, shapes, scratch)
    return {each: result.reshape(outputs[each].shape) for each, result in found.items()}
