"""How the kernels use shared memory: tiles and how many of each are there at a time."""

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "dq", "dkv"]


@dataclass(frozen=True)
class Tiles:
    """What a program, one group of 128 threads, works on.

    Attributes:
      own: tokens of its own tile, 64 or 128.
      listed: tokens of a tile of the list, 64 or 128.
      slots: tiles in shared memory at a time, of k and of v (of q and of dout in dk and dv).
    """

    own: int
    listed: int
    slots: tuple[int, int]


_TILES: dict[tuple[Pass, int], Tiles] = {
    ("forward", 128): Tiles(64, 128, (1, 1)),
    ("forward", 64): Tiles(64, 64, (1, 1)),
    ("dq", 128): Tiles(64, 64, (2, 2)),
    ("dq", 64): Tiles(64, 64, (2, 1)),
    ("dkv", 128): Tiles(64, 64, (2, 2)),
    ("dkv", 64): Tiles(64, 64, (3, 3)),
}
"""For each kernel and D."""


def tiles_for(kernel: Pass, width: int, listed_block: int) -> Tiles:
    """The tiles that were measured as fastest, at most the blocks that lists name."""
    best = _TILES[kernel, width]
    return Tiles(best.own, min(best.listed, listed_block), best.slots)
