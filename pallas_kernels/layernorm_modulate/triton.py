"""The Pallas kernels, lowered through Triton: forward and backward, each one pass over memory.

A program takes a piece: consecutive rows that share one row of scale, shift and gate. It holds
that row in registers and walks through its piece, asking memory for the next row before it works
on this one. In the backward it adds up the gradients of scale, shift and gate in float32
registers, tile by tile along the width (AdaptiveLoad's D-tile coalesced reduction, arXiv
2605.17923, taken to one pass), and writes them once; `_reduce` adds the programs' partial rows in
a fixed order. Nothing is atomic, so that equal inputs give equal bits.

The backward takes mean and 1/deviation of each row from the forward: eight bytes a row, which
measured 2 to 4 % faster than taking them from the row again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layernorm_modulate.operands import Operands, Options, Saved
from pallas_kernels.layernorm_modulate.pieces import (
    IMPOSSIBLE,
    Grid,
    Pieces,
    even_grid,
    segment_pieces,
)
from pallas_kernels.layernorm_modulate.tiles import (
    Tiles,
    clear_beyond,
    load_row,
    row_sums,
    split_width,
    store_row,
    tile_map,
    wide,
)
from pallas_kernels.layernorm_modulate.tuning import Blocks

FORWARD, STATISTICS, BACKWARD, REDUCE = (
    f"layernorm_modulate_{part}" for part in ("forward", "statistics", "backward", "reduce")
)
"""Names of the kernels, as profilers and lowered modules show them."""

_TOGETHER = 8
"""Groups of partial rows that the reduction loads at once."""

Refs = dict[str, Any]


@dataclass(frozen=True)
class _Launch:
    """What is static in a kernel.

    Attributes:
      names: of its refs, in order.
      dim: width of a row.
      options: of the call.
      blocks: how it works through its rows.
      grid: where pieces lie; None if refs `start`, `stop`, `table_row` say.
    """

    names: tuple[str, ...]
    dim: int
    options: Options
    blocks: Blocks
    grid: Grid | None

    def piece(self, ref: Refs) -> tuple[Any, Any, Any]:
        """First row, last row + 1 and table row of this program."""
        number = pl.program_id(0)
        if self.grid is not None:
            return self.grid.piece(number)
        return ref["start"][number], ref["stop"][number], ref["table_row"][number]


class _Rows:
    """The rows of a program's piece, as a kernel's body sees them."""

    def __init__(self, launch: _Launch, refs: Sequence[Any], streams: Sequence[str]):
        """`streams` are loaded row by row; tables too, if each token has a row of its own."""
        self.ref: Refs = dict(zip(launch.names, refs, strict=True))
        self.launch = launch
        self.tiles = split_width(launch.dim, launch.blocks.max_tile)
        self.start, self.stop, self.table_row = launch.piece(self.ref)
        self.per_token = launch.options.layout == "token"
        tables: list[str] = [name for name in ("scale", "shift", "gate") if name in self.ref]
        self.streams = [name for name in streams if name in self.ref]
        self.streams += tables if self.per_token else []
        self.tables = [] if self.per_token else tables
        self.held = self._load_tables() if launch.blocks.hold else None

    def walk(self, work: Callable[[Any, dict[str, Tiles], Any, Any], Any], carry: Any) -> Any:
        """Runs `work(row, loaded, valid, carry)` on every row; `valid` is None for all."""
        count = self.stop - self.start

        def fetch(index: Any) -> Any:
            # Beyond the piece's end its last row is fetched again, for nobody.
            row = jnp.maximum(jnp.minimum(self.start + index, self.stop - 1), 0)
            loaded = {name: self.load(name, row) for name in self.streams}
            if "kept" in self.ref:
                loaded["kept"] = [
                    plgpu.load(self.ref["kept"].at[pl.ds(row, 1), pl.ds(n, 1)]) for n in (0, 1)
                ]
            return loaded, [self.ref["ids"][row]] if "ids" in self.ref else []

        def consume(index: Any, fetched: Any, carry: Any) -> Any:
            loaded, segment = fetched
            values = {name: wide(row) for name, row in loaded.items()}
            valid = segment[0] >= 0 if segment else None
            if valid is not None:
                values = {name: _where(valid, row) for name, row in values.items()}
            values |= self._load_tables() if self.held is None else self.held
            return work(self.start + index, values, valid, carry)

        if not self.launch.blocks.prefetch:
            return lax.fori_loop(0, count, lambda n, c: consume(n, fetch(n), c), carry)

        def body(index: Any, state: Any) -> Any:
            fetched, carry = state
            following = fetch(index + 1)
            return following, consume(index, fetched, carry)

        return lax.fori_loop(0, count, body, (fetch(0), carry))[1]

    def load(self, name: str, row: Any) -> Tiles:
        return load_row(self.ref[name], row, self.launch.dim, self.tiles)

    def store(self, name: str, row: Any, values: Tiles) -> None:
        store_row(self.ref[name], row, self.launch.dim, self.tiles, values)

    def clear_beyond(self, values: Tiles) -> Tiles:
        return clear_beyond(values, self.launch.dim, self.tiles)

    def zeros(self) -> Tiles:
        return [jnp.zeros((1, tile.width), jnp.float32) for tile in self.tiles]

    def _load_tables(self) -> dict[str, Tiles]:
        """Scale, shift and gate of the piece; NaN where no table row can serve it."""
        row = jnp.maximum(self.table_row, 0)
        loaded: dict[str, Tiles] = {name: wide(self.load(name, row)) for name in self.tables}
        if "ids" in self.ref:
            poison = jnp.where(self.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), jnp.float32(0))
            loaded["scale"] = [tile + poison for tile in loaded["scale"]]
        return loaded


def _forward_kernel(*refs: Any, launch: _Launch) -> None:
    rows = _Rows(launch, refs, ("x", "y"))
    dim, eps = launch.dim, launch.options.eps

    def work(row: Any, value: dict[str, Tiles], valid: Any, carry: Any) -> Any:
        h = value["x"]
        if "y" in value:
            y = value["y"]
            y = tile_map(jnp.multiply, value["gate"], y) if "gate" in value else y
            h = [part.astype(launch.options.residual_dtype) for part in tile_map(jnp.add, h, y)]
            if "h" in rows.ref:
                rows.store("h", row, h)
            h = wide(h)
        (total,) = row_sums(h)
        centred = rows.clear_beyond([part - total / dim for part in h])
        (squares,) = row_sums([part * part for part in centred])
        rstd = lax.rsqrt(squares / dim + eps)
        if "statistics" in rows.ref:
            for place, value_kept in enumerate((total / dim, rstd)):
                where = rows.ref["statistics"].at[pl.ds(row, 1), pl.ds(place, 1)]
                plgpu.store(where, jnp.full((1, 1), value_kept))
        if "out" not in rows.ref:
            return carry
        out = tile_map(
            lambda c, scale, shift: c * rstd * (1.0 + scale) + shift,
            centred,
            value["scale"],
            value["shift"],
        )
        if valid is not None:
            out = _where(valid, out)
        rows.store("out", row, out)
        return carry

    rows.walk(work, ())


def _backward_kernel(*refs: Any, launch: _Launch) -> None:
    rows = _Rows(launch, refs, ("h", "dout", "dh", "y"))

    dim = launch.dim

    def work(row: Any, value: dict[str, Tiles], valid: Any, sums: dict[str, Tiles]) -> Any:
        gained = tile_map(lambda d, scale: d + d * scale, value["dout"], value["scale"])
        mean, rstd = value["kept"]
        normed = [(part - mean) * rstd for part in value["h"]]
        gains, products = row_sums(gained, tile_map(jnp.multiply, gained, normed))
        constant, slope = gains / dim * rstd, products / dim * rstd
        dh = tile_map(lambda g, n: (g * rstd - constant) - n * slope, gained, normed)
        grads = {"dscale": tile_map(jnp.multiply, value["dout"], normed), "dshift": value["dout"]}
        if "dh" in value:
            dh = tile_map(jnp.add, dh, value["dh"])
            gate = value.get("gate")
            rows.store("dy", row, dh if gate is None else tile_map(jnp.multiply, gate, dh))
            if gate is not None:
                grads["dgate"] = tile_map(jnp.multiply, dh, value["y"])
        rows.store("dx", row, dh)
        if rows.per_token:
            for name, grad in grads.items():
                rows.store(name, row, grad)
        return {name: tile_map(jnp.add, total, grads[name]) for name, total in sums.items()}

    summed = [] if rows.per_token else [f"d{name}" for name in _summed(launch.names)]
    sums = rows.walk(work, {name: rows.zeros() for name in summed})
    for place, name in enumerate(summed):
        rows.store("partial", place * pl.num_programs(0) + pl.program_id(0), sums[name])


def _where(valid: Any, row: Tiles) -> Tiles:
    return [jnp.where(valid, tile, jnp.zeros_like(tile)) for tile in row]


def _summed(names: Sequence[str]) -> list[str]:
    """Tables whose gradients a backward adds up, in the order of its partial sums."""
    return ["scale", "shift", *(["gate"] if "gate" in names else [])]


def _reduce_kernel(
    partial_ref: Any, *refs: Any, batch: int, pieces: int, tables: int, depth: int, tile: int
) -> None:
    """Adds the pieces of one table row: [K·B·P, D] → [K·B·M, D], `depth` pieces at a time.

    Each of K gradients has B·P partial rows, P pieces for each row of the batch. With a
    `table_row` ref, those of P that name the table row count; else all.
    """
    *table_row_ref, out_ref = refs
    group, wanted = pl.program_id(0) // tables, pl.program_id(0) % tables
    columns = pl.ds(pl.program_id(1) * tile, tile)
    in_row = (pl.program_id(1) * tile + jnp.arange(tile) < out_ref.shape[1])[None, :]

    def add(total: jax.Array, first: Any) -> jax.Array:
        place = first + jnp.arange(depth)
        counts = place < pieces
        if table_row_ref:
            here = table_row_ref[0].at[pl.ds(group % batch * pieces + first, depth)]
            named = plgpu.load(here, mask=counts, other=-1)
            counts = counts & (named == group % batch * tables + wanted)
        mask = jnp.broadcast_to(in_row, total.shape)
        mask = mask & jnp.broadcast_to(counts[:, None], total.shape)
        rows = partial_ref.at[pl.ds(group * pieces + first, depth), columns]
        return total + plgpu.load(rows, mask=mask, other=0.0)

    def add_together(n: Any, total: jax.Array) -> jax.Array:
        # Loads of one iteration are under way at the same time.
        for offset in range(0, min(pieces, _TOGETHER * depth), depth):
            total = add(total, n * _TOGETHER * depth + offset)
        return total

    rounds = pl.cdiv(pieces, _TOGETHER * depth)
    total = lax.fori_loop(0, rounds, add_together, jnp.zeros((depth, tile), jnp.float32))
    out = out_ref.at[pl.ds(pl.program_id(0), 1), columns]
    plgpu.store(out, jnp.sum(total, axis=0)[None, :], mask=in_row)


class _Cut(NamedTuple):
    """How rows are cut: a grid or a table of pieces, and how many pieces each batch row has."""

    grid: Grid | None
    table: Pieces | None
    per_row: int

    @classmethod
    def of(cls, h: jax.Array, scale: jax.Array, ids: Any, options: Options, blocks: Blocks) -> Any:
        if options.layout == "segment":
            table, per_row = segment_pieces(ids, scale.shape[1], options, blocks.programs)
            return cls(None, table, per_row)
        grid = even_grid(h.shape, options, blocks.programs)
        return cls(grid, None, grid.per_row)


def forward(
    operands: Operands, options: Options, blocks: Blocks, outputs: Sequence[str]
) -> list[jax.Array]:
    """Some of `out` and `h` [B, S, D] and `statistics` [B, S, 2]; no operand may be empty.

    `out` is the modulated value, `h` the residual sum (with y only), and `statistics` mean and
    1/deviation of each of h's (or x's) rows, float32. Nothing else is computed or written.
    """
    x, ids = operands.x, operands.segment_ids
    dtypes = {"out": options.out_dtype, "h": options.residual_dtype, "statistics": jnp.float32}
    rows = x.size // x.shape[-1]
    shapes = {
        name: jax.ShapeDtypeStruct((rows, 2 if name == "statistics" else x.shape[-1]), dtypes[name])
        for name in outputs
    }
    inputs = operands._asdict() | {"segment_ids": None}
    cut = _Cut.of(x, operands.scale, ids, options, blocks)
    name = FORWARD if "out" in outputs else STATISTICS
    result = _call(_forward_kernel, name, inputs, ids, shapes, options, blocks, cut)
    return [result[key].reshape(*x.shape[:-1], -1) for key in outputs]


def backward(
    saved: Saved, dh: jax.Array | None, dout: jax.Array, options: Options, blocks: Blocks
) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
    """Gradients of x, of y (None without), and of scale, shift and, where there is one, gate.

    Args:
      saved: by the forward.
      dh: [B, S, D] cotangent of h; None without y.
      dout: [B, S, D] cotangent of the modulated value.

    Returns:
      dx and dy [B, S, D]; the rest as one float32 array [K, *scale.shape], in the order scale,
      shift, gate, or in the layout "token" as K arrays of the operands' dtypes.
    """
    h, batch = saved.h, saved.h.shape[0]
    inputs = saved._asdict() | {"dout": dout, "dh": dh, "shift": None}
    ids = inputs.pop("segment_ids")
    inputs["kept"] = inputs.pop("statistics")
    cut = _Cut.of(h, saved.scale, ids, options, blocks)
    tables = {"scale": saved.scale, "shift": saved.shift}
    tables |= {} if saved.gate is None else {"gate": saved.gate}
    shape = (h.size // h.shape[-1], h.shape[-1])
    shapes = {"dx": jax.ShapeDtypeStruct(shape, options.x_dtype)}
    if dh is not None:
        shapes["dy"] = jax.ShapeDtypeStruct(shape, options.out_dtype)
    if options.layout == "token":
        for name, value in tables.items():
            shapes[f"d{name}"] = jax.ShapeDtypeStruct(shape, value.dtype)
    else:
        rows = len(tables) * batch * cut.per_row
        shapes["partial"] = jax.ShapeDtypeStruct((rows, shape[1]), jnp.float32)
    result = _call(_backward_kernel, BACKWARD, inputs, ids, shapes, options, blocks, cut)
    dx = result["dx"].reshape(h.shape)
    dy = result["dy"].reshape(h.shape) if "dy" in result else None
    if options.layout == "token":
        return dx, dy, [result[f"d{name}"].reshape(h.shape) for name in tables]
    sums = _reduce(result["partial"], batch, cut, saved.scale.shape, options)
    return dx, dy, sums.reshape(len(tables), *saved.scale.shape)


def _call(
    kernel: Callable[..., None],
    name: str,
    inputs: dict[str, jax.Array | None],
    ids: jax.Array | None,
    outputs: dict[str, jax.ShapeDtypeStruct],
    options: Options,
    blocks: Blocks,
    cut: _Cut,
) -> dict[str, jax.Array]:
    """Runs a kernel over all pieces; arrays go in and come out as [rows, D]."""
    arrays = {k: v.reshape(-1, v.shape[-1]) for k, v in inputs.items() if v is not None}
    programs = cut.per_row * (cut.grid.batch if cut.grid is not None else 1)
    if ids is not None and cut.table is not None:
        arrays |= {"ids": ids.reshape(-1), **cut.table._asdict()}
        programs = cut.table.start.size
    dim = next(iter(arrays.values())).shape[1]
    launch = _Launch((*arrays, *outputs), dim, options, blocks, cut.grid)
    results = pl.pallas_call(
        partial(kernel, launch=launch),
        out_shape=list(outputs.values()),
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=options.interpret,
        name=name,
    )(*arrays.values())
    return dict(zip(outputs, results, strict=True))


def _reduce(
    partial_sums: jax.Array, batch: int, cut: _Cut, table: tuple[int, ...], options: Options
) -> jax.Array:
    """Partial sums [K·B·P, D] → sums [K·B·M, D], float32, for tables [B, D] or [B, M, D]."""
    dim, tables = table[-1], math.prod(table[1:-1])
    rows = partial_sums.shape[0] // cut.per_row * tables
    depth, tile, num_warps = (256, 32, 8) if cut.per_row > 256 else (128, 32, 4)
    depth = min(depth, pl.next_power_of_2(cut.per_row))
    shape = {"batch": batch, "pieces": cut.per_row, "tables": tables}
    return pl.pallas_call(
        partial(_reduce_kernel, **shape, depth=depth, tile=tile),
        out_shape=jax.ShapeDtypeStruct((rows, dim), jnp.float32),
        grid=(rows, pl.cdiv(dim, tile)),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=options.interpret,
        name=REDUCE,
    )(partial_sums, *(() if cut.table is None else (cut.table.table_row,)))
