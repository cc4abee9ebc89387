"""The Mosaic GPU kernels of RMSNorm with rotary embedding, and their calls.

A program walks through consecutive tokens; its groups of threads have columns each, and exchange
sums over a token's channels. Channel pairs lie in one thread. The backward computes the statistics
again from x, which it reads anyway. Each group adds up its part of the weight's gradient in
registers, and XLA adds the programs' parts. Nothing is atomic: equal inputs give equal bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.extend.mlir.dialects import vector
from jaxtyping import PyTree

from pallas_kernels.mosaic_rows import (
    WARPS,
    Piece,
    Refs,
    RowRing,
    Values,
    begun_ring,
    columns_of,
    even_rows,
    in_chunks,
    layout_of,
    load,
    ring_scratch,
    row_sums,
    run_walks,
    sums_scratch,
)
from pallas_kernels.rms_norm_rotary.api import (
    BACKWARD_PACE,
    FORWARD_PACE,
    RmsNormOperands,
    RmsNormOptions,
    heads_shape,
    way_for,
)
from pallas_kernels.walks import Pace, chunks_of

_THREADS_OF_WARP = 32
Angles = tuple[jax.Array, jax.Array]
"""cos and sin of a token as a thread needs them for each piece of its columns."""


@dataclass(frozen=True)
class MosaicRmsNormLaunch:
    """What is static in a kernel.

    Attributes:
      dim: channels of a token.
      options: of the call.
      groups: of threads of a program.
      programs: how many there are.
    """

    dim: int
    options: RmsNormOptions
    groups: int
    programs: int

    def means(
        self, ref: Refs, row: jax.Array, group: jax.Array, terms: Sequence[tuple[Piece, *Values]]
    ) -> list[list[jax.Array]]:
        """Of each piece's values, the means over what has statistics of its own."""
        if not self.options.per_head:
            totals = row_sums(ref, lax.rem(row, jnp.int32(2)), group, terms)
            return [[total / self.dim for total in totals]] * len(terms)
        return [[self._of_head(piece, value) for value in values] for piece, *values in terms]

    def _of_head(self, piece: Piece, value: jax.Array) -> jax.Array:
        # Each warp has a head.
        mean = value.sum(axis=1) / self.options.head_dim
        wide = lax.broadcast_in_dim(mean, value.shape, (0,))
        return plgpu.layout_cast(wide, layout_of(piece.chunks))

    def angles(self, slot: Refs, chunks: int, sign: float = 1.0) -> Angles | None:
        """For pieces of some chunks; all begin with a head."""
        if "cos" not in slot:
            return None
        layout = _layout_of_pairs(chunks, self.options.head_dim)
        cos, sin = (load(slot[name], layout) for name in ("cos", "sin"))
        return cos, sign * sin

    def turned(self, value: jax.Array, piece: Piece, angles: Angles | None) -> jax.Array:
        """Channel pairs (2i, 2i + 1) turned by angle i."""
        if angles is None:
            return value
        return _rotate(piece.chunks, self.options.head_dim)(value, *angles)


