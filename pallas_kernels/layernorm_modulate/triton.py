"""The Triton kernels of LayerNorm-Modulate, and their calls.

A program takes blocks of rows: consecutive rows that share one row of scale, shift and gate. It
keeps that row in registers and walks through its rows, loading each before it works on the one
before. In the backward it adds up the gradients of scale, shift and gate in float32 registers, tile
by tile along the width (AdaptiveLoad's kernel, arXiv 2605.17923, has a D-tile coalesced reduction),
and writes them once; `pallas_kernels/triton_tiles.py` adds the programs' partial rows in a fixed
order. Nothing is atomic, so that equal inputs give equal bits.

The backward takes mean and 1/deviation of each row from the forward, eight bytes a row: on an
H200 that was faster than computing them again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jaxtyping import PyTree

from pallas_kernels.layernorm_modulate.operands import (
    Gradients,
    NormOperands,
    NormOptions,
    NormResiduals,
)
from pallas_kernels.layernorm_modulate.row_blocks import (
    IMPOSSIBLE,
    PADDING,
    EvenRowBlocks,
    RowBlock,
    Walks,
    backward_arrays,
    for_each_row_block,
    gradients,
    row_blocks_of,
    table_sums,
)
from pallas_kernels.layernorm_modulate.tuning import Division
from pallas_kernels.op import Ref
from pallas_kernels.triton_tiles import Tile, split_width, wide

Tiles = list[jax.Array]
"""A row: [1, width] for each of its tiles."""
Refs = dict[str, Ref]
Values = dict[str, Tiles]
"""Parts of a row, by name."""


@dataclass(frozen=True)
class NormLaunch:
    """What is static in a kernel.

    Attributes:
      dim: width of a row.
      options: of the call.
      blocks: how it works through its rows.
      even: where row blocks lie; None if refs say (`Walks.refs`).
      row_blocks: how many there are.
    """

    dim: int
    options: NormOptions
    blocks: Division
    even: EvenRowBlocks | None
    row_blocks: int


class Rows:
    """The rows of a row block, as a kernel's body sees them."""

    def __init__(self, block: RowBlock, launch: NormLaunch, ref: Refs, streams: Sequence[str]):
        """`streams` are loaded row by row; tables too, if each token has a row of its own."""
        self.ref, self.launch, self.block = ref, launch, block
        self.tiles = split_width(launch.dim, launch.blocks.max_tile, launch.blocks.equal_tiles)
        self.per_token = launch.options.layout == "token"
        tables: list[str] = [name for name in ("scale", "shift", "gate") if name in self.ref]
        self.streams = [name for name in streams if name in self.ref]
        self.streams += tables if self.per_token else []
        self.tables = [] if self.per_token else tables
        self.in_registers = self._load_tables() if launch.blocks.keep_in_registers else None

    def walk(
        self,
        work: Callable[[jax.Array, Values, PyTree], PyTree],
        carry: PyTree,
        written: Sequence[str],
    ) -> PyTree:
        """Runs `work(row, loaded, carry)` on every row; in padding, writes zeros alone."""
        start, count = self.block.start, self.block.stop - self.block.start
        if self.launch.even is None:
            padding = jnp.where(self.block.table_row == PADDING, count, 0)
            count -= padding

            def clear(index: jax.Array, _: None) -> None:
                for name in written:
                    self.store(name, start + index, self.zeros())

            lax.fori_loop(0, padding, clear, None)

        def fetch(index: jax.Array | int) -> Values:
            # Beyond the last row that row is fetched again; the result is unused.
            row = jnp.maximum(jnp.minimum(start + index, self.block.stop - 1), 0)
            loaded = {name: self.load(name, row) for name in self.streams}
            if "saved_statistics" in self.ref:
                loaded["saved_statistics"] = [
                    plgpu.load(self.ref["saved_statistics"].at[pl.ds(row, 1), pl.ds(n, 1)])
                    for n in (0, 1)
                ]
            return loaded

        def consume(index: jax.Array, fetched: Values, carry: PyTree) -> PyTree:
            values = {name: wide(row) for name, row in fetched.items()}
            values |= self._load_tables() if self.in_registers is None else self.in_registers
            return work(start + index, values, carry)

        if not self.launch.blocks.prefetch:
            return lax.fori_loop(0, count, lambda n, c: consume(n, fetch(n), c), carry)

        def body(index: jax.Array, state: PyTree) -> PyTree:
            fetched, carry = state
            following = fetch(index + 1)
            return following, consume(index, fetched, carry)

        return lax.fori_loop(0, count, body, (fetch(0), carry))[1]

    def load(self, name: str, row: jax.Array) -> Tiles:
        """A row of a named ref, in its dtype; 0 beyond its end."""
        ref = self.ref[name]
        return [
            plgpu.load(_at(ref, row, tile), mask=self._columns(tile), other=0.0)
            if tile.ragged
            else plgpu.load(_at(ref, row, tile))
            for tile in self.tiles
        ]

    def store(self, name: str, row: jax.Array, values: Tiles) -> None:
        """Rounds a row to a named ref's dtype and writes it."""
        ref = self.ref[name]
        for tile, value in zip(self.tiles, values, strict=True):
            mask = self._columns(tile) if tile.ragged else None
            plgpu.store(_at(ref, row, tile), value.astype(ref.dtype), mask=mask)

    def clear_beyond(self, values: Tiles) -> Tiles:
        """Zeroes what lies beyond the row's end."""
        return [
            jnp.where(self._columns(tile), value, 0.0) if tile.ragged else value
            for tile, value in zip(self.tiles, values, strict=True)
        ]

    def _columns(self, tile: Tile) -> jax.Array:
        """[1, width] bool: which columns exist."""
        return (tile.offset + jnp.arange(tile.width) < self.launch.dim)[None, :]

    def zeros(self) -> Tiles:
        """A float32 row of zeros."""
        return [jnp.zeros((1, tile.width), jnp.float32) for tile in self.tiles]

    def _load_tables(self) -> Values:
        """Scale, shift and gate of the row block; NaN where no table row can serve it."""
        row = jnp.maximum(self.block.table_row, 0)
        loaded = {name: wide(self.load(name, row)) for name in self.tables}
        if self.launch.even is None:
            poison = jnp.where(
                self.block.table_row == IMPOSSIBLE, jnp.float32(jnp.nan), jnp.float32(0)
            )
            for name in loaded:  # in one order, so that all processes compile the same
                if name != "shift":
                    loaded[name] = [tile + poison for tile in loaded[name]]
        return loaded


