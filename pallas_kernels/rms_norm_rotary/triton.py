"""The Triton kernels of RMSNorm with rotary embedding, and their calls.

A program takes a few tokens at a time, each in tiles along the width. Channel pairs lie side by
side in one thread, so that their rotation moves no data between threads. The backward computes the
statistics again from x, which it reads anyway; each program adds up the weight's gradient in
registers and writes it once, and another kernel adds the programs' rows in a fixed order. Nothing
is atomic, so that equal inputs give equal bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import PyTree

from pallas_kernels.op import Ref
from pallas_kernels.rms_norm_rotary.api import RmsNormOperands, RmsNormOptions, heads_shape
from pallas_kernels.triton_tiles import Blocks, Tile, reduce_partials, split_width, wide

_NARROW, _WIDE = 2048, 6144
"""Widths up to which the sums leave registers for four programs a core, and for four warps."""
_SUMS_BIAS = 1536
"""Width up to which the bias's sums leave registers for as many programs (114 at 1,536, by ptxas
for sm_90a). Where each head has statistics of its own they do not."""


def forward_blocks(dim: int, per_head: bool) -> Blocks:
    """For tokens of `dim` channels in the forward."""
    return Blocks(512, 2, 8) if per_head else Blocks(512, 1, 4 if dim <= _WIDE else 8)


def backward_blocks(dim: int, per_head: bool) -> Blocks:
    """For tokens of `dim` channels in the backward."""
    if per_head:
        return Blocks(512, 2, 8, 2)
    if dim > _WIDE:
        return Blocks(1024, 1, 8, 2)
    return Blocks(512, 1, 4, 4 if dim <= _NARROW else 2)


def sums_bias(dim: int, per_head: bool) -> bool:
    """Whether the backward adds up the bias's gradient itself, and does not leave it to XLA."""
    return dim <= _SUMS_BIAS and not per_head


Parts = list[jax.Array]
"""Some tokens: [tokens, width] for each tile of the width."""


class Angles(NamedTuple):
    """cos and sin of some tokens, [tokens, head_dim // 2] each."""

    cos: jax.Array
    sin: jax.Array

    def inverse(self) -> "Angles":
        """The rotation back."""
        return Angles(self.cos, -self.sin)