def _layout_of_pairs(chunks: int, head_dim: int) -> PyTree:
    """Of [head_dim // 2]: a thread has the pairs of its columns of a piece."""
    each, pairs = chunks // 2, head_dim // 2
    of_warp = _THREADS_OF_WARP * each
    if pairs >= of_warp:
        warps = pairs // of_warp
        tiling = plgpu.Tiling(((pairs,), (of_warp,), (each,)) if warps > 1 else ((pairs,), (each,)))
        own = (plgpu.Replicated(WARPS // warps), *((-3,) if warps > 1 else ()))
        return plgpu.Layout.TILED(tiling, warp_dims=own, lane_dims=(-2,), vector_dim=-1)
    lanes = (plgpu.Replicated(of_warp // pairs), -2)
    tiling = plgpu.Tiling(((pairs,), (each,)))
    own = (plgpu.Replicated(WARPS),)
    return plgpu.Layout.TILED(tiling, warp_dims=own, lane_dims=lanes, vector_dim=-1)


def _rotate(chunks: int, head_dim: int) -> PyTree:
    """(piece, cos, sin) → the piece, turned; Pallas cannot take the channels of a pair apart."""
    pairs, columns = _layout_of_pairs(chunks, head_dim), layout_of(chunks)
    shape = (WARPS, _THREADS_OF_WARP * chunks)
    both = [n // 2 for n in range(chunks)]
    # Of the channels and the negated ones behind them: −x₁ stands beside x₀, and x₀ beside x₁.
    other = [(n ^ 1) + (0 if n % 2 else chunks) for n in range(chunks)]

    @plgpu.inline_mgpu(
        arg_types=(columns, pairs, pairs),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=columns),
    )
    def rotate(
        ctx: PyTree, x: FragmentedArray, cos: FragmentedArray, sin: FragmentedArray
    ) -> FragmentedArray:
        del ctx

        def shuffled(
            one: FragmentedArray, another: FragmentedArray, order: list[int]
        ) -> FragmentedArray:
            register = vector.shuffle(one.registers.item(), another.registers.item(), order)
            registers = np.full(x.registers.shape, register, object)
            return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

        turned = shuffled(x, 0.0 - x, other) * shuffled(sin, sin, both)
        return x * shuffled(cos, cos, both) + turned

    return rotate


def kernel(ref: Refs, launch: MosaicRmsNormLaunch) -> None:
    """x, weight, [cos, sin] → normed and rotated; or with `dout` → dx, sums of the vectors'."""
    program, group = lax.axis_index("program"), lax.axis_index("group")
    streams = [name for name in ("x", "dout") if name in ref]
    tables = [name for name in ("cos", "sin") if name in ref]
    # JAX makes one load of the angles for pieces of two sizes, and finds no layout for it.
    columns = columns_of(launch.dim, launch.groups, group, alike=bool(tables))
    pieces = columns.pieces
    rows = even_rows(program, len(ref["x"]), launch.programs)
    ring = begun_ring(ref, streams, group, columns, rows, tables)
    weight = columns.of(ref["weight"], 0)
    weights = [piece.load(weight, optimized=False) for piece in pieces]
    if "dout" not in ref:
        forward_rows(launch, ref, ring, group, weights)
    else:
        backward_rows(launch, ref, ring, group, weights, program)
    plgpu.wait_smem_to_gmem(0)


def forward_rows(
    launch: MosaicRmsNormLaunch,
    ref: Refs,
    ring: RowRing,
    group: jax.Array,
    weights: list[jax.Array],
) -> None:
    """Norms and rotates tokens."""
    pieces = ring.columns.pieces

    def work(row: jax.Array, _: None) -> None:
        slot = ring.wait(row)
        x = [piece.load(slot["x"]) for piece in pieces]
        squares = [(piece, part * part) for piece, part in zip(pieces, x, strict=True)]
        means = launch.means(ref, row, group, squares)
        ring.fetch_last(row)
        angles = launch.angles(slot, pieces[0].chunks)
        for piece, part, of_piece, (mean,) in zip(pieces, x, weights, means, strict=True):
            normed = part * lax.rsqrt(mean + launch.options.eps) * of_piece
            piece.store(slot["x"], launch.turned(normed, piece, angles))
        ring.write(row, {"x": ref["out"]})

    lax.fori_loop(ring.start, ring.stop, work, None)


def backward_rows(
    launch: MosaicRmsNormLaunch,
    ref: Refs,
    ring: RowRing,
    group: jax.Array,
    weights: list[jax.Array],
    program: jax.Array,
) -> None:
    """Gradients of tokens, and their sums for the weight and, if there is one, the bias."""
    pieces, vectors = ring.columns.pieces, ref["partial"].shape[0] // launch.programs

    def work(row: jax.Array, sums: list[list[jax.Array]]) -> list[list[jax.Array]]:
        slot = ring.wait(row)
        angles = launch.angles(slot, pieces[0].chunks, -1.0)
        x = [piece.load(slot["x"]) for piece in pieces]
        grad = [launch.turned(piece.load(slot["dout"]), piece, angles) for piece in pieces]
        each = list(zip(pieces, x, grad, weights, strict=True))
        terms = [(piece, part * part, g * w * part) for piece, part, g, w in each]
        means = launch.means(ref, row, group, terms)
        ring.fetch_last(row)
        more = []
        for (piece, part, g, w), (square, product), total in zip(each, means, sums, strict=True):
            rstd = lax.rsqrt(square + launch.options.eps)
            normed = part * rstd
            dx = (g * w - normed * (product * rstd)) * rstd
            piece.store(slot["dout"], dx)
            more.append([a + b for a, b in zip(total, (g * normed, dx), strict=False)])
        ring.write(row, {"dout": ref["dx"]})
        return more

    zeros = [[piece.zeros()] * vectors for piece in pieces]
    sums = lax.fori_loop(ring.start, ring.stop, work, zeros)
    for place in range(vectors):
        into = ring.columns.of(ref["partial"], place * launch.programs + program)
        for piece, total in zip(pieces, sums, strict=True):
            piece.store(into, total[place])


FORWARD, BACKWARD = "rms_norm_rotary_mosaic_forward", "rms_norm_rotary_mosaic_backward"
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(operands: RmsNormOperands, options: RmsNormOptions) -> jax.Array:
    """[B, S, D // head_dim, head_dim]."""
    (out,) = call(FORWARD, operands, None, options, FORWARD_PACE)
    return out.reshape(heads_shape(operands.x, options))


def backward(
    operands: RmsNormOperands, cotangent: jax.Array, options: RmsNormOptions
) -> tuple[jax.Array, ...]:
    """Gradients of x, in its dtype, and of the weight and the bias, if there is one, float32."""
    x = operands.x
    given = cotangent.reshape(x.shape)
    dx, partial_sums = call(BACKWARD, operands, given, options, BACKWARD_PACE)
    vectors = 1 if operands.bias is None else 2
    dweight, *dbias = partial_sums.reshape(vectors, -1, x.shape[-1]).sum(axis=1)
    if options.per_head:
        dweight = dweight.reshape(-1, options.head_dim).sum(axis=0)
    return dx.reshape(x.shape), dweight, *dbias


def call(
    name: str,
    operands: RmsNormOperands,
    cotangent: jax.Array | None,
    options: RmsNormOptions,
    pace: Pace,
) -> list[jax.Array]:
    """The output like x in chunks; or the gradient of x, and each program's sums."""
    x, dim = in_chunks(operands.x), operands.x.shape[-1]
    streams = {"x": x} | ({} if cotangent is None else {"dout": in_chunks(cotangent)})
    way = way_for(dim, options, x.dtype.itemsize * len(streams), pace)
    assert way is not None
    programs = max(1, min(len(x), way.programs))
    named = {"cos": operands.cos, "sin": operands.sin}
    tables = {k: v.reshape(-1, v.shape[-1]) for k, v in named.items() if v is not None}
    weight = jnp.tile(operands.weight, dim // operands.weight.size)
    outputs = {"out" if cotangent is None else "dx": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    if cotangent is not None:
        rows = programs * (1 if operands.bias is None else 2)
        outputs["partial"] = jax.ShapeDtypeStruct((rows, *x.shape[1:]), jnp.float32)
    scratch = ring_scratch(streams, way.groups, chunks_of(dim, way.groups), way.slots, tables)
    if not options.per_head:
        scratch |= sums_scratch(way.groups)
    inputs = {**streams, "weight": in_chunks(weight), **tables}
    static = {"launch": MosaicRmsNormLaunch(dim, options, way.groups, programs)}
    found = run_walks(kernel, name, static, programs, way.groups, inputs, outputs, scratch)
    return list(found.values())
