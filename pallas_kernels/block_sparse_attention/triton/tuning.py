"""How the kernels divide blocks among programs: tiles, warps and stages."""

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "dq", "dkv"]


@dataclass(frozen=True)
class Tiles:
    """What a program works on.

    Attributes:
      query: tokens of a tile of queries.
      key: tokens of a tile of keys.
      num_warps: warps of a program.
      num_stages: tiles that are loaded ahead, plus one.
    """

    query: int
    key: int
    num_warps: int
    num_stages: int


_TILES: dict[Pass, Tiles] = {
    "forward": Tiles(128, 64, 4, 3),
    "dq": Tiles(64, 64, 4, 3),
    "dkv": Tiles(64, 64, 4, 3),
}


def tiles_for(kernel: Pass, query_block: int, key_block: int) -> Tiles:
    """The tiles of a kernel, at most the lists' blocks."""
    best = _TILES[kernel]
    return Tiles(
        min(best.query, query_block), min(best.key, key_block), best.num_warps, best.num_stages
    )
