"""What the backward kernel does with each row."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layernorm_modulate.mosaic.columns import Columns, Piece, columns_of
from pallas_kernels.layernorm_modulate.mosaic.rows import Launch, Refs, Ring, RowBlock
from pallas_kernels.layernorm_modulate.row_blocks import IMPOSSIBLE

STREAMS = ("h", "dout", "dh", "y")
"""Loaded row by row."""
WRITTEN = {"dx": "h", "dy": "dout"}
"""Outputs, and the streams in whose place they are written: dtypes are equal."""

Sums = list[dict[str, jax.Array]]
"""For each piece of a group's columns, the sums over rows that tables' gradients are."""


def backward_kernel(*refs: Any, launch: Launch) -> None:
    """h and its statistics, dout, [dh, y, gate], scale → dx, [dy], sums of tables' gradients."""
    ref: Refs = dict(zip(launch.names, refs, strict=True))
    program, group = lax.axis_index("program"), lax.axis_index("group")
    start, stop = launch.rows(ref, program)
    columns = columns_of(launch.dim, launch.way.groups, group)
    streams = [name for name in STREAMS if name in ref]
    ring = Ring(
        {name: ref[name] for name in streams},
        {name: ref[f"{name}_slots"].at[group] for name in streams},
        ref["arrived"].at[group],
        *(columns, start, stop, launch.way.slots),
    )
    ring.begin()
    launch.for_each(ref, program, lambda block: _walk(block, launch, ref, ring, group))
    plgpu.wait_smem_to_gmem(0)


def _walk(block: RowBlock, launch: Launch, ref: Refs, ring: Ring, group: Any) -> None:
    """Works on a row block, and writes the sums over its rows."""
    columns, written = ring.columns, {name: WRITTEN[name] for name in WRITTEN if name in ref}
    tables = _tables(block, ref, columns)
    gated = "gate" in ref

    def work(row: Any, carry: tuple[Sums, Any]) -> tuple[Sums, Any]:
        sums, (mean, rstd, valid) = carry
        following = _scalars(ref, row + 1)
        slot = ring.wait(row)
        if valid is not None:
            _clear_unless(valid, slot, columns)

        def load(name: str, piece: Piece) -> jax.Array:
            return piece.load(slot[name])

        def inner(piece: Piece, table: Refs) -> tuple[jax.Array, jax.Array, jax.Array]:
            """dout, the normed row, and the gradient of the normed row."""
            dout = load("dout", piece)
            return dout, (load("h", piece) - mean) * rstd, dout * table["gain"]

        inners = zip(columns.pieces, tables, strict=True)
        terms = [(piece, *inner(piece, table)[1:]) for piece, table in inners]
        gains, products = _row_sums(ref, row, group, terms)
        constant, slope = gains / launch.dim * rstd, products / launch.dim * rstd
        ring.fetch_last(row)
        more = []
        for piece, table, total in zip(columns.pieces, tables, sums, strict=True):
            dout, normed, gained = inner(piece, table)
            dh = (gained * rstd - constant) - normed * slope
            grads = {"dscale": dout * normed, "dshift": dout}
            if "dh" in ref:
                dh = dh + load("dh", piece)
            if gated:
                grads["dgate"] = dh * load("y", piece)
            outputs = {"dx": dh, "dy": dh * table["gate"] if gated else dh}
            for name, stream in written.items():
                piece.store(slot[stream], outputs[name])
            more.append({name: total[name] + grad for name, grad in grads.items()})
        ring.write(row, list(written.values()), [ref[name] for name in written])
        return more, following

    names = ("dscale", "dshift", *(["dgate"] if gated else []))
    zeros = [{name: piece.zeros() for name in names} for piece in columns.pieces]
    sums, _ = lax.fori_loop(block.start, block.stop, work, (zeros, _scalars(ref, block.start)))
    for place, name in enumerate(names):
        into = columns.of(ref["partial"], place * launch.row_blocks + block.number)
        for piece, total in zip(columns.pieces, sums, strict=True):
            piece.store(into, total[name])


def _tables(block: RowBlock, ref: Refs, columns: Columns) -> list[Refs]:
    """1 + scale, and the gate, for each piece; NaN where no table row can serve the block."""
    row, poison = jnp.maximum(block.table_row, 0), None
    if "ids" in ref:
        poison = jnp.where(block.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), jnp.float32(0))

    def load(name: str, piece: Piece) -> jax.Array:
        value = piece.load(columns.of(ref[name], row), optimized=False)
        return value if poison is None else value + poison

    return [
        {"gain": load("scale", piece) + 1.0}
        | ({"gate": load("gate", piece)} if "gate" in ref else {})
        for piece in columns.pieces
    ]


def _scalars(ref: Refs, row: Any) -> tuple[Any, Any, Any]:
    """Mean, 1/deviation and whether it is valid, None for always, of a row or of the last row."""
    statistics = ref["saved_statistics"]
    row = jnp.minimum(row, statistics.shape[0] - 1)
    valid = ref["ids"][row] >= 0 if "ids" in ref else None
    return statistics[row, 0], statistics[row, 1], valid


def _clear_unless(valid: Any, slot: Refs, columns: Columns) -> None:
    """Zeroes a row of padding, which may be anything; each thread what it reads itself."""

    @pl.when(jnp.logical_not(valid))
    def _() -> None:
        for part in slot.values():
            for piece in columns.pieces:
                piece.store(part, piece.zeros())


def _row_sums(
    ref: Refs, row: Any, group: Any, terms: Sequence[tuple[Piece, Any, Any]]
) -> tuple[Any, Any]:
    """Over a whole row, the sums of the gradient of the normed row and of its product with that.

    Each warp adds up its part of the group's columns, and all threads then the warps' sums: in the
    same order everywhere, so that groups which share columns compute the same.

    `row_sums` [2, groups, 2, warps] and its two barriers are used in turn, so that no group writes
    what another has still to read.

    Args:
      ref: of the kernel.
      row: of the array.
      group: this one.
      terms: of each piece, the normed row and the gradient.
    """
    by_size: dict[int, list[Any]] = {}
    for piece, normed, gained in terms:
        if piece.counts is not None:
            gained = gained * piece.counts
        found = by_size.get(piece.chunks)
        product = gained * normed
        by_size[piece.chunks] = (
            [gained, product] if found is None else [found[0] + gained, found[1] + product]
        )
    sums_ref, turn = ref["row_sums"], lax.rem(row, jnp.int32(2))
    summed = ref["summed"].at[turn]
    for place in range(2):
        sums_ref[turn, group, place] = sum(each[place].sum(axis=1) for each in by_size.values())
    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)
    groups, warps = sums_ref.shape[1], sums_ref.shape[3]
    gains, products = (
        sum(sums_ref[turn, each, place, warp] for each in range(groups) for warp in range(warps))
        for place in range(2)
    )
    return gains, products
