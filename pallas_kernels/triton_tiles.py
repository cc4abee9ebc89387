"""What Triton kernels share: blocks, the tiles of a row, and sums of partial sums."""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import devices
from pallas_kernels.op import Ref

_NARROWEST = 128


@dataclass(frozen=True)
class Blocks:
    """How a kernel works through tokens.

    Attributes:
      width: columns of a program, or of the widest tile of a token's; a power of two.
      tokens: that a program works on at once, a power of two.
      num_warps: warps of a program.
      per_core: programs for each multiprocessor, at most; 0 for one for each block.
    """

    width: int
    tokens: int
    num_warps: int
    per_core: int = 0

    def programs(self, tokens: int, across: int = 1) -> int:
        """Programs of a kernel along the tokens, if there are `across` along the width."""
        most = -(-tokens // self.tokens)
        if not self.per_core:
            return most
        return min(most, max(1, self.per_core * devices.core_count() // across))


class Tile(NamedTuple):
    """Columns `offset` to `offset + width`; `ragged` if the row ends before the tile does."""

    offset: int
    width: int
    ragged: bool


def split_width(dim: int, max_tile: int, equal: bool = False) -> tuple[Tile, ...]:
    """Cuts rows of `dim` elements into power-of-two tiles of at most `max_tile`.

    If `equal`, all have the same width and the last one may be padded: 1920 with `max_tile` 512 is
    four tiles of 512. Otherwise each is as wide as the rest of the row allows, and what is left
    under 128 columns is one tile, padded to a power of two: 1152 with `max_tile` 1024 is
    1024 + 128, 5120 is five tiles of 1024, 1000 is 512 + 256 + 128 + 104 of 128.
    """
    tiles: list[Tile] = []
    offset = 0
    if equal:
        width = min(max_tile, pl.next_power_of_2(dim))
        return tuple(Tile(at, width, at + width > dim) for at in range(0, dim, width))
    while offset < dim:
        left = dim - offset
        largest = 1 << (left.bit_length() - 1)
        width = min(max_tile, largest if left >= _NARROWEST else pl.next_power_of_2(left))
        tiles.append(Tile(offset, width, width > left))
        offset += width
    return tuple(tiles)


def wide(values: list[jax.Array]) -> list[jax.Array]:
    """In float32."""
    return [value.astype(jnp.float32) for value in values]


class Reduction(NamedTuple):
    """Rows and columns of a step, warps of a program, and steps that are loaded at once."""

    depth: int
    tile: int
    num_warps: int
    together: int


FEW, MANY = Reduction(128, 32, 4, 8), Reduction(256, 32, 8, 8)
"""Of up to 256 partial rows, and of more."""
OF_TABLE_ROW = Reduction(32, 128, 4, 2)
"""Of those that one table row has among others."""


def reduce_partials(
    partial_sums: jax.Array,
    table_row: jax.Array | None,
    per_row: int,
    table: tuple[int, ...],
    interpret: bool,
    name: str,
) -> jax.Array:
    """Partial sums [K·B·P, D] → sums [K·B·M, D], float32, for tables [B, D] or [B, M, D].

    Args:
      partial_sums: of K gradients.
      table_row: [B·P] which row of the flattened table each row block belongs to; None for tables
        with one row for each row of the batch.
      per_row: P, row blocks of each row of the batch.
      table: shape of the tables.
      interpret: run in Pallas's interpreter.
      name: of the kernel, for profilers and lowered modules.
    """
    dim, tables = table[-1], math.prod(table[1:-1])
    rows = partial_sums.shape[0] // per_row * tables
    way = OF_TABLE_ROW if table_row is not None else MANY if per_row > 256 else FEW
    way = way._replace(depth=min(way.depth, pl.next_power_of_2(per_row)))
    shape = {"batch": table[0], "per_row": per_row, "tables": tables}
    return pl.pallas_call(
        partial(_reduce_kernel, **shape, way=way),
        out_shape=jax.ShapeDtypeStruct((rows, dim), jnp.float32),
        grid=(rows, pl.cdiv(dim, way.tile)),
        compiler_params=plgpu.CompilerParams(num_warps=way.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(partial_sums, *(() if table_row is None else (table_row,)))


def _reduce_kernel(
    partial_ref: Ref, *refs: Ref, batch: int, per_row: int, tables: int, way: Reduction
) -> None:
    """Adds the partial rows of one table row: [K·B·P, D] → [K·B·M, D].

    Each of K gradients has B·P partial rows, P = `per_row` for each row of the batch. With a
    `table_row` ref, those of P that name the table row count; else all.
    """
    *table_row_ref, out_ref = refs
    depth, tile, _, together = way
    group, wanted = pl.program_id(0) // tables, pl.program_id(0) % tables
    columns = pl.ds(pl.program_id(1) * tile, tile)
    in_row = (pl.program_id(1) * tile + jnp.arange(tile) < out_ref.shape[1])[None, :]
    begin, end = jnp.int32(0), jnp.int32(per_row)

    def own(first: jax.Array | int, count: int) -> tuple[jax.Array, jax.Array]:
        """Places from `first` on, and whether they are the table row's."""
        place = first + jnp.arange(count)
        counts = place < per_row
        if table_row_ref:
            here = table_row_ref[0].at[pl.ds(group % batch * per_row + first, count)]
            named = plgpu.load(here, mask=counts, other=-1)
            counts = counts & (named == group % batch * tables + wanted)
        return place, counts

    if table_row_ref:
        # Those of a segment follow each other.
        place, counts = own(0, pl.next_power_of_2(per_row))
        begin = jnp.min(jnp.where(counts, place, per_row))
        end = jnp.max(jnp.where(counts, place + 1, 0))

    def add(total: jax.Array, first: jax.Array) -> jax.Array:
        _, counts = own(first, depth)
        mask = jnp.broadcast_to(in_row, total.shape)
        mask = mask & jnp.broadcast_to(counts[:, None], total.shape)
        rows = partial_ref.at[pl.ds(group * per_row + first, depth), columns]
        return total + plgpu.load(rows, mask=mask, other=0.0)

    def add_together(n: jax.Array, total: jax.Array) -> jax.Array:
        # Loads of one iteration are under way at the same time.
        for offset in range(0, min(per_row, together * depth), depth):
            total = add(total, begin + n * together * depth + offset)
        return total

    rounds = pl.cdiv(end - begin, together * depth)
    total = lax.fori_loop(0, rounds, add_together, jnp.zeros((depth, tile), jnp.float32))
    out = out_ref.at[pl.ds(pl.program_id(0), 1), columns]
    plgpu.store(out, jnp.sum(total, axis=0)[None, :], mask=in_row)
