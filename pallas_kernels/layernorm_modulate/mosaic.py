"""The Mosaic GPU kernels, and their calls.

A program walks through consecutive rows. Each of its groups of 128 threads has columns of its own:
it copies its part of the rows to come into shared memory with the tensor memory accelerator, and
registers hold little more than its columns of scale, shift and gate, and in the backward the
float32 sums of their gradients. (The Triton kernel has rows to come in registers as well, and wide
rows do not fit.) Results are written where the row stood and copied from there. The groups exchange
their sums over a row.

Where a segment ends within a program's rows it writes its sums and goes on, so that programs are as
long as those of rows without segments. Nothing is atomic: equal inputs give equal bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
    EvenRowBlocks,
    Walks,
    backward_arrays,
    even_row_blocks,
    gradients,
    walks_name,
    walks_of,
)
from pallas_kernels.mosaic_rows import (
    Columns,
    Piece,
    Refs,
    RowRing,
    call_of,
    columns_of,
    in_chunks,
    ring_scratch,
    row_sums,
    sums_scratch,
)
from pallas_kernels.op import Ref
from pallas_kernels.walks import LANES, Way, chunks_of


class RowBlock(NamedTuple):
    """One row block in a kernel: its number, first row, last row + 1 and table row."""

    number: jax.Array
    start: jax.Array
    stop: jax.Array
    table_row: jax.Array


@dataclass(frozen=True)
class MosaicNormLaunch:
    """What is static in a kernel.

    Attributes:
      names: of its refs, in order; rows in shared memory, its barrier, and the groups' sums with
        theirs come last.
      dim: width of a row.
      way: of the kernel.
      streams: of its refs, those that are loaded row by row.
      eps: added to the variance.
      even: where row blocks lie, one for each program; None if refs `start`, `stop`, `table_row`,
        `first` and `end` say.
      row_blocks: how many there are.
    """

    names: tuple[str, ...]
    dim: int
    way: Way
    streams: tuple[str, ...]
    eps: float
    even: EvenRowBlocks | None
    row_blocks: int

    def rows(self, ref: Refs, program: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First row and last row + 1 of a program."""
        if self.even is not None:
            return self.even.place(program)[:2]
        first, end = ref["first"][program], ref["end"][program]
        start = ref["start"][jnp.minimum(first, self.row_blocks - 1)]
        stop = ref["stop"][jnp.maximum(end - 1, 0)]
        return start, jnp.where(first < end, stop, start)

    def for_each(self, ref: Refs, program: jax.Array, work: Callable[[RowBlock], None]) -> None:
        """Works on each row block of a program."""
        if self.even is not None:
            return work(RowBlock(program, *self.even.place(program)))

        def one(number: jax.Array, _: None) -> None:
            work(RowBlock(number, *(ref[each][number] for each in ("start", "stop", "table_row"))))

        return lax.fori_loop(ref["first"][program], ref["end"][program], one, None)


STREAMS = ("h", "dout", "dh", "y")
"""Loaded row by row."""
WRITTEN = {"dx": "h", "dy": "dout"}
"""Outputs, and the streams in whose place they are written: dtypes are equal."""

Tables = dict[str, jax.Array]
"""Rows of tables, or sums over rows that are their gradients, for a piece of a group's columns."""


def backward_kernel(*refs: Ref, launch: MosaicNormLaunch) -> None:
    """h and its statistics, dout, [dh, y, gate], scale → dx, [dy], sums of tables' gradients."""
    _walk(refs, launch, _backward_block)


def forward_kernel(*refs: Ref, launch: MosaicNormLaunch) -> None:
    """x, [y, gate], scale, shift → [h], out, [mean and 1/deviation]."""
    _walk(refs, launch, _forward_block)


def _walk(refs: Sequence[Ref], launch: MosaicNormLaunch, work: Callable[..., None]) -> None:
    """Works on each row block of a program: (block, launch, refs by name, ring, group)."""
    ref: Refs = dict(zip(launch.names, refs, strict=True))
    program, group = lax.axis_index("program"), lax.axis_index("group")
    streams = [name for name in launch.streams if name in ref]
    ring = RowRing(
        {name: ref[name] for name in streams},
        {name: ref[f"{name}_slots"].at[group] for name in streams},
        ref["arrived"].at[group],
        columns_of(launch.dim, launch.way.groups, group),
        *launch.rows(ref, program),
        launch.way.slots,
    )
    ring.begin()
    launch.for_each(ref, program, lambda block: work(block, launch, ref, ring, group))
    plgpu.wait_smem_to_gmem(0)