def _at(ref: Ref, row: jax.Array, tile: Tile) -> Ref:
    if not tile.ragged:
        return ref.at[pl.ds(row, 1), pl.ds(tile.offset, tile.width)]
    # A slice may not leave the array; single indices may, where a mask covers them.
    columns = tile.offset + jnp.arange(tile.width)[None, :]
    rows = jnp.broadcast_to(row + jnp.arange(1)[:, None], columns.shape)
    return ref.at[rows, columns]


def _tile_map(function: Callable[..., jax.Array], *rows: Tiles) -> Tiles:
    """Applies a function to the tiles of rows."""
    return [function(*parts) for parts in zip(*rows, strict=True)]


def _row_sums(*rows: Tiles) -> list[jax.Array]:
    """The sum over each row's elements, float32 scalars, all in one reduction across threads.

    Tiles of equal width are added first; then the rows' sums are taken as those of one [n, width]
    block, because each reduction of its own would make the program's warps wait for each other.
    """
    count = len(rows)
    index = jnp.arange(pl.next_power_of_2(count))
    total: jax.Array | float = 0.0
    for width in sorted({tile.shape[1] for tile in rows[0]}):
        added = [sum(tile for tile in row if tile.shape[1] == width) for row in rows]
        block = jnp.broadcast_to(added[0], (index.size, width))
        for n in range(1, count):
            here = jnp.broadcast_to(added[n], block.shape)
            block = jnp.where(index[:, None] == n, here, block)
        total = total + jnp.sum(block, axis=1)
    return [jnp.sum(jnp.where(index == n, total, 0.0)) for n in range(count)]


