"""How a kernel divides its rows into programs and tiles."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward", "residual_forward", "residual_backward", "sum_backward"]
"""Kernels by what they hold: `residual_backward` after x + gate·y, `sum_backward` after x + y."""


@dataclass(frozen=True)
class Blocks:
    """How a kernel works through its rows.

    Attributes:
      max_tile: widest tile of a row, a power of two.
      num_warps: warps of a program, which work on one row together.
      programs: row blocks that all rows are divided into, about.
      prefetch: whether the next row is loaded before work on this one begins.
      keep_in_registers: of scale, shift and gate; else they are loaded again, from cache, for each
        row.
      equal_tiles: whether all tiles are equally wide and the last one may be padded.
    """

    max_tile: int
    num_warps: int
    programs: int
    prefetch: bool = True
    keep_in_registers: bool = True
    equal_tiles: bool = False


@dataclass(frozen=True)
class Division:
    """`Blocks` for a device with any number of multiprocessors.

    Attributes:
      max_tile, num_warps, prefetch, keep_in_registers, equal_tiles: as in `Blocks`.
      per_core: row blocks for each multiprocessor.
    """

    max_tile: int
    num_warps: int
    per_core: int
    prefetch: bool = True
    keep_in_registers: bool = True
    equal_tiles: bool = False

    def blocks(self, cores: int) -> Blocks:
        """The blocks on a device with `cores` multiprocessors."""
        return Blocks(
            self.max_tile,
            self.num_warps,
            self.per_core * cores,
            self.prefetch,
            self.keep_in_registers,
            self.equal_tiles,
        )


class Range(NamedTuple):
    """Where kernels were faster than XLA's fusion, forward and backward, all through.

    Attributes:
      least_elements: of x.
      widths: narrowest and widest.
    """

    least_elements: int
    widths: tuple[int, int]
