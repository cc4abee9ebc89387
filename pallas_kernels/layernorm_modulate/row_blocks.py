"""Row blocks, which share scale, shift and gate: where they are; arrays of the backward for them.

What a backward kernel reads and writes, and the gradients from it, are the same however the kernel
is lowered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.operands import (
    Gradients,
    NormOperands,
    NormOptions,
    NormResiduals,
)
from pallas_kernels.op import Ref

PADDING, IMPOSSIBLE = -1, -2
"""Table rows of row blocks that hold padding, and of segments that no table row can serve: more
runs of equal segment_ids than the table's size allows (segments are not contiguous), or a segment
beyond the table. What scale or gate touch there is NaN: a traced function cannot raise."""


@dataclass(frozen=True)
class EvenRowBlocks:
    """Row blocks whose place follows from their number.

    Attributes:
      batch: rows of the batch.
      seq_len: tokens of each.
      per_row: row blocks of each, whose lengths differ by at most one.
    """

    batch: int
    seq_len: int
    per_row: int

    @property
    def total(self) -> int:
        """Of all batch rows."""
        return self.batch * self.per_row

    programs = total
    """Each has one."""

    def place(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First row, last row + 1 and batch row of a row block, in the flattened [B·S, D]."""
        base, longer = divmod(self.seq_len, self.per_row)
        row, place = number // self.per_row, number % self.per_row
        first = row * self.seq_len
        start = first + place * base + jnp.minimum(place, longer)
        stop = first + (place + 1) * base + jnp.minimum(place + 1, longer)
        return start, stop, row


class RowBlocks(NamedTuple):
    """Row blocks that follow segments: int32 [B, P] each.

    Attributes:
      start: first row: in its batch row, or (`flattened`) in the flattened [B·S, D].
      stop: last row + 1; equal to `start` in unused row blocks.
      table_row: in the table [M, D] of its batch row, or in the flattened [B·M, D]; or PADDING or
        IMPOSSIBLE.
    """

    start: jax.Array
    stop: jax.Array
    table_row: jax.Array

    def flattened(self, seq_len: int, table_rows: int) -> "RowBlocks":
        """With batch rows laid end to end, and their tables."""
        row = jnp.arange(len(self.start), dtype=jnp.int32)[:, None]
        inside = self.table_row >= 0
        table_row = jnp.where(inside, row * table_rows + self.table_row, self.table_row)
        return RowBlocks(self.start + row * seq_len, self.stop + row * seq_len, table_row)


class Walks(NamedTuple):
    """Row blocks that follow segments, and which of them each program walks through.

    A program's row blocks cover the rows of its `EvenRowBlocks`.

    Attributes:
      row_blocks: see there.
      first: [B, Q] int32, the first row block of each program: of its batch row's, or
        (`flattened`) of all.
      end: [B, Q] int32, its last row block + 1.
    """

    row_blocks: RowBlocks
    first: jax.Array
    end: jax.Array

    @property
    def per_row(self) -> int:
        """Row blocks of each batch row."""
        return self.row_blocks.start.shape[1]

    @property
    def total(self) -> int:
        """Row blocks of all batch rows."""
        return self.row_blocks.start.size

    @property
    def programs(self) -> int:
        """That walk."""
        return self.first.size

    def flattened(self, seq_len: int, table_rows: int) -> "Walks":
        """With batch rows laid end to end, and their tables."""
        skipped = jnp.arange(len(self.first), dtype=jnp.int32)[:, None] * self.per_row
        row_blocks = self.row_blocks.flattened(seq_len, table_rows)
        return Walks(row_blocks, self.first + skipped, self.end + skipped)

    def refs(self) -> dict[str, jax.Array]:
        """What kernels read of them, by name."""
        lists = {"first": self.first, "end": self.end, **self.row_blocks._asdict()}
        return {name: value.reshape(-1) for name, value in lists.items()}


class RowBlock(NamedTuple):
    """One row block in a kernel: its number, first row, last row + 1 and table row."""

    number: jax.Array
    start: jax.Array
    stop: jax.Array
    table_row: jax.Array


def for_each_row_block(
    even: EvenRowBlocks | None,
    ref: Mapping[str, Ref],
    program: jax.Array,
    work: Callable[[RowBlock], None],
) -> None:
    """Works on each row block of a program: of `Walks.refs`, or the even one of its number."""
    if "first" not in ref:
        assert even is not None
        return work(RowBlock(program, *even.place(program)))

    def one(number: jax.Array, _: None) -> None:
        work(RowBlock(number, *(ref[each][number] for each in RowBlocks._fields)))

    return jax.lax.fori_loop(ref["first"][program], ref["end"][program], one, None)


def row_blocks_of(
    given: NormOperands | NormResiduals, options: NormOptions, per_core: int
) -> EvenRowBlocks | Walks:
    """How the rows of a call are divided among about so many programs of each multiprocessor."""
    stream = given.x if isinstance(given, NormOperands) else given.h
    programs = per_core * devices.core_count()
    if options.layout != "segment":
        return even_row_blocks(stream.shape, options, programs)
    table_rows = given.scale.shape[1]
    walks = given.prepared and given.prepared.get(per_core)
    if walks is None:
        assert given.segment_ids is not None
        walks = walks_of(given.segment_ids, table_rows, programs)
    return walks.flattened(stream.shape[1], table_rows)