def forward_block(block: RowBlock, launch: NormLaunch, ref: Refs) -> None:
    """x, [y, gate], scale, shift → whichever of h, statistics, out have a ref."""
    rows = Rows(block, launch, ref, ("x", "y"))
    dim, eps = launch.dim, launch.options.eps

    def work(row: jax.Array, value: Values, carry: PyTree) -> PyTree:
        h = value["x"]
        if "y" in value:
            y = value["y"]
            y = _tile_map(jnp.multiply, value["gate"], y) if "gate" in value else y
            h = [part.astype(launch.options.residual_dtype) for part in _tile_map(jnp.add, h, y)]
            if "h" in ref:
                rows.store("h", row, h)
            h = wide(h)
        if not {"out", "statistics"} & ref.keys():
            return carry
        (total,) = _row_sums(h)
        centred = rows.clear_beyond([part - total / dim for part in h])
        (squares,) = _row_sums([part * part for part in centred])
        rstd = lax.rsqrt(squares / dim + eps)
        if "statistics" in ref:
            for n, statistic in enumerate((total / dim, rstd)):
                where = ref["statistics"].at[pl.ds(row, 1), pl.ds(n, 1)]
                plgpu.store(where, jnp.full((1, 1), statistic))
        if "out" not in ref:
            return carry
        out = _tile_map(
            lambda c, scale, shift: c * rstd * (1.0 + scale) + shift,
            centred,
            value["scale"],
            value["shift"],
        )
        rows.store("out", row, out)
        return carry

    rows.walk(work, (), [name for name in ("h", "out") if name in ref])


def h_backward_block(block: RowBlock, launch: NormLaunch, ref: Refs) -> None:
    """dh, y, gate → [dx], dy, gradient of the gate or its sums: where h alone was used."""
    rows = Rows(block, launch, ref, ("dh", "y"))

    def work(row: jax.Array, value: Values, total: Tiles) -> Tiles:
        dh = value["dh"]
        if "dx" in ref:
            rows.store("dx", row, dh)
        rows.store("dy", row, _tile_map(jnp.multiply, value["gate"], dh))
        grad = _tile_map(jnp.multiply, dh, value["y"])
        if rows.per_token:
            rows.store("dgate", row, grad)
            return total
        return _tile_map(jnp.add, total, grad)

    written = [name for name in ("dx", "dy") if name in ref]
    total = rows.walk(work, [] if rows.per_token else rows.zeros(), written)
    if not rows.per_token:
        rows.store("partial", block.number, total)


def backward_block(block: RowBlock, launch: NormLaunch, ref: Refs) -> None:
    """h and its statistics, dout, [dh, y, gate], scale → dx, [dy], gradients of tables or sums."""
    rows = Rows(block, launch, ref, ("h", "dout", "dh", "y"))
    dim = launch.dim

    def work(row: jax.Array, value: Values, sums: Values) -> Values:
        scaled_grad = _tile_map(lambda d, scale: d + d * scale, value["dout"], value["scale"])
        mean, rstd = value["saved_statistics"]
        normed = [(part - mean) * rstd for part in value["h"]]
        gains, products = _row_sums(scaled_grad, _tile_map(jnp.multiply, scaled_grad, normed))
        mean_grad, variance_grad = gains / dim * rstd, products / dim * rstd
        dh = _tile_map(lambda g, n: (g * rstd - mean_grad) - n * variance_grad, scaled_grad, normed)
        grads = {"dscale": _tile_map(jnp.multiply, value["dout"], normed), "dshift": value["dout"]}
        if "dh" in value:
            dh = _tile_map(jnp.add, dh, value["dh"])
            gate = value.get("gate")
            if "dy" in ref:
                rows.store("dy", row, dh if gate is None else _tile_map(jnp.multiply, gate, dh))
            if gate is not None:
                grads["dgate"] = _tile_map(jnp.multiply, dh, value["y"])
        rows.store("dx", row, dh)
        if rows.per_token:
            for name, grad in grads.items():
                rows.store(name, row, grad)
        return {name: _tile_map(jnp.add, total, grads[name]) for name, total in sums.items()}

    tables = ["dscale", "dshift", *(["dgate"] if "gate" in ref else [])]
    summed = [] if rows.per_token else tables
    written = [name for name in ("dx", "dy") if name in ref]
    sums = rows.walk(work, {name: rows.zeros() for name in summed}, written)
    for n, name in enumerate(summed):
        rows.store("partial", n * launch.row_blocks + block.number, sums[name])


FORWARD, STATISTICS, BACKWARD, H_BACKWARD, REDUCE = (
    f"layernorm_modulate_{part}"
    for part in ("forward", "statistics", "backward", "h_backward", "reduce")
)
"""Names of the kernels, as profilers and lowered modules show them."""