def _forward_block(
    block: RowBlock, launch: MosaicNormLaunch, ref: Refs, ring: RowRing, group: jax.Array
) -> None:
    """Works on a row block. The norm is that of the rounded h, which its slot holds."""
    pieces, branch = ring.columns.pieces, "y" if "y" in ref else "x"
    tables = _tables(block, ref, ring.columns)
    written = {"x": ref["h"]} if "h" in ref else {}
    written[branch] = ref["out"]

    def work(row: jax.Array, _: None) -> None:
        slot = ring.wait(row)
        if "ids" in ref:
            _clear_unless(ref["ids"][row] >= 0, slot, ring.columns)
        for piece, table in zip(pieces, tables, strict=True):
            if "y" in ref:
                y = piece.load(slot["y"])
                y = y * table["gate"] if "gate" in ref else y
                piece.store(slot["x"], piece.load(slot["x"]) + y)
        rows = [piece.load(slot["x"]) for piece in pieces]
        (total,) = row_sums(ref, 0, group, list(zip(pieces, rows, strict=True)))
        mean = total / launch.dim
        ring.fetch_last(row)
        squares = [(piece, (h - mean) * (h - mean)) for piece, h in zip(pieces, rows, strict=True)]
        (total,) = row_sums(ref, 1, group, squares)
        rstd = lax.rsqrt(total / launch.dim + launch.eps)
        for piece, h, table in zip(pieces, rows, tables, strict=True):
            piece.store(slot[branch], (h - mean) * rstd * table["gain"] + table["shift"])
        if "ids" in ref:
            _clear_unless(ref["ids"][row] >= 0, {branch: slot[branch]}, ring.columns)
        ring.write(row, written)
        if "statistics" in ref:
            ref["statistics"][row, 0] = mean
            ref["statistics"][row, 1] = rstd

    lax.fori_loop(block.start, block.stop, work, None)


def _backward_block(
    block: RowBlock, launch: MosaicNormLaunch, ref: Refs, ring: RowRing, group: jax.Array
) -> None:
    """Works on a row block, and writes the sums over its rows."""
    columns, written = ring.columns, {name: WRITTEN[name] for name in WRITTEN if name in ref}
    tables = _tables(block, ref, columns)
    gated = "gate" in ref

    def work(row: jax.Array, carry: PyTree) -> PyTree:
        sums, (mean, rstd, valid) = carry
        following = _scalars(ref, row + 1)
        slot = ring.wait(row)
        if valid is not None:
            _clear_unless(valid, slot, columns)

        def load(name: str, piece: Piece) -> jax.Array:
            return piece.load(slot[name])

        def inner(piece: Piece, table: Tables) -> tuple[jax.Array, jax.Array, jax.Array]:
            """dout, the normed row, and the gradient of the normed row."""
            dout = load("dout", piece)
            return dout, (load("h", piece) - mean) * rstd, dout * table["gain"]

        inners = zip(columns.pieces, tables, strict=True)
        terms = []
        for piece, table in inners:
            _, normed, scaled_grad = inner(piece, table)
            terms.append((piece, scaled_grad, scaled_grad * normed))
        gains, products = row_sums(ref, lax.rem(row, jnp.int32(2)), group, terms)
        mean_grad, variance_grad = gains / launch.dim * rstd, products / launch.dim * rstd
        ring.fetch_last(row)
        more = []
        for piece, table, total in zip(columns.pieces, tables, sums, strict=True):
            dout, normed, scaled_grad = inner(piece, table)
            dh = (scaled_grad * rstd - mean_grad) - normed * variance_grad
            grads = {"dscale": dout * normed, "dshift": dout}
            if "dh" in ref:
                dh = dh + load("dh", piece)
            if gated:
                grads["dgate"] = dh * load("y", piece)
            outputs = {"dx": dh, "dy": dh * table["gate"] if gated else dh}
            for name, stream in written.items():
                piece.store(slot[stream], outputs[name])
            more.append({name: total[name] + grad for name, grad in grads.items()})
        ring.write(row, {stream: ref[name] for name, stream in written.items()})
        return more, following

    names = ("dscale", "dshift", *(["dgate"] if gated else []))
    zeros = [{name: piece.zeros() for name in names} for piece in columns.pieces]
    sums, _ = lax.fori_loop(block.start, block.stop, work, (zeros, _scalars(ref, block.start)))
    for n, name in enumerate(names):
        into = columns.of(ref["partial"], n * launch.row_blocks + block.number)
        for piece, total in zip(columns.pieces, sums, strict=True):
            piece.store(into, total[name])


