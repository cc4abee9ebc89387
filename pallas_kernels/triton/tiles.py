"""One row of an array inside a kernel, in tiles of power-of-two width."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_NARROWEST = 128

Tiles = list[jax.Array]
"""A row: [1, width] for each of its tiles."""


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


def load_row(ref: Any, row: Any, dim: int, tiles: Sequence[Tile]) -> Tiles:
    """A row of a [rows, dim] ref in its own dtype; 0 beyond its end."""
    return [
        plgpu.load(_at(ref, row, tile), mask=_columns(tile, dim), other=0.0)
        if tile.ragged
        else plgpu.load(_at(ref, row, tile))
        for tile in tiles
    ]


def store_row(ref: Any, row: Any, dim: int, tiles: Sequence[Tile], values: Tiles) -> None:
    """Rounds a row to the ref's dtype and writes it."""
    for tile, value in zip(tiles, values, strict=True):
        mask = _columns(tile, dim) if tile.ragged else None
        plgpu.store(_at(ref, row, tile), value.astype(ref.dtype), mask=mask)


def clear_beyond(values: Tiles, dim: int, tiles: Sequence[Tile]) -> Tiles:
    """Zeroes what lies beyond the row's end."""
    return [
        jnp.where(_columns(tile, dim), value, 0.0) if tile.ragged else value
        for tile, value in zip(tiles, values, strict=True)
    ]


def wide(values: Tiles) -> Tiles:
    """In float32."""
    return [value.astype(jnp.float32) for value in values]


def where_valid(valid: Any, values: Tiles) -> Tiles:
    """Zeroes a row unless it is valid."""
    return [jnp.where(valid, value, jnp.zeros_like(value)) for value in values]


def tile_map(function: Callable[..., jax.Array], *rows: Tiles) -> Tiles:
    """Applies a function to the tiles of rows."""
    return [function(*parts) for parts in zip(*rows, strict=True)]


def row_sums(*rows: Tiles) -> list[jax.Array]:
    """The sum over each row's elements, float32 scalars, all in one reduction across threads.

    Tiles of equal width are added first; then the rows' sums are taken as those of one [n, width]
    block, because each reduction of its own would make the program's warps wait for each other.
    """
    count = len(rows)
    index = jnp.arange(pl.next_power_of_2(count))
    total: Any = 0.0
    for width in sorted({tile.shape[1] for tile in rows[0]}):
        added = [sum(tile for tile in row if tile.shape[1] == width) for row in rows]
        block = jnp.broadcast_to(added[0], (index.size, width))
        for n in range(1, count):
            here = jnp.broadcast_to(added[n], block.shape)
            block = jnp.where(index[:, None] == n, here, block)
        total = total + jnp.sum(block, axis=1)
    return [jnp.sum(jnp.where(index == n, total, 0.0)) for n in range(count)]


def _at(ref: Any, row: Any, tile: Tile) -> Any:
    if not tile.ragged:
        return ref.at[pl.ds(row, 1), pl.ds(tile.offset, tile.width)]
    # A slice may not leave the array; single indices may, where a mask covers them.
    columns = tile.offset + jnp.arange(tile.width)[None, :]
    rows = jnp.broadcast_to(row + jnp.arange(1)[:, None], columns.shape)
    return ref.at[rows, columns]


def _columns(tile: Tile, dim: int) -> jax.Array:
    """[1, width] bool: which columns exist."""
    return (tile.offset + jnp.arange(tile.width) < dim)[None, :]
