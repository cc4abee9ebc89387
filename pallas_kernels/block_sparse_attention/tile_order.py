"""The order of a video's tokens in which a block holds neighbours in time, height and width."""

from typing import NamedTuple

import numpy as np

Grid = tuple[int, int, int]


class TileOrder(NamedTuple):
    """Tokens in blocks: each block's valid tokens are its first.

    Attributes:
      source: [N·block] int32, the token at each place; −1 where there is none.
      place: [T·H·W] int32, where each token is: `source[place] == arange(T·H·W)`.
      tokens: [N] int32, valid tokens of each block.
    """

    source: np.ndarray
    place: np.ndarray
    tokens: np.ndarray


def tile_order(grid: Grid, tile: Grid | None = None, block: int = 64) -> TileOrder:
    """Orders the tokens of a sample so that each block holds neighbours.

    With a tile, each block holds one. Tiles follow one another along the width, then the height,
    then time, and tokens within a tile likewise. Tiles at the edges may hold fewer tokens, and
    every block of a tile with fewer tokens than `block` has empty places.

    Without one, every block but the last is full. Time and height are cut into bands of about the
    side of a cube of `block` tokens. Along each pair of bands, tokens follow one another column by
    column of the width, there and back again in the next pair, and are cut into blocks.

    Args:
      grid: (t, h, w) tokens of the sample.
      tile: (t, h, w) tokens of a tile, such as (4, 4, 4) or (2, 8, 8); None for full blocks.
      block: places of a block, at least the tokens of a tile.

    Raises:
      ValueError: a size is below 1, or a tile has no room in a block.
    """
    _check(grid, tile, block)
    t, h, w = (each.reshape(-1) for each in np.indices(grid))
    if tile is None:
        order = _along_bands(grid, block, t, h, w)
        size = len(order)
        counts = np.minimum(block, size - np.arange(0, size, block))
        return _blocks(order, np.arange(size), counts, block)
    tiles = [-(-size // part) for size, part in zip(grid, tile, strict=True)]
    number, within = zip(*map(np.divmod, (t, h, w), tile), strict=True)
    tile_of = np.ravel_multi_index(number, tiles)
    order = np.lexsort((*within[::-1], tile_of))
    counts = np.bincount(tile_of, minlength=int(np.prod(tiles)))
    first = np.cumsum(counts) - counts
    rank = np.arange(len(order)) - first[tile_of[order]]
    return _blocks(order, tile_of[order] * block + rank, counts, block)


def _along_bands(grid: Grid, block: int, t: np.ndarray, h: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The tokens in the order in which full blocks take them."""
    frames, height, width = grid
    bands_t, bands_h = _bands(grid, block)
    band_t = t * bands_t // frames
    back = band_t % 2 == 1
    band_h = h * bands_h // height
    band_h = np.where(back, bands_h - 1 - band_h, band_h)
    # Towards the next pair of bands, so that a block that holds the end of one is connected.
    across = np.where(back, height - 1 - h, h)
    beam = band_t * bands_h + band_h
    column = np.where(beam % 2 == 1, width - 1 - w, w)
    return np.lexsort((t, across, column, beam))


def _bands(grid: Grid, block: int) -> tuple[int, int]:
    """Numbers of bands of time and of height, whose columns make about cubic blocks."""
    sides: dict[int, float] = {}
    room = float(block)
    for left, axis in zip((3, 2, 1), np.argsort(grid, kind="stable").tolist(), strict=True):
        # A short axis leaves its share of the room to the others.
        sides[axis] = min(grid[axis], room ** (1 / left))
        room /= sides[axis]
    bands_t, bands_h = (max(1, round(grid[axis] / sides[axis])) for axis in (0, 1))
    return bands_t, bands_h


def _blocks(order: np.ndarray, places: np.ndarray, counts: np.ndarray, block: int) -> TileOrder:
    place = np.empty(len(order), np.int32)
    place[order] = places
    source = np.full(len(counts) * block, -1, np.int32)
    source[place] = np.arange(len(order))
    return TileOrder(source, place, counts.astype(np.int32))


def _check(grid: Grid, tile: Grid | None, block: int) -> None:
    for name, sizes in (("grid", grid), ("tile", tile)):
        if sizes is not None and (len(sizes) != 3 or min(sizes) < 1):
            raise ValueError(f"tile_order: {name} is {sizes}; it must be three numbers >= 1")
    if tile is not None and int(np.prod(tile)) > block:
        raise ValueError(
            f"tile_order: tile {tile} holds {int(np.prod(tile))} tokens, more than a block of "
            f"{block}; make one of its sides shorter"
        )
