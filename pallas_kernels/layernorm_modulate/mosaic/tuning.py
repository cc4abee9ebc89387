"""How the kernel uses a multiprocessor, and the rows that it takes."""

from typing import Literal, NamedTuple

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.operands import ModulationLayout

LANES = 128
"""Threads of a group, and columns of a chunk: what a row's width must be a multiple of."""
Norm = Literal["gated", "sum", "plain"]
"""Of x + gate·y; of a sum without a gate, or of an x that has a gradient besides; of x alone."""
_SHARED_BYTES = 220 * 1024
"""Of a multiprocessor's shared memory, for rows."""
_WIDEST, _MOST_CHUNKS = 10_240, 33
"""Columns of a row, and chunks of a group where there are two: a thread holds an element of each
chunk, of two tables and three sums, and wider rows leave the registers."""
_FASTER: dict[tuple[ModulationLayout, Norm], tuple[range, ...]] = {
    ("row", "gated"): (range(2304, _WIDEST + 1),),
    ("row", "sum"): (range(2304, _WIDEST + 1),),
    ("row", "plain"): (range(2304, 2561), range(4096, 6273), range(8193, _WIDEST + 1)),
    ("segment", "gated"): (range(1152, _WIDEST + 1),),
    ("segment", "sum"): (range(1536, _WIDEST + 1),),
    ("segment", "plain"): (range(2048, _WIDEST + 1),),
}
"""Widths at which the kernel was faster than Triton's on an H200 and on an H100, or at most 5 %
slower on one of them (benchmarks/results/wide_rows_h200.json, wide_rows_h100.json)."""
_FEWEST_SLOTS, _MOST_SLOTS = 2, 4
PER_CORE, _LARGE_ROW = (1, 2), 12 * 1024
"""Programs of a multiprocessor: one for rows of so many bytes, which has enough on the way."""


class Way(NamedTuple):
    """How a program, one of `per_core` on each multiprocessor, walks through its rows.

    Attributes:
      groups: of `LANES` threads, each with columns of its own.
      per_core: programs of each multiprocessor.
      slots: rows in shared memory at a time.
    """

    groups: int
    per_core: int
    slots: int


def faster_than_triton(layout: ModulationLayout, norm: Norm, dim: int) -> bool:
    """Whether the kernel was.

    Args:
      layout: which rows share scale, shift and gate.
      norm: what it is of.
      dim: columns.
    """
    return any(dim in widths for widths in _FASTER.get((layout, norm), ()))


def way_for(dim: int, bytes_per_column: int) -> Way | None:
    """The way for rows of `dim` columns; None for rows that the kernel does not take.

    Args:
      dim: columns.
      bytes_per_column: of all arrays that are read, together.
    """
    groups = 2 if dim <= 2 * _MOST_CHUNKS * LANES else 4
    if dim % LANES or dim > _WIDEST:
        return None
    row_bytes = groups * chunks_of(dim, groups) * LANES * bytes_per_column
    per_core = PER_CORE[row_bytes < _LARGE_ROW]
    slots = min(_SHARED_BYTES // (per_core * row_bytes), _MOST_SLOTS)
    return Way(groups, per_core, slots) if slots >= _FEWEST_SLOTS else None


def programs_of(way: Way) -> int:
    """Of a kernel, on the device to run on."""
    return way.per_core * devices.core_count()


def chunks_of(dim: int, groups: int) -> int:
    """Chunks of columns of a group; some may be another's too."""
    return -(-dim // (LANES * groups))
