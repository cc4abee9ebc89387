"""The rows of a program: its row blocks, and the shared memory that rows go through."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layernorm_modulate.mosaic.columns import Columns
from pallas_kernels.layernorm_modulate.mosaic.tuning import Way
from pallas_kernels.layernorm_modulate.row_blocks import EvenRowBlocks

Refs = dict[str, Any]


class RowBlock(NamedTuple):
    """One row block in a kernel: its number, first row, last row + 1 and table row."""

    number: Any
    start: Any
    stop: Any
    table_row: Any


@dataclass(frozen=True)
class Launch:
    """What is static in a kernel.

    Attributes:
      names: of its refs, in order; rows in shared memory, its barrier, and the groups' sums with
        theirs come last.
      dim: width of a row.
      way: of the kernel.
      even: where row blocks lie, one for each program; None if refs `start`, `stop`, `table_row`,
        `first` and `end` say.
      row_blocks: how many there are.
    """

    names: tuple[str, ...]
    dim: int
    way: Way
    even: EvenRowBlocks | None
    row_blocks: int

    def rows(self, ref: Refs, program: Any) -> tuple[Any, Any]:
        """First row and last row + 1 of a program."""
        if self.even is not None:
            return self.even.place(program)[:2]
        first, end = ref["first"][program], ref["end"][program]
        start = ref["start"][jnp.minimum(first, self.row_blocks - 1)]
        stop = ref["stop"][jnp.maximum(end - 1, 0)]
        return start, jnp.where(first < end, stop, start)

    def for_each(self, ref: Refs, program: Any, work: Callable[[RowBlock], None]) -> None:
        """Works on each row block of a program."""
        if self.even is not None:
            return work(RowBlock(program, *self.even.place(program)))

        def one(number: Any, _: None) -> None:
            work(RowBlock(number, *(ref[each][number] for each in ("start", "stop", "table_row"))))

        return lax.fori_loop(ref["first"][program], ref["end"][program], one, None)


@dataclass(frozen=True)
class Ring:
    """Shared memory that a group's columns of a program's rows go through.

    Attributes:
      sources: refs [rows, chunks of a row, LANES] by name.
      slots: of each source, a ref [slots, chunks, LANES].
      arrived: barriers [slots] which say that a slot's copies are there.
      columns: of the group.
      start, stop: first row and last row + 1 of the program.
      count: of slots.
    """

    sources: Refs
    slots: Refs
    arrived: Any
    columns: Columns
    start: Any
    stop: Any
    count: int

    def begin(self) -> None:
        """Begins to copy the first rows: all but one slot can be full."""
        for number in range(self.count - 1):
            self.fetch(self.start + number)

    def fetch(self, row: Any) -> None:
        """Begins to copy a row into its slot, if the program has it."""

        @pl.when(row < self.stop)
        def _() -> None:
            slot = self.slot(row)
            for name, source in self.sources.items():
                into = self.slots[name].at[slot]
                plgpu.copy_gmem_to_smem(self.columns.of(source, row), into, self.arrived.at[slot])

    def fetch_last(self, row: Any) -> None:
        """Begins to fill the slot of the row before this one, once that was written from it."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.fetch(row + self.count - 1)

    def wait(self, row: Any) -> Refs:
        """The slot of a row, by name of the source, once it is there."""
        slot = self.slot(row)
        plgpu.barrier_wait(self.arrived.at[slot])
        return {name: slots.at[slot] for name, slots in self.slots.items()}

    def write(self, row: Any, names: Sequence[str], destinations: Sequence[Any]) -> None:
        """Begins to copy what stands in the slots of some sources to a row of other refs."""
        plgpu.commit_smem()
        for name, destination in zip(names, destinations, strict=True):
            into = self.columns.of(destination, row)
            plgpu.copy_smem_to_gmem(self.slots[name].at[self.slot(row)], into, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def slot(self, row: Any) -> Any:
        """Of a row."""
        return lax.rem(row - self.start, jnp.int32(self.count))
