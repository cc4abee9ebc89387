"""How the kernels divide blocks among programs: tiles, warps and stages."""

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "dq", "dkv"]


@dataclass(frozen=True)
class Tiles:
    """What a program works on.

    Attributes:
      query: tokens of a tile of queries. In dk and dv it may be more than a block: listed blocks.
      key: tokens of a tile of keys. In the forward and dq it may likewise be several blocks.
      num_warps: warps of a program.
      num_stages: tiles that are loaded ahead, plus one.
    """

    query: int
    key: int
    num_warps: int
    num_stages: int


_TILES: dict[tuple[Pass, int], Tiles] = {
    ("forward", 64): Tiles(64, 32, 4, 3),
    ("forward", 128): Tiles(128, 64, 4, 3),
    ("dq", 64): Tiles(64, 64, 4, 2),
    ("dq", 128): Tiles(64, 64, 4, 2),
    ("dkv", 64): Tiles(64, 64, 4, 2),
    ("dkv", 128): Tiles(64, 64, 4, 2),
}
"""For each kernel and block of queries."""


def tiles_for(kernel: Pass, query_block: int) -> Tiles:
    """The tiles that were measured as fastest."""
    return _TILES[kernel, query_block]