def compute_forward(
    operands: NormOperands, options: NormOptions, blocks: Division, outputs: Sequence[str]
) -> list[jax.Array]:
    """Some of `out` and `h` [B, S, D] and `statistics` [B, S, 2]; no operand may be empty.

    `out` is the modulated value, `h` the residual sum (with y only), and `statistics` mean and
    1/deviation of each of h's (or x's) rows, float32. Nothing else is computed or written.
    """
    x = operands.x
    dtypes = {"out": options.out_dtype, "h": options.residual_dtype, "statistics": jnp.float32}
    rows = x.size // x.shape[-1]
    shapes = {
        name: jax.ShapeDtypeStruct((rows, 2 if name == "statistics" else x.shape[-1]), dtypes[name])
        for name in outputs
    }
    inputs = operands._asdict() | {"segment_ids": None, "prepared": None}
    row_blocks = row_blocks_of(operands, options, blocks.per_core)
    name = STATISTICS if "statistics" in outputs and "out" not in outputs else FORWARD
    result = _call(forward_block, name, inputs, shapes, options, blocks, row_blocks)
    return [result[key].reshape(*x.shape[:-1], -1) for key in outputs]


def backward(
    residuals: NormResiduals,
    dh: jax.Array | None,
    dout: jax.Array | None,
    options: NormOptions,
    blocks: Division,
) -> Gradients:
    """Gradients of x, of y (None without), and of scale, shift and, where there is one, gate.

    Args:
      residuals: of the forward.
      dh: [B, S, D] cotangent of h; None without y.
      dout: [B, S, D] cotangent of the modulated value; None where it was not used.
    """
    if dout is None:
        assert dh is not None
        return _h_backward(residuals, dh, options, blocks)
    row_blocks = row_blocks_of(residuals, options, blocks.per_core)
    inputs, outputs = backward_arrays(residuals, dh, dout, options, row_blocks)
    result = _call(backward_block, BACKWARD, inputs, outputs, options, blocks, row_blocks)
    return gradients(result, residuals, dh, options, row_blocks, REDUCE)


