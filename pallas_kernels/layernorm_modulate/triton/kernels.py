"""What the kernels do with each row."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layernorm_modulate.triton.rows import Launch, Rows
from pallas_kernels.triton.tiles import (
    Tiles,
    row_sums,
    tile_map,
    where_valid,
    wide,
)


def forward_kernel(*refs: Any, launch: Launch) -> None:
    """x, [y, gate], scale, shift → whichever of h, statistics, out have a ref."""
    rows = Rows(launch, refs, ("x", "y"))
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
        if not {"out", "statistics"} & rows.ref.keys():
            return carry
        (total,) = row_sums(h)
        centred = rows.clear_beyond([part - total / dim for part in h])
        (squares,) = row_sums([part * part for part in centred])
        rstd = lax.rsqrt(squares / dim + eps)
        if "statistics" in rows.ref:
            for place, statistic in enumerate((total / dim, rstd)):
                where = rows.ref["statistics"].at[pl.ds(row, 1), pl.ds(place, 1)]
                plgpu.store(where, jnp.full((1, 1), statistic))
        if "out" not in rows.ref:
            return carry
        out = tile_map(
            lambda c, scale, shift: c * rstd * (1.0 + scale) + shift,
            centred,
            value["scale"],
            value["shift"],
        )
        if valid is not None:
            out = where_valid(valid, out)
        rows.store("out", row, out)
        return carry

    rows.walk(work, ())


def h_backward_kernel(*refs: Any, launch: Launch) -> None:
    """dh, y, gate → [dx], dy, gradient of the gate or its sums: where h alone was used."""
    rows = Rows(launch, refs, ("dh", "y"))

    def work(row: Any, value: dict[str, Tiles], valid: Any, total: Tiles) -> Any:
        dh = value["dh"]
        if "dx" in rows.ref:
            rows.store("dx", row, dh)
        rows.store("dy", row, tile_map(jnp.multiply, value["gate"], dh))
        grad = tile_map(jnp.multiply, dh, value["y"])
        if rows.per_token:
            rows.store("dgate", row, grad)
            return total
        return tile_map(jnp.add, total, grad)

    total = rows.walk(work, [] if rows.per_token else rows.zeros())
    if not rows.per_token:
        rows.store("partial", pl.program_id(0), total)


def backward_kernel(*refs: Any, launch: Launch) -> None:
    """h and its statistics, dout, [dh, y, gate], scale → dx, [dy], gradients of tables or sums."""
    rows = Rows(launch, refs, ("h", "dout", "dh", "y"))
    dim = launch.dim

    def work(row: Any, value: dict[str, Tiles], valid: Any, sums: dict[str, Tiles]) -> Any:
        gained = tile_map(lambda d, scale: d + d * scale, value["dout"], value["scale"])
        mean, rstd = value["saved_statistics"]
        normed = [(part - mean) * rstd for part in value["h"]]
        gains, products = row_sums(gained, tile_map(jnp.multiply, gained, normed))
        constant, slope = gains / dim * rstd, products / dim * rstd
        dh = tile_map(lambda g, n: (g * rstd - constant) - n * slope, gained, normed)
        grads = {"dscale": tile_map(jnp.multiply, value["dout"], normed), "dshift": value["dout"]}
        if "dh" in value:
            dh = tile_map(jnp.add, dh, value["dh"])
            gate = value.get("gate")
            if "dy" in rows.ref:
                rows.store("dy", row, dh if gate is None else tile_map(jnp.multiply, gate, dh))
            if gate is not None:
                grads["dgate"] = tile_map(jnp.multiply, dh, value["y"])
        rows.store("dx", row, dh)
        if rows.per_token:
            for name, grad in grads.items():
                rows.store(name, row, grad)
        return {name: tile_map(jnp.add, total, grads[name]) for name, total in sums.items()}

    tables = ["dscale", "dshift", *(["dgate"] if "gate" in launch.names else [])]
    summed = [] if rows.per_token else tables
    sums = rows.walk(work, {name: rows.zeros() for name in summed})
    for place, name in enumerate(summed):
        rows.store("partial", place * pl.num_programs(0) + pl.program_id(0), sums[name])