def _tables(block: RowBlock, ref: Refs, columns: Columns) -> list[Tables]:
    """1 + scale, and shift and gate if needed, of each piece; NaN where no table row can serve."""
    row, poison = jnp.maximum(block.table_row, 0), None
    if "ids" in ref:
        poison = jnp.where(block.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), jnp.float32(0))

    def load(name: str, piece: Piece) -> jax.Array:
        value = piece.load(columns.of(ref[name], row), optimized=False)
        return value if poison is None else value + poison

    others = [name for name in ("shift", "gate") if name in ref]
    return [
        {"gain": load("scale", piece) + 1.0, **{name: load(name, piece) for name in others}}
        for piece in columns.pieces
    ]


def _scalars(ref: Refs, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Mean, 1/deviation and whether it is valid, None for always, of a row or of the last row."""
    statistics = ref["saved_statistics"]
    row = jnp.minimum(row, statistics.shape[0] - 1)
    valid = ref["ids"][row] >= 0 if "ids" in ref else None
    return statistics[row, 0], statistics[row, 1], valid


def _clear_unless(valid: jax.Array, slot: Refs, columns: Columns) -> None:
    """Zeroes a row of padding, which may be anything; each thread what it reads itself."""

    @pl.when(jnp.logical_not(valid))
    def _() -> None:
        for part in slot.values():
            for piece in columns.pieces:
                piece.store(part, piece.zeros())


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
    walked = _walked(x.shape, operands, options, way)
    result = _call(FORWARD, inputs, outputs, ("x", "y"), operands.segment_ids, way, options, walked)
    h, saved = result.get("h"), result.get("statistics")
    return (
        None if h is None else h.reshape(x.shape),
        result["out"].reshape(x.shape),
        None if saved is None else saved.reshape(*x.shape[:2], 2),
    )


def _walked(
    shape: tuple[int, ...], given: NormOperands | NormResiduals, options: NormOptions, way: Way
) -> EvenRowBlocks | Walks:
    """Which rows each program walks through; of segments, as was prepared, if it was."""
    if options.layout == "row":
        return even_row_blocks(shape, options, way.programs)
    ids, tables = given.segment_ids, given.scale.shape[1]
    assert ids is not None
    walks = given.prepared and given.prepared.get(walks_name(way.per_core))
    if walks is None:
        walks = walks_of(ids, tables, options.segment_block, way.programs)
    return walks.flattened(ids.shape[1], tables)


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
    walked = _walked(residuals.h.shape, residuals, options, way)
    row_blocks = walked.row_blocks if isinstance(walked, Walks) else walked
    inputs, outputs = backward_arrays(residuals, dh, dout, options, row_blocks)
    ids = residuals.segment_ids
    result = _call(BACKWARD, inputs, outputs, STREAMS, ids, way, options, walked)
    return gradients(result, residuals, dh, options, row_blocks, REDUCE)


def _call(
    name: str,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    loaded: tuple[str, ...],
    ids: jax.Array | None,
    way: Way,
    options: NormOptions,
    walks: Walks | EvenRowBlocks,
) -> dict[str, jax.Array]:
    """Runs a kernel; rows go in and come out as chunks of `LANES` columns.

    Args:
      name: of the kernel.
      inputs, outputs: by name; statistics [B, S, 2] or [rows, 2], others [..., D].
      loaded: names of the inputs that are loaded row by row.
      ids: of the segments.
      way, options: of the kernel.
      walks: which rows each program walks through.
    """
    arrays = {k: v for k, v in inputs.items() if v is not None}
    streams = {each: in_chunks(arrays[each]) for each in loaded if each in arrays}
    dim = arrays[loaded[0]].shape[-1]
    given = {
        each: value.reshape(-1, 2) if each == "saved_statistics" else in_chunks(value)
        for each, value in arrays.items()
    }
    if isinstance(walks, Walks):
        assert ids is not None
        programs, row_blocks, even = walks.first.size, walks.row_blocks.total, None
        lists = {"ids": ids, "first": walks.first, "end": walks.end}
        lists |= walks.row_blocks._asdict()
        given |= {each: value.reshape(-1) for each, value in lists.items()}
    else:
        programs, row_blocks, even = walks.total, walks.total, walks
    scratch = ring_scratch(streams, way.groups, chunks_of(dim, way.groups), way.slots)
    scratch |= sums_scratch(way.groups)
    names = (*given, *outputs, *scratch)
    launch = MosaicNormLaunch(names, dim, way, tuple(streams), options.eps, even, row_blocks)
    body = partial(forward_kernel if name == FORWARD else backward_kernel, launch=launch)
    shapes = [
        jax.ShapeDtypeStruct(
            (len_, dim // LANES, LANES) if width == dim else (len_, width), shape.dtype
        )
        for shape in outputs.values()
        for len_, width in [shape.shape]
    ]
    run = call_of(body, name, programs, way.groups, shapes, list(scratch.values()))
    named = zip(outputs.items(), run(*given.values()), strict=True)
    return {each: result.reshape(shape.shape) for (each, shape), result in named}