def even_row_blocks(shape: tuple[int, ...], options: NormOptions, programs: int) -> EvenRowBlocks:
    """About `programs` blocks of [B, S, D], none across batch rows unless each token is alone."""
    batch, seq_len, _ = shape
    if options.layout == "token":
        batch, seq_len = 1, batch * seq_len
    return EvenRowBlocks(batch, seq_len, max(1, min(seq_len, programs // batch)))


def segment_row_blocks(segment_ids: jax.Array, table_rows: int, cuts: Sequence[int]) -> RowBlocks:
    """Row blocks that end at each cut and where a segment does.

    At most 2M + 1 more than cuts: each of the M segments, and each run of padding between them,
    adds at most one. Segments that take more are not served.
    """
    seq_len, even = segment_ids.shape[1], np.asarray(cuts, np.int32)
    count = min(seq_len, even.size + 2 * table_rows + 1)
    at_cut = np.isin(np.arange(seq_len), even)
    even = np.append(even, np.full(count - even.size, seq_len, np.int32))

    def of_row(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        fresh = at_cut | (ids != jnp.roll(ids, 1))
        lost = jnp.sum(fresh) > count
        start = jnp.nonzero(fresh, size=count, fill_value=seq_len)[0].astype(jnp.int32)
        start = jnp.where(lost, even, start)
        stop = jnp.append(start[1:], seq_len).astype(jnp.int32)
        segment = jnp.where(start < seq_len, ids[jnp.minimum(start, seq_len - 1)], PADDING)
        impossible = lost | (segment >= table_rows)
        return start, stop, jnp.where(impossible, IMPOSSIBLE, jnp.maximum(segment, PADDING))

    return RowBlocks(*jax.vmap(of_row)(segment_ids))


def walks_of(segment_ids: jax.Array, table_rows: int, programs: int) -> Walks:
    """Gives each of about `programs` programs the row blocks of its `EvenRowBlocks`."""
    batch, seq_len = segment_ids.shape
    each = max(1, min(seq_len, programs // batch))
    cuts = np.arange(each + 1) * (seq_len // each) + np.minimum(np.arange(each + 1), seq_len % each)
    row_blocks = segment_row_blocks(segment_ids, table_rows, cuts[:-1].tolist())
    place = jax.vmap(partial(jnp.searchsorted, v=cuts.astype(np.int32)))(row_blocks.start)
    place = place.astype(jnp.int32)
    return Walks(row_blocks, place[:, :-1], place[:, 1:])


# ---------------------------------------------------------------- arrays of the backward


def backward_arrays(
    residuals: NormResiduals,
    dh: jax.Array | None,
    dout: jax.Array,
    options: NormOptions,
    row_blocks: EvenRowBlocks | Walks,
) -> tuple[dict[str, jax.Array | None], dict[str, jax.ShapeDtypeStruct]]:
    """What a backward kernel reads and writes, by name, in a call with these arguments.

    Returns:
      inputs: h, dout, saved_statistics and scale, and dh, y and gate where there are any.
      outputs: [rows, D] each: dx; dy unless it is none or equal to dx; the gradients dscale,
        dshift and dgate of the layout "token", or else `partial`, the sums of each row block:
        those of scale, then of shift, then of gate.
    """
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
    return inputs, outputs


def gradients(
    result: Mapping[str, jax.Array],
    residuals: NormResiduals,
    dh: jax.Array | None,
    options: NormOptions,
    row_blocks: EvenRowBlocks | Walks,
    name: str,
) -> Gradients:
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
    row_blocks: EvenRowBlocks | Walks,
    table: tuple[int, ...],
    options: NormOptions,
    name: str,
) -> jax.Array:
    """Of what row blocks were summed up to, [K·B·M, D]: by Triton's kernel of this name, or XLA."""
    table_row, per_row = None, row_blocks.per_row
    if isinstance(row_blocks, Walks):
        table_row = row_blocks.row_blocks.table_row.reshape(-1)
    if devices.lowers_triton():
        from pallas_kernels.triton_tiles import reduce_partials

        return reduce_partials(partial_sums, table_row, per_row, table, options.interpret, name)
    batch, dim = table[0], table[-1]
    parts = partial_sums.reshape(-1, batch, per_row, dim)
    if table_row is None:
        return parts.sum(axis=2).reshape(-1, dim)
    named = table_row.reshape(batch, per_row) - table[1] * jnp.arange(batch)[:, None]

    def of_table_row(wanted: jax.Array) -> jax.Array:
        # What others hold is anything: a product with 0 would let NaN through.
        return jnp.where((named == wanted)[None, ..., None], parts, 0.0).sum(axis=2)

    sums = jax.lax.map(of_table_row, jnp.arange(table[1]))
    return jnp.moveaxis(sums, 0, 2).reshape(-1, dim)


def _tables(residuals: NormResiduals) -> dict[str, jax.Array]:
    """The tables that have gradients; `shift` for its dtype."""
    tables = {"scale": residuals.scale, "shift": residuals.shift}
    return tables | ({} if residuals.gate is None else {"gate": residuals.gate})
