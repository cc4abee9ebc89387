"""The Mosaic GPU kernels of the backward, and their calls.

A program walks through consecutive rows. Each of its groups of 128 threads has columns of its own:
it copies its part of the rows to come into shared memory with the tensor memory accelerator, and
registers hold little more than its columns of scale, gate and the float32 sums of the tables'
gradients. (The Triton kernel has rows to come in registers as well, and wide rows do not fit.)
Gradients of a row are written where the row stood and copied from there. The groups exchange the
two sums over a row that the norm's gradient takes.

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

from pallas_kernels.layernorm_modulate.operands import Gradients, NormOptions, NormResiduals
from pallas_kernels.layernorm_modulate.row_blocks import (
    IMPOSSIBLE,
    EvenRowBlocks,
    RowBlocks,
    Walks,
    backward_arrays,
    even_row_blocks,
    gradients,
    walks_of,
)
from pallas_kernels.layernorm_modulate.tuning import LANES, Way, chunks_of
from pallas_kernels.op import Ref

WARPS = 4
"""Of a group. Each has a row of a piece, so that sums over it need no other warp."""
_MOST_CHUNKS = 4
"""Of a piece: what a thread loads at once."""


class Piece(NamedTuple):
    """Some chunks of a group's columns.

    Attributes:
      at: the first.
      chunks: 1, 2 or 4.
      counts: 1.0 or 0.0, how often sums over the row count it; None for once.
    """

    at: int
    chunks: int
    counts: jax.Array | None

    def load(self, ref: Ref, optimized: bool = True) -> jax.Array:
        """This piece of a [chunks, LANES] ref, float32; not `optimized` from global memory."""
        lanes = plgpu.load(self._view(ref), (), layout=_layout(self.chunks), optimized=optimized)
        return lanes.astype(jnp.float32)

    def store(self, ref: Ref, value: jax.Array) -> None:
        """Rounds a value to the ref's dtype and writes it."""
        self._view(ref)[...] = value.astype(ref.dtype)

    def zeros(self) -> jax.Array:
        """Float32 in registers."""
        zeros = jnp.zeros((WARPS, LANES // WARPS * self.chunks), jnp.float32)
        return plgpu.layout_cast(zeros, _layout(self.chunks))

    def _view(self, ref: Ref) -> Ref:
        part = ref.at[pl.ds(self.at, self.chunks)]
        return part.reshape(WARPS, LANES // WARPS * self.chunks)


@dataclass(frozen=True)
class Columns:
    """The columns of a group.

    Attributes:
      first: its first chunk of the row.
      chunks: how many.
      pieces: of them.
    """

    first: jax.Array
    chunks: int
    pieces: tuple[Piece, ...]

    def of(self, ref: Ref, row: jax.Array) -> Ref:
        """The group's part of a row of a [rows, chunks of a row, LANES] ref."""
        return ref.at[row, pl.ds(self.first, self.chunks)]


def columns_of(dim: int, groups: int, group: jax.Array | int) -> Columns:
    """A group's columns: as many as any other's.

    Where groups do not divide the row's chunks, some groups begin with chunks of the one before.
    Both compute the same there, and only one counts it in sums over the row.
    """
    total = dim // LANES
    chunks = chunks_of(dim, groups)
    first = jnp.minimum(group * chunks, total - chunks)
    shared = groups * chunks - total
    # A chunk that the last group shares, by itself.
    counts = jnp.asarray(group * chunks == first).astype(jnp.float32)
    pieces = [Piece(at, 1, counts) for at in range(shared)]
    at = shared
    while at < chunks:
        size = min(_MOST_CHUNKS, 1 << ((chunks - at).bit_length() - 1))
        pieces.append(Piece(at, size, None))
        at += size
    return Columns(first, chunks, tuple(pieces))


def _layout(chunks: int) -> PyTree:
    tiling = plgpu.Tiling(((WARPS, LANES // WARPS * chunks), (chunks,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


Refs = dict[str, Ref]


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
      even: where row blocks lie, one for each program; None if refs `start`, `stop`, `table_row`,
        `first` and `end` say.
      row_blocks: how many there are.
    """

    names: tuple[str, ...]
    dim: int
    way: Way
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


@dataclass(frozen=True)
class RowRing:
    """Shared memory that a group's columns of a program's rows go through.

    Attributes:
      sources: refs [rows, chunks of a row, LANES] by name.
      slots: of each source, a ref [slots, chunks, LANES].
      arrived: barriers [slots] which say that a slot's copies are there.
      columns: of the group.
      start, stop: first row and last row + 1 of the program.
      count: of slots.
    """

    sources: Refs
    slots: Refs
    arrived: Ref
    columns: Columns
    start: jax.Array
    stop: jax.Array
    count: int

    def begin(self) -> None:
        """Begins to copy the first rows: all but one slot can be full."""
        for number in range(self.count - 1):
            self.fetch(self.start + number)

    def fetch(self, row: jax.Array) -> None:
        """Begins to copy a row into its slot, if the program has it."""

        @pl.when(row < self.stop)
        def _() -> None:
            slot = self.slot(row)
            for name, source in self.sources.items():
                into = self.slots[name].at[slot]
                plgpu.copy_gmem_to_smem(self.columns.of(source, row), into, self.arrived.at[slot])

    def fetch_last(self, row: jax.Array) -> None:
        """Begins to fill the slot of the row before this one, once that was written from it."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.fetch(row + self.count - 1)

    def wait(self, row: jax.Array) -> Refs:
        """The slot of a row, by name of the source, once it is there."""
        slot = self.slot(row)
        plgpu.barrier_wait(self.arrived.at[slot])
        return {name: slots.at[slot] for name, slots in self.slots.items()}

    def write(self, row: jax.Array, outputs: Mapping[str, Ref]) -> None:
        """Begins to copy what stands in the slots of some sources to a row of other refs."""
        plgpu.commit_smem()
        for name, destination in outputs.items():
            into = self.columns.of(destination, row)
            plgpu.copy_smem_to_gmem(self.slots[name].at[self.slot(row)], into, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def slot(self, row: jax.Array) -> jax.Array:
        """Of a row."""
        return lax.rem(row - self.start, jnp.int32(self.count))


STREAMS = ("h", "dout", "dh", "y")
"""Loaded row by row."""
WRITTEN = {"dx": "h", "dy": "dout"}
"""Outputs, and the streams in whose place they are written: dtypes are equal."""

Tables = dict[str, jax.Array]
"""Rows of tables, or sums over rows that are their gradients, for a piece of a group's columns."""


def backward_kernel(*refs: Ref, launch: MosaicNormLaunch) -> None:
    """h and its statistics, dout, [dh, y, gate], scale → dx, [dy], sums of tables' gradients."""
    ref: Refs = dict(zip(launch.names, refs, strict=True))
    program, group = lax.axis_index("program"), lax.axis_index("group")
    start, stop = launch.rows(ref, program)
    columns = columns_of(launch.dim, launch.way.groups, group)
    streams = [name for name in STREAMS if name in ref]
    ring = RowRing(
        {name: ref[name] for name in streams},
        {name: ref[f"{name}_slots"].at[group] for name in streams},
        ref["arrived"].at[group],
        columns,
        start,
        stop,
        launch.way.slots,
    )
    ring.begin()
    launch.for_each(ref, program, lambda block: _walk(block, launch, ref, ring, group))
    plgpu.wait_smem_to_gmem(0)


def _walk(
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
        terms = [(piece, *inner(piece, table)[1:]) for piece, table in inners]
        gains, products = _row_sums(ref, row, group, terms)
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
    """1 + scale, and the gate, for each piece; NaN where no table row can serve the block."""
    row, poison = jnp.maximum(block.table_row, 0), None
    if "ids" in ref:
        poison = jnp.where(block.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), jnp.float32(0))

    def load(name: str, piece: Piece) -> jax.Array:
        value = piece.load(columns.of(ref[name], row), optimized=False)
        return value if poison is None else value + poison

    return [
        {"gain": load("scale", piece) + 1.0}
        | ({"gate": load("gate", piece)} if "gate" in ref else {})
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


def _row_sums(
    ref: Refs,
    row: jax.Array,
    group: jax.Array,
    terms: Sequence[tuple[Piece, jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Over a whole row, the sums of the gradient of the normed row and of its product with that.

    Each warp adds up its part of the group's columns, and all threads then the warps' sums: in the
    same order everywhere, so that groups which share columns compute the same.

    `row_sums` [2, groups, 2, warps] and its two barriers are used in turn, so that no group writes
    what another has still to read.

    Args:
      ref: of the kernel.
      row: of the array.
      group: this one.
      terms: of each piece, the normed row and the gradient.
    """
    by_size: dict[int, list[jax.Array]] = {}
    for piece, normed, scaled_grad in terms:
        if piece.counts is not None:
            scaled_grad = scaled_grad * piece.counts
        both = [scaled_grad, scaled_grad * normed]
        sums = by_size.get(piece.chunks)
        by_size[piece.chunks] = (
            both if sums is None else [a + b for a, b in zip(sums, both, strict=True)]
        )
    sums_ref, turn = ref["row_sums"], lax.rem(row, jnp.int32(2))
    summed = ref["summed"].at[turn]
    for place in range(2):
        sums_ref[turn, group, place] = sum(each[place].sum(axis=1) for each in by_size.values())
    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)
    groups, warps = sums_ref.shape[1], sums_ref.shape[3]
    gains, products = (
        sum(sums_ref[turn, each, place, warp] for each in range(groups) for warp in range(warps))
        for place in range(2)
    )
    return gains, products


BACKWARD, REDUCE = (f"layernorm_modulate_mosaic_{part}" for part in ("backward", "reduce"))
"""Names of the kernels, as profilers and lowered modules show them."""


def backward(
    residuals: NormResiduals,
    dh: jax.Array | None,
    dout: jax.Array,
    options: NormOptions,
    way: Way,
    walks: Walks | None = None,
) -> Gradients:
    """Gradients of x, of y (None without), and of scale, shift and, where there is one, gate.

    Args:
      residuals: of the forward, in the layout "row" or "segment"; h has x's dtype.
      dh: [B, S, D] cotangent of h; None without y.
      dout: [B, S, D] cotangent of the modulated value.
      options: of the call.
      way: of the kernel.
      walks: `walks_of` the segments, if they were prepared.
    """
    row_blocks: EvenRowBlocks | RowBlocks
    walked: EvenRowBlocks | Walks
    if options.layout == "row":
        walked = row_blocks = even_row_blocks(residuals.h.shape, options, way.programs)
    else:
        ids, tables = residuals.segment_ids, residuals.scale.shape[1]
        assert ids is not None
        if walks is None:
            walks = walks_of(ids, tables, options.segment_block, way.programs)
        walked = walks.flattened(ids.shape[1], tables)
        row_blocks = walked.row_blocks
    inputs, outputs = backward_arrays(residuals, dh, dout, options, row_blocks)
    result = _call(inputs, outputs, residuals.segment_ids, way, walked)
    return gradients(result, residuals, dh, options, row_blocks, REDUCE)


def _call(
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    ids: jax.Array | None,
    way: Way,
    walks: Walks | EvenRowBlocks,
) -> dict[str, jax.Array]:
    """Runs the kernel; rows go in and come out as chunks of `LANES` columns."""
    arrays = {k: v for k, v in inputs.items() if v is not None}
    dim, statistics = arrays["h"].shape[-1], arrays.pop("saved_statistics")
    total = dim // LANES
    given = {name: value.reshape(-1, total, LANES) for name, value in arrays.items()}
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
    names = (*given, *outputs, *scratch)
    launch = MosaicNormLaunch(names, dim, way, even, row_blocks)
    results = plgpu.kernel(
        partial(backward_kernel, launch=launch),
        out_type=[
            jax.ShapeDtypeStruct((shape.shape[0], total, LANES), shape.dtype)
            for shape in outputs.values()
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
    named = zip(outputs.items(), results, strict=True)
    return {name: result.reshape(shape.shape) for (name, shape), result in named}


def _scratch(streams: dict[str, jnp.dtype], dim: int, way: Way) -> dict[str, PyTree]:
    """Shared memory and barriers, by name."""
    groups, _, slots = way
    shape = (groups, slots, chunks_of(dim, groups), LANES)
    return {
        **{f"{name}_slots": plgpu.SMEM(shape, dtype) for name, dtype in streams.items()},
        "arrived": plgpu.Barrier(num_arrivals=len(streams), num_barriers=(groups, slots)),
        "row_sums": plgpu.SMEM((2, groups, 2, WARPS), jnp.float32),
        "summed": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
    }
