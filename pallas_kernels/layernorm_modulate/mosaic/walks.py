"""Which row blocks each program walks through, where segments divide rows."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layernorm_modulate.row_blocks import RowBlocks, segment_row_blocks


class Walks(NamedTuple):
    """Row blocks that follow segments, and which of them each program walks through.

    A program's row blocks follow each other within a batch row.

    Attributes:
      row_blocks: see there.
      first: [B, Q] int32, the first row block of each program: of its batch row's, or
        (`flattened`) of all.
      end: [B, Q] int32, its last row block + 1.
    """

    row_blocks: RowBlocks
    first: jax.Array
    end: jax.Array

    def flattened(self, seq_len: int, table_rows: int) -> "Walks":
        """With batch rows laid end to end, and their tables."""
        skipped = jnp.arange(len(self.first), dtype=jnp.int32)[:, None] * self.row_blocks.per_row
        row_blocks = self.row_blocks.flattened(seq_len, table_rows)
        return Walks(row_blocks, self.first + skipped, self.end + skipped)


def walks_of(
    segment_ids: jax.Array, table_rows: int, segment_block: int | None, programs: int
) -> Walks:
    """Gives each of about `programs` programs the row blocks that begin in its equal share."""
    row_blocks = segment_row_blocks(segment_ids, table_rows, segment_block, programs)
    batch, seq_len = segment_ids.shape
    each = max(1, min(seq_len, programs // batch))
    cuts = jnp.arange(each + 1, dtype=jnp.int32) * pl.cdiv(seq_len, each)
    place = jax.vmap(partial(jnp.searchsorted, v=jnp.minimum(cuts, seq_len)))(row_blocks.start)
    place = place.astype(jnp.int32)
    return Walks(row_blocks, place[:, :-1], place[:, 1:])
