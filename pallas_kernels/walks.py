"""How programs of Mosaic GPU kernels walk through rows: groups of threads, and rows on the way."""

from typing import NamedTuple

from pallas_kernels import devices

LANES = 128
"""Threads of a group, and columns of a chunk: what a row's width must be a multiple of."""
_SHARED_BYTES = 220 * 1024
"""Of a multiprocessor's shared memory, for rows."""
_FEWEST_SLOTS, _MOST_SLOTS = 2, 8
MOST_BARRIERS = 32
"""Of a program, in Mosaic: each slot of a group has one."""
_REGISTERS, _OTHER_REGISTERS = 512, 44
"""Of each of `LANES` threads that share all of a multiprocessor's; of a thread, beside a row's."""


class Way(NamedTuple):
    """How a program, one of `per_core` on each multiprocessor, walks through its rows.

    Attributes:
      groups: of `LANES` threads, each with columns of its own.
      per_core: programs of each multiprocessor.
      slots: rows in shared memory at a time.
      reloads: whether what a row needs twice is loaded twice, for want of registers.
    """

    groups: int
    per_core: int
    slots: int
    reloads: bool = False

    @property
    def programs(self) -> int:
        """Of a kernel, on the device to run on."""
        return self.per_core * devices.core_count()


class Pace(NamedTuple):
    """What a kernel walks fastest with.

    Attributes:
      chunks: of a group, at most: a thread holds an element of each in registers.
      groups: of a multiprocessor, about.
      on_the_way: bytes that a multiprocessor waits for, about: fewer than the memory's latency
        takes leave it idle, and more get into each other's way.
    """

    chunks: int
    groups: int
    on_the_way: int


def chunks_of(dim: int, groups: int) -> int:
    """Chunks of columns of a group; some may be another's too."""
    return -(-dim // (LANES * groups))


def way_of(
    dim: int,
    bytes_per_column: int,
    pace: Pace,
    groups: int | None = None,
    held: int = 0,
    twice: int = 0,
) -> Way | None:
    """The way through rows of `dim` columns; None for rows that do not fit.

    Args:
      dim: columns.
      bytes_per_column: of all arrays that are read, together.
      pace: of the kernel.
      groups: of a program; None for the fewest that hold a row.
      held: registers of a thread for each chunk, over all rows.
      twice: those more that hold what a row needs twice.
    """
    groups = groups or -(-dim // (LANES * pace.chunks))
    chunks = chunks_of(dim, groups)
    fit = _REGISTERS // (groups * (chunks * (held + twice) + _OTHER_REGISTERS))
    per_core = max(1, min(pace.groups // groups, fit))
    row_bytes = groups * chunks * LANES * bytes_per_column
    slots = 1 + round(pace.on_the_way / (per_core * row_bytes))
    slots = min(max(slots, _FEWEST_SLOTS), _MOST_SLOTS, MOST_BARRIERS // groups)
    while per_core > 1 and per_core * slots * row_bytes > _SHARED_BYTES:
        per_core -= 1
    needed = groups * per_core * (chunks * (held + twice) + _OTHER_REGISTERS)
    way = Way(groups, per_core, slots, needed > _REGISTERS)
    return way if slots * row_bytes <= _SHARED_BYTES else None
