"""The walk of one program through its block of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layernorm_modulate.operands import Options
from pallas_kernels.layernorm_modulate.row_blocks import IMPOSSIBLE, EvenRowBlocks
from pallas_kernels.layernorm_modulate.triton.division import Blocks
from pallas_kernels.triton.tiles import (
    Tiles,
    clear_beyond,
    load_row,
    split_width,
    store_row,
    where_valid,
    wide,
)

Refs = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """What is static in a kernel.

    Attributes:
      names: of its refs, in order.
      dim: width of a row.
      options: of the call.
      blocks: how it works through its rows.
      even: where row blocks lie; None if refs `start`, `stop`, `table_row` say.
    """

    names: tuple[str, ...]
    dim: int
    options: Options
    blocks: Blocks
    even: EvenRowBlocks | None

    def row_block(self, ref: Refs) -> tuple[Any, Any, Any]:
        """First row, last row + 1 and table row of this program."""
        number = pl.program_id(0)
        if self.even is not None:
            return self.even.place(number)
        return ref["start"][number], ref["stop"][number], ref["table_row"][number]


class Rows:
    """The rows of a program's row block, as a kernel's body sees them."""

    def __init__(self, launch: Launch, refs: Sequence[Any], streams: Sequence[str]):
        """`streams` are loaded row by row; tables too, if each token has a row of its own."""
        self.ref: Refs = dict(zip(launch.names, refs, strict=True))
        self.launch = launch
        self.tiles = split_width(launch.dim, launch.blocks.max_tile, launch.blocks.equal_tiles)
        self.start, self.stop, self.table_row = launch.row_block(self.ref)
        self.per_token = launch.options.layout == "token"
        tables: list[str] = [name for name in ("scale", "shift", "gate") if name in self.ref]
        self.streams = [name for name in streams if name in self.ref]
        self.streams += tables if self.per_token else []
        self.tables = [] if self.per_token else tables
        self.in_registers = self._load_tables() if launch.blocks.keep_in_registers else None

    def walk(self, work: Callable[[Any, dict[str, Tiles], Any, Any], Any], carry: Any) -> Any:
        """Runs `work(row, loaded, valid, carry)` on every row; `valid` is None for all."""
        count = self.stop - self.start

        def fetch(index: Any) -> Any:
            # Beyond the last row that row is fetched again; the result is unused.
            row = jnp.maximum(jnp.minimum(self.start + index, self.stop - 1), 0)
            loaded = {name: self.load(name, row) for name in self.streams}
            if "saved_statistics" in self.ref:
                loaded["saved_statistics"] = [
                    plgpu.load(self.ref["saved_statistics"].at[pl.ds(row, 1), pl.ds(n, 1)])
                    for n in (0, 1)
                ]
            return loaded, [self.ref["ids"][row]] if "ids" in self.ref else []

        def consume(index: Any, fetched: Any, carry: Any) -> Any:
            loaded, segment = fetched
            values = {name: wide(row) for name, row in loaded.items()}
            valid = segment[0] >= 0 if segment else None
            if valid is not None:
                values = {name: where_valid(valid, row) for name, row in values.items()}
            values |= self._load_tables() if self.in_registers is None else self.in_registers
            return work(self.start + index, values, valid, carry)

        if not self.launch.blocks.prefetch:
            return lax.fori_loop(0, count, lambda n, c: consume(n, fetch(n), c), carry)

        def body(index: Any, state: Any) -> Any:
            fetched, carry = state
            following = fetch(index + 1)
            return following, consume(index, fetched, carry)

        return lax.fori_loop(0, count, body, (fetch(0), carry))[1]

    def load(self, name: str, row: Any) -> Tiles:
        """A row of a named ref, in its dtype."""
        return load_row(self.ref[name], row, self.launch.dim, self.tiles)

    def store(self, name: str, row: Any, values: Tiles) -> None:
        """Rounds a row to a named ref's dtype and writes it."""
        store_row(self.ref[name], row, self.launch.dim, self.tiles, values)

    def clear_beyond(self, values: Tiles) -> Tiles:
        """Zeroes what lies beyond the row's end."""
        return clear_beyond(values, self.launch.dim, self.tiles)

    def zeros(self) -> Tiles:
        """A float32 row of zeros."""
        return [jnp.zeros((1, tile.width), jnp.float32) for tile in self.tiles]

    def _load_tables(self) -> dict[str, Tiles]:
        """Scale, shift and gate of the row block; NaN where no table row can serve it."""
        row = jnp.maximum(self.table_row, 0)
        loaded: dict[str, Tiles] = {name: wide(self.load(name, row)) for name in self.tables}
        if "ids" in self.ref:
            poison = jnp.where(self.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), jnp.float32(0))
            for name in loaded.keys() & {"scale", "gate"}:
                loaded[name] = [tile + poison for tile in loaded[name]]
        return loaded
