"""Cutting rows into pieces: consecutive rows that share scale, shift, gate; one program each."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding

from pallas_kernels.layernorm_modulate.devices import shards_of
from pallas_kernels.layernorm_modulate.operands import Options
from pallas_kernels.layernorm_modulate.tuning import Pass, blocks_for

PADDING, IMPOSSIBLE = -1, -2
"""Table rows of pieces that hold padding, and of segments that no table row can serve: more runs
of equal segment_ids than the table's size allows (segments are not contiguous), or a segment
beyond the table. What scale or gate touch there is NaN: a traced function cannot raise."""


@dataclass(frozen=True)
class Grid:
    """Pieces whose place follows from their number.

    Attributes:
      batch: rows of the batch.
      seq_len: tokens of each.
      per_row: pieces of each, whose lengths differ by at most one.
    """

    batch: int
    seq_len: int
    per_row: int

    def piece(self, number: Any) -> tuple[Any, Any, Any]:
        """First row, last row + 1 and batch row of a piece, in the flattened [B·S, D]."""
        base, longer = divmod(self.seq_len, self.per_row)
        row, place = number // self.per_row, number % self.per_row
        first = row * self.seq_len
        start = first + place * base + jnp.minimum(place, longer)
        stop = first + (place + 1) * base + jnp.minimum(place + 1, longer)
        return start, stop, row


class RowPieces(NamedTuple):
    """Pieces that follow segments, row by row: int32 [B, P] each.

    Attributes:
      start: first token, in its row.
      stop: last token + 1; equal to `start` in unused pieces.
      segment: row of the table [M, D], PADDING or IMPOSSIBLE.
    """

    start: jax.Array
    stop: jax.Array
    segment: jax.Array


class PreparedPieces(NamedTuple):
    """Pieces for each of the kernels, found once for many calls."""

    forward: RowPieces
    backward: RowPieces
    residual_forward: RowPieces
    residual_backward: RowPieces


@partial(
    jax.tree_util.register_dataclass, data_fields=("ids", "pieces"), meta_fields=("table_rows",)
)
@dataclass(frozen=True)
class Segmentation:
    """`segment_ids` together with the pieces that kernels of one width derive from them.

    Attributes:
      ids: [B, S] int32.
      pieces: of each kernel.
      table_rows: M.
    """

    ids: jax.Array
    pieces: PreparedPieces
    table_rows: int


class Pieces(NamedTuple):
    """Pieces that follow segments, of all rows: int32 [B·P] each.

    Attributes:
      start: first row, in the flattened [B·S, D].
      stop: last row + 1; equal to `start` in unused pieces.
      table_row: row of the flattened table [B·M, D], PADDING or IMPOSSIBLE.
    """

    start: jax.Array
    stop: jax.Array
    table_row: jax.Array


def even_grid(shape: tuple[int, ...], options: Options, programs: int) -> Grid:
    """About `programs` pieces of [B, S, D], none across batch rows unless each token is alone."""
    batch, seq_len, _ = shape
    if options.layout == "token":
        batch, seq_len = 1, batch * seq_len
    return Grid(batch, seq_len, max(1, min(seq_len, programs // batch)))


def segmentation(
    segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None = None
) -> Segmentation:
    """Prepares segment ids for many calls, such as those of a transformer's layers.

    Finding where segments end takes a dozen small kernels, which every call would otherwise start.

    Args:
      segment_ids: [B, S] signed integers, as `layernorm_modulate` takes them.
      table_rows: M, rows of the tables of scale, shift and gate.
      width: D.
      sharding: of x, if rows are split over a mesh of Auto axes.
    """
    ids = segment_ids.astype(jnp.int32)

    def pieces(kernel: Pass) -> RowPieces:
        # Each device has the programs for its own rows.
        programs = blocks_for(kernel, width).programs * shards_of(sharding, 0)
        return segment_pieces(ids, table_rows, None, programs)

    prepared = PreparedPieces(*(pieces(kernel) for kernel in get_args(Pass)))
    return Segmentation(ids, prepared, table_rows)


def segment_pieces(
    segment_ids: jax.Array, table_rows: int, segment_block: int | None, programs: int
) -> RowPieces:
    """Pieces that end where a segment does.

    At most ⌈S / block⌉ + 2M + 1 of them: each of the M segments, and each run of padding between
    them, adds at most one to the even cuts. With a `segment_block` the cuts alone will do.
    """
    batch, seq_len = segment_ids.shape
    block = pl.cdiv(seq_len, max(1, min(seq_len, programs // batch)))
    aligned = segment_block is not None and segment_block >= block
    if aligned:
        block = _halved(segment_block or 1, block)
        count = pl.cdiv(seq_len, block)
    else:
        count = min(seq_len, pl.cdiv(seq_len, block) + 2 * table_rows + 1)

    def cut(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
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

    return RowPieces(*jax.vmap(cut)(segment_ids))


def of_all_rows(pieces: RowPieces, seq_len: int, table_rows: int) -> Pieces:
    """Rows laid end to end, and their tables."""
    row = jnp.arange(len(pieces.start), dtype=jnp.int32)[:, None]
    segment = pieces.segment
    table_row = jnp.where(segment >= 0, row * table_rows + segment, segment)
    parts = (pieces.start + row * seq_len, pieces.stop + row * seq_len, table_row)
    return Pieces(*(part.reshape(-1) for part in parts))


def _halved(segment_block: int, block: int) -> int:
    """The segment block, halved while that leaves pieces of at least `block` tokens."""
    while segment_block % 2 == 0 and segment_block // 2 >= block:
        segment_block //= 2
    return segment_block
