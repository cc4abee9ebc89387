"""Row blocks: consecutive rows that share scale, shift and gate; one program works on each."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layernorm_modulate.operands import Operands, Options, Residuals

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

    def place(self, number: Any) -> tuple[Any, Any, Any]:
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

    @property
    def per_row(self) -> int:
        """Row blocks of each batch row."""
        return self.start.shape[1]

    @property
    def total(self) -> int:
        """Of all batch rows."""
        return self.start.size

    def flattened(self, seq_len: int, table_rows: int) -> "RowBlocks":
        """With batch rows laid end to end, and their tables."""
        row = jnp.arange(len(self.start), dtype=jnp.int32)[:, None]
        inside = self.table_row >= 0
        table_row = jnp.where(inside, row * table_rows + self.table_row, self.table_row)
        return RowBlocks(self.start + row * seq_len, self.stop + row * seq_len, table_row)


def row_blocks_of(
    given: Operands | Residuals, options: Options, programs: int
) -> EvenRowBlocks | RowBlocks:
    """How the rows of a call are divided among about `programs` programs."""
    stream = given.x if isinstance(given, Operands) else given.h
    if options.layout != "segment":
        return even_row_blocks(stream.shape, options, programs)
    table_rows, found = given.scale.shape[1], given.prepared
    if found is None:
        assert given.segment_ids is not None
        found = segment_row_blocks(given.segment_ids, table_rows, options.segment_block, programs)
    return found.flattened(stream.shape[1], table_rows)


def even_row_blocks(shape: tuple[int, ...], options: Options, programs: int) -> EvenRowBlocks:
    """About `programs` blocks of [B, S, D], none across batch rows unless each token is alone."""
    batch, seq_len, _ = shape
    if options.layout == "token":
        batch, seq_len = 1, batch * seq_len
    return EvenRowBlocks(batch, seq_len, max(1, min(seq_len, programs // batch)))


def segment_row_blocks(
    segment_ids: jax.Array, table_rows: int, segment_block: int | None, programs: int
) -> RowBlocks:
    """Row blocks that end where a segment does.

    At most ⌈S / block⌉ + 2M + 1 of them: each of the M segments, and each run of padding between
    them, adds at most one to the even ones. With a `segment_block` the even ones suffice.
    """
    batch, seq_len = segment_ids.shape
    block = pl.cdiv(seq_len, max(1, min(seq_len, programs // batch)))
    aligned = segment_block is not None and segment_block >= block
    if aligned:
        block = _halved(segment_block or 1, block)
        count = pl.cdiv(seq_len, block)
    else:
        count = min(seq_len, pl.cdiv(seq_len, block) + 2 * table_rows + 1)

    def of_row(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        token = jnp.arange(seq_len, dtype=jnp.int32)
        if aligned:
            start = jnp.arange(count, dtype=jnp.int32) * block
            lost = jnp.bool_(False)
        else:
            fresh = (token % block == 0) | (ids != jnp.roll(ids, 1))
            start = jnp.nonzero(fresh, size=count, fill_value=seq_len)[0].astype(jnp.int32)
            lost = jnp.sum(fresh) > count
        stop = jnp.append(start[1:], seq_len).astype(jnp.int32)
        segment = jnp.where(start < seq_len, ids[jnp.minimum(start, seq_len - 1)], PADDING)
        segment = jnp.where(lost | (segment >= table_rows), IMPOSSIBLE, segment)
        return start, stop, jnp.maximum(segment, IMPOSSIBLE)

    return RowBlocks(*jax.vmap(of_row)(segment_ids))


def _halved(segment_block: int, block: int) -> int:
    """The segment block, halved while that leaves blocks of at least `block` tokens."""
    while segment_block % 2 == 0 and segment_block // 2 >= block:
        segment_block //= 2
    return segment_block
