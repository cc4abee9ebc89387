"""Rows that groups of threads of a Mosaic GPU kernel walk through, by shared memory.

A group of 128 threads has columns of its own. It copies its part of the rows to come into shared
memory with the tensor memory accelerator, and writes results where a row stood, from where they are
copied out. Each thread writes only what it alone has read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import PyTree

from pallas_kernels.lowering import lowered_once
from pallas_kernels.op import Ref
from pallas_kernels.walks import LANES, chunks_of

WARPS = 4
"""Of a group. Each has a row of a piece, so that sums over it need no other warp."""
_MOST_CHUNKS = 4
"""Of a piece: what a thread loads at once."""
_INDEX = [()] if jax.__version_info__ < (0, 11) else []
"""What `plgpu.load` must be given beside a ref; JAX 0.12 does not take it any more."""


def load(ref: Ref, layout: PyTree, optimized: bool = True) -> jax.Array:
    """All of a ref, in a layout; not `optimized` from global memory."""
    return plgpu.load(ref, *_INDEX, layout=layout, optimized=optimized)


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
        return load(self._view(ref), layout_of(self.chunks), optimized).astype(jnp.float32)

    def store(self, ref: Ref, value: jax.Array) -> None:
        """Rounds a value to the ref's dtype and writes it."""
        self._view(ref)[...] = value.astype(ref.dtype)

    def zeros(self) -> jax.Array:
        """Float32 in registers."""
        zeros = jnp.zeros((WARPS, LANES // WARPS * self.chunks), jnp.float32)
        return plgpu.layout_cast(zeros, layout_of(self.chunks))

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

    def of(self, ref: Ref, row: jax.Array | int) -> Ref:
        """The group's part of a row of a [rows, chunks of a row, LANES] ref."""
        return ref.at[row, pl.ds(self.first, self.chunks)]


def columns_of(dim: int, groups: int, group: jax.Array | int, alike: bool = False) -> Columns:
    """A group's columns: as many as any other's.

    Where groups do not divide the row's chunks, some groups begin with chunks of the one before.
    Both compute the same there, and only one counts it in sums over the row.

    Args:
      dim: columns of a row.
      groups: that share it.
      group: one of them.
      alike: whether all pieces have one size, where groups share chunks evenly.
    """
    total = dim // LANES
    chunks = chunks_of(dim, groups)
    first = jnp.minimum(group * chunks, total - chunks)
    shared = groups * chunks - total
    # A chunk that the last group shares, by itself.
    counts = jnp.asarray(group * chunks == first).astype(jnp.float32)
    pieces = [Piece(at, 1, counts) for at in range(shared)]
    at = shared
    most = math.gcd(_MOST_CHUNKS, chunks) if alike else _MOST_CHUNKS
    while at < chunks:
        size = min(most, 1 << ((chunks - at).bit_length() - 1))
        pieces.append(Piece(at, size, None))
        at += size
    return Columns(first, chunks, tuple(pieces))


def layout_of(chunks: int) -> PyTree:
    """Of a piece [WARPS, LANES // WARPS · chunks]: a thread has neighbouring columns."""
    tiling = plgpu.Tiling(((WARPS, LANES // WARPS * chunks), (chunks,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


Refs = dict[str, Ref]
Values = tuple[jax.Array, ...]


def row_sums(
    ref: Refs, turn: jax.Array | int, group: jax.Array, terms: Sequence[tuple[Piece, *Values]]
) -> list[jax.Array]:
    """Sums over a whole row of the values that stand beside each piece.

    Each warp adds up its part of the group's columns, and all threads then the warps' sums: in the
    same order everywhere, so that groups which share columns compute the same.

    Args:
      ref: of the kernel, those of `sums_scratch` among them, whose two parts are used in turn: no
        group then writes what another has still to read.
      turn: 0 or 1; two more for each other walk of the program.
      group: this one of its walk.
      terms: pieces with equally many values each.
    """
    by_size: dict[int, list[jax.Array]] = {}
    for piece, *values in terms:
        if piece.counts is not None:
            values = [value * piece.counts for value in values]
        sums = by_size.get(piece.chunks)
        by_size[piece.chunks] = (
            values if sums is None else [a + b for a, b in zip(sums, values, strict=True)]
        )
    sums_ref, summed = ref["row_sums"], ref["summed"].at[turn]
    places = range(len(terms[0]) - 1)
    for place in places:
        sums_ref[turn, group, place] = sum(each[place].sum(axis=1) for each in by_size.values())
    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)
    groups, warps = sums_ref.shape[1], sums_ref.shape[3]
    return [
        sum(sums_ref[turn, each, place, warp] for each in range(groups) for warp in range(warps))
        for place in places
    ]


def sums_scratch(groups: int, walks: int = 1) -> dict[str, PyTree]:
    """What `row_sums` of at most two values needs: `row_sums` [turns, groups, 2, warps], `summed`.

    Args:
      groups: of a walk.
      walks: of a program.
    """
    return {
        "row_sums": plgpu.SMEM((2 * walks, groups, 2, WARPS), jnp.float32),
        "summed": plgpu.Barrier(num_arrivals=groups, num_barriers=2 * walks),
    }


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
      tables: refs [table rows, n] by name, of which a row n goes along with row n modulo them, all
        of it for each group.
    """

    sources: Refs
    slots: Refs
    arrived: Ref
    columns: Columns
    start: jax.Array
    stop: jax.Array
    count: int
    tables: Refs = field(default_factory=dict)

    def fetch(self, row: jax.Array) -> None:
        """Begins to copy a row into its slot, if the program has it."""

        @pl.when(row < self.stop)
        def _() -> None:
            slot = self.slot(row)
            for name, source in self.sources.items():
                into = self.slots[name].at[slot]
                plgpu.copy_gmem_to_smem(self.columns.of(source, row), into, self.arrived.at[slot])
            for name, table in self.tables.items():
                part, into = table.at[lax.rem(row, table.shape[0])], self.slots[name].at[slot]
                plgpu.copy_gmem_to_smem(part, into, self.arrived.at[slot])

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


def begun_ring(
    ref: Refs,
    streams: Sequence[str],
    group: jax.Array | int,
    columns: Columns,
    rows: tuple[jax.Array, jax.Array],
    tables: Sequence[str] = (),
) -> RowRing:
    """The ring of a group, which begins to copy the first rows: all but one slot can be full.

    Args:
      ref: of the kernel, those of `ring_scratch` among them.
      streams, tables: names of its sources and tables.
      group: of the program.
      columns: of the group.
      rows: first row and last row + 1.
    """
    slots = {name: ref[f"{name}_slots"].at[group] for name in (*streams, *tables)}
    sources, beside = ({name: ref[name] for name in names} for names in (streams, tables))
    count = ref[f"{streams[0]}_slots"].shape[1]
    ring = RowRing(sources, slots, ref["arrived"].at[group], columns, *rows, count, beside)
    for number in range(count - 1):
        ring.fetch(ring.start + number)
    return ring


def ring_scratch(
    streams: Mapping[str, jax.Array],
    groups: int,
    chunks: int,
    count: int,
    tables: Mapping[str, jax.Array] | None = None,
) -> dict[str, PyTree]:
    """Shared memory of the rings of a program's groups, by name: `NAME_slots`, and `arrived`."""
    part: tuple[int, ...] = (chunks, LANES)
    shapes = [(name, part, each.dtype) for name, each in streams.items()]
    shapes += [(name, each.shape[1:], each.dtype) for name, each in (tables or {}).items()]
    return {
        **{f"{name}_slots": plgpu.SMEM((groups, count, *s), dtype) for name, s, dtype in shapes},
        "arrived": plgpu.Barrier(num_arrivals=len(shapes), num_barriers=(groups, count)),
    }


def run_walks(
    body: Callable[..., None],
    name: str,
    static: Mapping[str, object],
    programs: int,
    groups: int,
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, PyTree],
    approx_math: bool = False,
) -> dict[str, jax.Array]:
    """Runs a kernel whose programs walk through rows, and returns its outputs by name.

    Args:
      body: of refs of inputs, outputs and scratch by name, and of what is static; it has the axes
        `program` and `group`. A name has one body.
      name: as profilers and lowered modules show it.
      static: keywords of `body`, whose `repr` says all of them.
      programs: how many there are.
      groups: of threads of a program.
      inputs: arrays.
      outputs: their shapes.
      scratch: `ring_scratch` and `sums_scratch`.
      approx_math: whether functions may be single instructions.
    """
    names = (*inputs, *outputs, *scratch)
    run = plgpu.kernel(
        lambda *refs: body(dict(zip(names, refs, strict=True)), **static),
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        # Each thread writes only what it alone has read, and barriers stand where others' is read.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=approx_math),
        grid=(programs,),
        grid_names=("program",),
        num_threads=groups,
        thread_name="group",
        kernel_name=name,
    )
    says = f"{[*inputs]} {outputs} {dict(static)} {scratch} {programs} {groups} {approx_math}"
    return dict(zip(outputs, lowered_once(name, says, run, [*inputs.values()]), strict=True))


def even_rows(number: jax.Array, rows: int, programs: int) -> tuple[jax.Array, jax.Array]:
    """First row and last row + 1 of a program, whose numbers of rows differ by at most one."""
    base, longer = divmod(rows, programs)
    start = number * base + jnp.minimum(number, longer)
    return start, start + base + (number < longer).astype(jnp.int32)


def in_chunks(x: jax.Array) -> jax.Array:
    """[rows, chunks of a row, LANES]."""
    return x.reshape(-1, x.shape[-1] // LANES, LANES)
