"""The walk of one program through its block of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layernorm_modulate.operands import Options
from pallas_kernels.layernorm_modulate.triton.division import Blocks
from pallas_kernels.layernorm_modulate.triton.row_blocks import IMPOSSIBLE, EvenRowBlocks
from pallas_kernels.triton.tiles import (
    Tiles,
    clear_beyond,
    load_row,
    load_tile,
    split_width,
    store_row,
    store_tile,
    where_valid,
    wide,
)

Refs = dict[str, Any]
LoadTile = Callable[[str, int], jax.Array]
"""(name of a ref, number of the tile) → a tile of a row, float32."""


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
                loaded["saved_statistics"] = self._load_statistics(row)
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

    def walk_in_tiles(self, work: Callable[[Any, LoadTile, Tiles, Any], Any], carry: Any) -> Any:
        """Runs `work(row, load, saved statistics, carry)` on every row.

        `load(name, n)` is tile n of the row of a named ref, float32, zero where it is padding.
        """

        def each(index: Any, carry: Any) -> Any:
            row = self.start + index
            valid = self.ref["ids"][row] >= 0 if "ids" in self.ref else None

            def load(name: str, place: int) -> jax.Array:
                if name in self.tables:
                    known = self.in_registers
                    return self._table_tile(name, place) if known is None else known[name][place]
                loaded = load_tile(self.ref[name], row, self.launch.dim, self.tiles[place])
                loaded = loaded.astype(jnp.float32)
                return loaded if valid is None else jnp.where(valid, loaded, 0.0)

            statistics = self._load_statistics(row)
            if valid is not None:
                statistics = where_valid(valid, statistics)
            return work(row, load, statistics, carry)

        return lax.fori_loop(0, self.stop - self.start, each, carry)

    def load(self, name: str, row: Any) -> Tiles:
        """A row of a named ref, in its dtype."""
        return load_row(self.ref[name], row, self.launch.dim, self.tiles)

    def store_tile(self, name: str, row: Any, place: int, value: jax.Array) -> None:
        """One tile of `store`."""
        store_tile(self.ref[name], row, self.launch.dim, self.tiles[place], value)

    def store(self, name: str, row: Any, values: Tiles) -> None:
        """Rounds a row to a named ref's dtype and writes it."""
        store_row(self.ref[name], row, self.launch.dim, self.tiles, values)

    def clear_beyond(self, values: Tiles) -> Tiles:
        """Zeroes what lies beyond the row's end."""
        return clear_beyond(values, self.launch.dim, self.tiles)

    def zeros(self) -> Tiles:
        """A float32 row of zeros."""
        return [jnp.zeros((1, tile.width), jnp.float32) for tile in self.tiles]

    def _load_statistics(self, row: Any) -> Tiles:
        """Mean and 1/deviation of a row, as the forward has saved them."""
        ref = self.ref["saved_statistics"]
        return [plgpu.load(ref.at[pl.ds(row, 1), pl.ds(place, 1)]) for place in (0, 1)]

    def _load_tables(self) -> dict[str, Tiles]:
        """Scale, shift and gate of the row block; NaN where no table row can serve it."""
        places = range(len(self.tiles))
        return {name: [self._table_tile(name, n) for n in places] for name in self.tables}

    def _table_tile(self, name: str, place: int) -> jax.Array:
        """A tile of `_load_tables`."""
        row = jnp.maximum(self.table_row, 0)
        loaded = load_tile(self.ref[name], row, self.launch.dim, self.tiles[place])
        loaded = loaded.astype(jnp.float32)
        if "ids" not in self.ref or name not in ("scale", "gate"):
            return loaded
        return loaded + jnp.where(self.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), 0.0)