def _h_backward(
    residuals: NormResiduals, dh: jax.Array, options: NormOptions, blocks: Division
) -> Gradients:
    """`backward` of h = x + gate·y alone."""
    zeros = [jnp.zeros(residuals.scale.shape, jnp.float32)] * 2
    if residuals.gate is None:
        inside = True if residuals.segment_ids is None else residuals.segment_ids[..., None] >= 0
        dsum = jnp.where(inside, dh, jnp.zeros((), dh.dtype))
        tables = zeros if options.layout == "token" else jnp.stack(zeros)
        return dsum.astype(options.x_dtype), dsum.astype(options.out_dtype), tables
    shape = (dh.size // dh.shape[-1], dh.shape[-1])
    row_blocks = row_blocks_of(residuals, options, blocks.per_core)
    shapes = {"dy": jax.ShapeDtypeStruct(shape, options.out_dtype)}
    if residuals.segment_ids is not None:
        # Padding's gradient is zero. Elsewhere that of x is dh itself.
        shapes["dx"] = jax.ShapeDtypeStruct(shape, options.x_dtype)
    if options.layout == "token":
        shapes["dgate"] = jax.ShapeDtypeStruct(shape, residuals.gate.dtype)
    else:
        shapes["partial"] = jax.ShapeDtypeStruct(
            (dh.shape[0] * row_blocks.per_row, shape[1]), jnp.float32
        )
    inputs = {"dh": dh, "y": residuals.y, "gate": residuals.gate}
    result = _call(h_backward_block, H_BACKWARD, inputs, shapes, options, blocks, row_blocks)
    dx = result["dx"].reshape(dh.shape) if "dx" in result else dh.astype(options.x_dtype)
    dy = result["dy"].reshape(dh.shape)
    if options.layout == "token":
        return dx, dy, [*zeros, result["dgate"].reshape(dh.shape)]
    total = table_sums(result["partial"], row_blocks, residuals.gate.shape, options, REDUCE)
    return dx, dy, jnp.stack([*zeros, total.reshape(residuals.gate.shape)])


def _call(
    work: Callable[..., None],
    name: str,
    inputs: dict[str, jax.Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    options: NormOptions,
    blocks: Division,
    row_blocks: EvenRowBlocks | Walks,
) -> dict[str, jax.Array]:
    """Runs work(block, launch, refs by name) on all row blocks; arrays are [rows, D] there."""
    arrays = {k: v.reshape(-1, v.shape[-1]) for k, v in inputs.items() if v is not None}
    dim = next(iter(arrays.values())).shape[1]
    if isinstance(row_blocks, Walks):
        arrays |= row_blocks.refs()
    even = row_blocks if isinstance(row_blocks, EvenRowBlocks) else None
    launch = NormLaunch(dim, options, blocks, even, row_blocks.total)
    names = (*arrays, *outputs)

    def kernel(*refs: Ref) -> None:
        ref: Refs = dict(zip(names, refs, strict=True))
        one = partial(work, launch=launch, ref=ref)
        for_each_row_block(even, ref, pl.program_id(0), one)

    results = pl.pallas_call(
        kernel,
        out_shape=list(outputs.values()),
        grid=(row_blocks.programs,),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=options.interpret,
        name=name,
    )(*arrays.values())
    return dict(zip(outputs, results, strict=True))


# ---------------------------------------------------------------- the forward as a primitive

# Reverse-mode differentiation keeps each row's statistics for the backward. Where `jax.checkpoint`
# keeps the modulated value under a name of the user's and nothing else, what is missing later is
# the statistics alone: a JAX primitive that does only what is asked of it then computes those,
# which reads x and writes nothing more, rather than the whole forward a second time. The rule
# `_keep_used` tells JAX so; everything else about the primitive is its implementation's.

_forward_p = Primitive("layernorm_modulate_forward")
_forward_p.multiple_results = True


def forward(
    operands: NormOperands, options: NormOptions, blocks: Division, *, statistics: bool
) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
    """h (None without y) and the modulated value [B, S, D], and statistics [B, S, 2] if wanted."""
    outputs = ("out", *(["h"] if operands.y is not None else []))
    outputs += ("statistics",) if statistics else ()
    leaves, tree = jax.tree.flatten(operands)
    results = _forward_p.bind(*leaves, tree=tree, options=options, blocks=blocks, outputs=outputs)
    named = dict(zip(outputs, results, strict=True))
    return named.get("h"), named["out"], named.get("statistics")


def _run(
    *leaves: jax.Array,
    tree: jax.tree_util.PyTreeDef,
    options: NormOptions,
    blocks: Division,
    outputs: Sequence[str],
) -> list[jax.Array]:
    return compute_forward(jax.tree.unflatten(tree, leaves), options, blocks, outputs)


def _abstract(*avals: ShapedArray, **params: PyTree) -> list[ShapedArray]:
    inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    results = jax.eval_shape(partial(_run, **params), *inputs)
    return [ShapedArray(result.shape, result.dtype) for result in results]


def _batch(
    arguments: Sequence[jax.Array], axes: Sequence[int | None], **params: PyTree
) -> tuple[list[jax.Array], list[int]]:
    results = jax.vmap(partial(_run, **params), in_axes=axes)(*arguments)
    return results, [0] * len(results)


def _keep_used(used: list[bool], *given: PyTree) -> tuple[list[bool], JaxprEqn | None]:
    """The equation with the outputs that something needs; none at all if nothing does."""
    eqn = given[-1]  # JAX 0.12 also says which inputs are read later
    if not any(used):
        return [False] * len(eqn.invars), None
    outputs = [name for name, wanted in zip(eqn.params["outputs"], used, strict=True) if wanted]
    variables = [variable for variable, wanted in zip(eqn.outvars, used, strict=True) if wanted]
    params = eqn.params | {"outputs": tuple(outputs)}
    return [True] * len(eqn.invars), eqn.replace(outvars=variables, params=params)


def _refuse_jvp(*_: PyTree, **__: PyTree) -> None:
    raise NotImplementedError(
        "layernorm_modulate: the Triton kernels differentiate once, in reverse mode; "
        "use implementation='xla' for second derivatives"
    )


_forward_p.def_impl(lambda *leaves, **params: jax.jit(partial(_run, **params))(*leaves))
_forward_p.def_abstract_eval(_abstract)
mlir.register_lowering(_forward_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[_forward_p] = _batch
pe.dce_rules[_forward_p] = _keep_used
ad.primitive_jvps[_forward_p] = _refuse_jvp