@dataclass(frozen=True)
class RmsNormLaunch:
    """What is static in a kernel.

    Attributes:
      tokens: all of them.
      dim: channels of each.
      options: of the call.
      blocks: how the kernel works through its tokens.
      programs: how many there are.
      table_tokens: rows of the rotary table, which token n reads at n modulo them; 0 without one.
    """

    tokens: int
    dim: int
    options: RmsNormOptions
    blocks: Blocks
    programs: int
    table_tokens: int

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Of the width."""
        widest = max(self.blocks.width, self.options.head_dim)
        return split_width(self.dim, widest, equal=True)

    @property
    def each(self) -> int:
        """Tokens of a program, a multiple of `blocks.tokens`."""
        steps = -(-self.tokens // (self.programs * self.blocks.tokens))
        return steps * self.blocks.tokens

    def load(self, ref: Ref, token: jax.Array, end: jax.Array | int) -> Parts:
        """Channels of the tokens before `end`, in the ref's dtype; 0 elsewhere."""
        return [self._load(ref, token, end, tile) for tile in self.tiles]

    def store(self, ref: Ref, token: jax.Array, end: jax.Array | int, parts: Parts) -> None:
        """Rounds to the ref's dtype and writes the tokens before `end`."""
        for tile, part in zip(self.tiles, parts, strict=True):
            where, mask = self._place(token, end, tile)
            plgpu.store(ref.at[where], part.astype(ref.dtype), mask=mask)

    def load_weight(self, ref: Ref) -> Parts:
        """[1, width] float32 of each tile."""
        parts = []
        for tile in self.tiles:
            column = tile.offset + jnp.arange(tile.width)
            mask = column < self.dim if tile.ragged else None
            column = column % self.options.head_dim if self.options.per_head else column
            other = 0.0 if tile.ragged else None
            loaded = plgpu.load(ref.at[jnp.zeros_like(column), column], mask=mask, other=other)
            parts.append(loaded.astype(jnp.float32)[None, :])
        return parts

    def load_angles(
        self, refs: tuple[Ref, ...], token: jax.Array, end: jax.Array | int
    ) -> Angles | None:
        """The rotation of the tokens; None without a table."""
        if not refs:
            return None
        pairs = jnp.arange(self.options.head_dim // 2)[None, :]
        shape = (self.blocks.tokens, pairs.size)
        row = token % self.table_tokens if self.table_tokens < self.tokens else token
        where = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(pairs, shape)
        mask = jnp.broadcast_to((token < end)[:, None], shape)
        return Angles(*(plgpu.load(ref.at[where], mask=mask, other=0.0) for ref in refs))

    def rotate(self, parts: Parts, angles: Angles | None) -> Parts:
        """Turns the channel pairs of every head."""
        return parts if angles is None else [self._rotate(part, angles) for part in parts]

    def mean(self, parts: Parts) -> Parts:
        """The mean over what has statistics of its own; each broadcasts against its part."""
        head_dim = self.options.head_dim
        if not self.options.per_head:
            total: PyTree = 0.0
            for width in sorted({tile.width for tile in self.tiles}):
                added = sum(part for part in parts if part.shape[1] == width)
                total = total + jnp.sum(added, axis=1)
            return [total[:, None] / self.dim] * len(parts)
        means = []
        for part in parts:
            heads = part.reshape(part.shape[0], -1, head_dim)
            mean = (jnp.sum(heads, axis=2) / head_dim)[:, :, None]
            means.append(jnp.broadcast_to(mean, heads.shape).reshape(part.shape))
        return means

    def _rotate(self, part: jax.Array, angles: Angles) -> jax.Array:
        tokens, width = part.shape
        pairs = self.options.head_dim // 2
        both = part.reshape(tokens, width // (2 * pairs), pairs, 2)
        first = jnp.broadcast_to((jnp.arange(2) == 0)[None, None, None, :], both.shape)
        # One of each pair, exactly: the other is zero.
        even = jnp.sum(jnp.where(first, both, 0.0), axis=3)
        odd = jnp.sum(jnp.where(first, 0.0, both), axis=3)
        cos, sin = (jnp.broadcast_to(each[:, None, :], even.shape) for each in angles)
        turned = [even * cos - odd * sin, even * sin + odd * cos]
        even, odd = (jnp.broadcast_to(each[..., None], both.shape) for each in turned)
        return jnp.where(first, even, odd).reshape(part.shape)

    def _load(self, ref: Ref, token: jax.Array, end: jax.Array | int, tile: Tile) -> jax.Array:
        where, mask = self._place(token, end, tile)
        return plgpu.load(ref.at[where], mask=mask, other=0.0)

    def _place(
        self, token: jax.Array, end: jax.Array | int, tile: Tile
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Indices of a tile, and which of them exist."""
        shape = (self.blocks.tokens, tile.width)
        column = tile.offset + jnp.arange(tile.width)[None, :]
        mask = jnp.broadcast_to((token < end)[:, None], shape)
        if tile.ragged:
            mask = mask & jnp.broadcast_to(column < self.dim, shape)
        return (jnp.broadcast_to(token[:, None], shape), jnp.broadcast_to(column, shape)), mask


def forward_kernel(x_ref: Ref, weight_ref: Ref, *refs: Ref, launch: RmsNormLaunch) -> None:
    """x, weight, [cos, sin] → normed and rotated."""
    *tables, out_ref = refs
    token = pl.program_id(0) * launch.blocks.tokens + jnp.arange(launch.blocks.tokens)
    end = launch.tokens
    x = wide(launch.load(x_ref, token, end))
    rms = launch.mean([part * part for part in x])
    rstd = [lax.rsqrt(mean + launch.options.eps) for mean in rms]
    triples = zip(x, rstd, launch.load_weight(weight_ref), strict=True)
    normed = [part * r * weight for part, r, weight in triples]
    angles = launch.load_angles(tuple(tables), token, end)
    launch.store(out_ref, token, end, launch.rotate(normed, angles))


def backward_kernel(
    x_ref: Ref, weight_ref: Ref, dout_ref: Ref, *refs: Ref, launch: RmsNormLaunch
) -> None:
    """x, weight, gradient of the output, [cos, sin] → gradient of x, sums of the vectors'."""
    *tables, dx_ref, partial_ref = refs
    together = launch.blocks.tokens
    begin = pl.program_id(0) * launch.each
    end = jnp.minimum(begin + launch.each, launch.tokens)
    weight = launch.load_weight(weight_ref)

    def tokens_of(step: jax.Array | int) -> jax.Array:
        return begin + step * together + jnp.arange(together)

    def fetch(step: jax.Array | int) -> PyTree:
        token = tokens_of(step)
        # Beyond the last token nothing is loaded.
        angles = launch.load_angles(tuple(tables), token, end)
        return launch.load(x_ref, token, end), launch.load(dout_ref, token, end), angles

    def body(step: jax.Array, state: PyTree) -> PyTree:
        (x, dout, angles), sums = state
        following, token, x = fetch(step + 1), tokens_of(step), wide(x)
        grad = launch.rotate(wide(dout), None if angles is None else angles.inverse())
        scaled_grad = [g * w for g, w in zip(grad, weight, strict=True)]
        squares = launch.mean([part * part for part in x])
        products = launch.mean([g * part for g, part in zip(scaled_grad, x, strict=True)])
        rstd = [lax.rsqrt(mean + launch.options.eps) for mean in squares]
        normed = [part * r for part, r in zip(x, rstd, strict=True)]
        parts = zip(scaled_grad, normed, products, rstd, strict=True)
        dx = [(g - n * (product * r)) * r for g, n, product, r in parts]
        launch.store(dx_ref, token, end, dx)
        of_weight = [g * n for g, n in zip(grad, normed, strict=True)]
        # There are sums of dx only where the bias's gradient is asked for.
        pairs = zip(sums, (of_weight, dx), strict=False)
        return following, [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]

    zeros = [jnp.zeros((together, tile.width), jnp.float32) for tile in launch.tiles]
    steps = launch.each // together
    # Those of the weight, and of the gradient of x where there is room for them.
    begun = [zeros] * (partial_ref.shape[0] // launch.programs)
    sums = lax.fori_loop(0, steps, body, (fetch(0), begun))[1]
    for place, parts in enumerate(sums):
        row = place * launch.programs + pl.program_id(0)
        for tile, part in zip(launch.tiles, parts, strict=True):
            column = tile.offset + jnp.arange(tile.width)
            mask = column < launch.dim if tile.ragged else None
            where = jnp.full_like(column, 0) + row, column
            plgpu.store(partial_ref.at[where], jnp.sum(part, axis=0), mask=mask)


FORWARD, BACKWARD, REDUCE = (
    f"rms_norm_rotary_{part}" for part in ("forward", "backward", "reduce")
)
"""Names of the kernels, as profilers and lowered modules show them."""


def forward(operands: RmsNormOperands, options: RmsNormOptions) -> jax.Array:
    """[B, S, D // head_dim, head_dim]."""
    x = operands.x
    blocks = forward_blocks(x.shape[-1], options.per_head)
    out = jax.ShapeDtypeStruct((x.size // x.shape[-1], x.shape[-1]), x.dtype)
    (result,) = _call(forward_kernel, FORWARD, operands, (), [out], options, blocks)
    return result.reshape(heads_shape(x, options))


def backward(
    operands: RmsNormOperands, cotangent: jax.Array, options: RmsNormOptions
) -> tuple[jax.Array, ...]:
    """Gradients of x, in its dtype, and of the weight and the bias, if there is one, float32."""
    x = operands.x
    blocks = backward_blocks(x.shape[-1], options.per_head)
    shape = (x.size // x.shape[-1], x.shape[-1])
    programs = blocks.programs(shape[0])
    summed = operands.bias is not None and sums_bias(x.shape[-1], options.per_head)
    vectors = 2 if summed else 1
    outputs = [
        jax.ShapeDtypeStruct(shape, x.dtype),
        jax.ShapeDtypeStruct((vectors * programs, shape[1]), jnp.float32),
    ]
    given = (cotangent.reshape(shape),)
    dx, partial_sums = _call(backward_kernel, BACKWARD, operands, given, outputs, options, blocks)
    table = (vectors, shape[1])
    sums = reduce_partials(partial_sums, None, programs, table, options.interpret, REDUCE)
    dweight, *dbias = sums
    if options.per_head:
        dweight = dweight.reshape(-1, options.head_dim).sum(axis=0)
    if operands.bias is not None and not summed:
        dbias = [dx.astype(jnp.float32).sum(axis=0)]
    return dx.reshape(x.shape), dweight, *dbias


def _call(
    kernel: Callable[..., None],
    name: str,
    operands: RmsNormOperands,
    given: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    options: RmsNormOptions,
    blocks: Blocks,
) -> list[jax.Array]:
    """Runs a kernel over all tokens; arrays go in and come out as [tokens, channels]."""
    x = operands.x.reshape(-1, operands.x.shape[-1])
    angles = (part for part in (operands.cos, operands.sin) if part is not None)
    tables = [part.reshape(-1, part.shape[-1]) for part in angles]
    weight = operands.weight.reshape(1, -1)
    programs = blocks.programs(len(x))
    tokens, dim = x.shape
    table_tokens = len(tables[0]) if tables else 0
    launch = RmsNormLaunch(tokens, dim, options, blocks, programs, table_tokens)
    return pl.pallas_call(
        partial(kernel, launch=launch),
        out_shape=list(outputs),
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=options.interpret,
        name=name,
    )(x, weight, *given, *tables)
