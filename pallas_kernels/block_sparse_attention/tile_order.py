"""The order of a video's tokens in which a block holds a three-dimensional tile of them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

Grid = tuple[int, int, int]

_NEARLY = 1.1
"""Tiles may be this many times the fewest, where they are more compact."""


class TileOrder(NamedTuple):
    """Tokens in tiles: block b holds tile b, its valid tokens first.

    Attributes:
      source: [N·block] int32, the token at each place; −1 where there is none.
      place: [T·H·W] int32, where each token is: `source[place] == arange(T·H·W)`.
      tokens: [N] int32, valid tokens of each block.
    """

    source: np.ndarray
    place: np.ndarray
    tokens: np.ndarray


def tile_order(grid: Grid, tile: Grid | None = None, block: int = 64) -> TileOrder:
    """Orders the tokens of a sample so that each block holds a tile of neighbours.

    Tiles follow one another along the width, then the height, then time, and tokens within a tile
    likewise. Tiles at the edges may hold fewer tokens.

    Args:
      grid: (t, h, w) tokens of the sample.
      tile: (t, h, w) tokens of a tile, such as (4, 4, 4) or (2, 8, 8); None for `best_tile`.
      block: places of a block, at least the tokens of a tile.

    Raises:
      ValueError: a size is below 1, or a tile has no room in a block.
    """
    tile = best_tile(grid, block) if tile is None else tile
    _check("tile_order", grid, tile, block)
    along = [np.arange(size) for size in grid]
    token = np.stack(np.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, 3)
    number, within = np.divmod(token, tile)
    tiles = _tiles(grid, tile)
    tile_of = np.ravel_multi_index(tuple(number.T), tiles)
    order = np.lexsort((*within.T[::-1], tile_of))
    counts = np.bincount(tile_of, minlength=int(np.prod(tiles)))
    first = np.cumsum(counts) - counts
    rank = np.arange(len(order)) - first[tile_of[order]]
    place = np.empty(len(order), np.int32)
    place[order] = tile_of[order] * block + rank
    source = np.full(len(counts) * block, -1, np.int32)
    source[place] = np.arange(len(order))
    return TileOrder(source, place, counts.astype(np.int32))


def best_tile(grid: Grid, block: int = 64) -> Grid:
    """A compact tile: of those that leave about the fewest places of blocks empty, the most cubic.

    Args:
      grid: (t, h, w) tokens of the sample.
      block: places of a block.

    Raises:
      ValueError: a size is below 1.
    """
    _check("best_tile", grid, (1, 1, 1), block)
    found = list(_candidates(grid, block))
    fewest = min(int(np.prod(_tiles(grid, tile))) for tile in found)
    enough = [tile for tile in found if np.prod(_tiles(grid, tile)) <= _NEARLY * fewest]
    return min(enough, key=lambda tile: (sum(tile) / np.cbrt(np.prod(tile)), tile))


def _candidates(grid: Grid, block: int) -> Iterator[Grid]:
    """Every tile with room in a block, of sides that no shorter side cuts into as many parts."""
    frames, height, width = grid
    for t in _sides(frames, block):
        for h in _sides(height, block // t):
            for w in _sides(width, block // (t * h)):
                yield t, h, w


def _sides(size: int, most: int) -> list[int]:
    """The shortest side for each number of parts that a size can be cut into."""
    return sorted({-(-size // -(-size // side)) for side in range(1, min(size, most) + 1)})


def _tiles(grid: Grid, tile: Grid) -> Grid:
    t, h, w = (-(-size // part) for size, part in zip(grid, tile, strict=True))
    return t, h, w


def _check(function: str, grid: Grid, tile: Grid, block: int) -> None:
    for name, sizes in (("grid", grid), ("tile", tile)):
        if len(sizes) != 3 or min(sizes) < 1:
            raise ValueError(f"{function}: {name} is {sizes}; it must be three numbers >= 1")
    if int(np.prod(tile)) > block:
        raise ValueError(
            f"{function}: tile {tile} holds {int(np.prod(tile))} tokens, more than a block of "
            f"{block}; make one of its sides shorter"
        )
