"""What the kernels do with a few tokens at a time."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.rms_norm_rotary.operands import Options
from pallas_kernels.rms_norm_rotary.triton.tuning import Blocks
from pallas_kernels.triton.tiles import Tile, split_width

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
class Launch:
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
    options: Options
    blocks: Blocks
    programs: int
    table_tokens: int

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Of the width."""
        widest = max(self.blocks.max_tile, self.options.head_dim)
        return split_width(self.dim, widest, equal=True)

    @property
    def each(self) -> int:
        """Tokens of a program, a multiple of `blocks.tokens`."""
        steps = -(-self.tokens // (self.programs * self.blocks.tokens))
        return steps * self.blocks.tokens

    def load(self, ref: Any, token: jax.Array, end: Any) -> Parts:
        """Channels of the tokens before `end`, in the ref's dtype; 0 elsewhere."""
        return [self._load(ref, token, end, tile) for tile in self.tiles]

    def store(self, ref: Any, token: jax.Array, end: Any, parts: Parts) -> None:
        """Rounds to the ref's dtype and writes the tokens before `end`."""
        for tile, part in zip(self.tiles, parts, strict=True):
            where, mask = self._place(token, end, tile)
            plgpu.store(ref.at[where], part.astype(ref.dtype), mask=mask)

    def load_weight(self, ref: Any) -> Parts:
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

    def load_angles(self, refs: tuple[Any, ...], token: jax.Array, end: Any) -> Angles | None:
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
            total: Any = 0.0
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

    def _load(self, ref: Any, token: jax.Array, end: Any, tile: Tile) -> jax.Array:
        where, mask = self._place(token, end, tile)
        return plgpu.load(ref.at[where], mask=mask, other=0.0)

    def _place(
        self, token: jax.Array, end: Any, tile: Tile
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Indices of a tile, and which of them exist."""
        shape = (self.blocks.tokens, tile.width)
        column = tile.offset + jnp.arange(tile.width)[None, :]
        mask = jnp.broadcast_to((token < end)[:, None], shape)
        if tile.ragged:
            mask = mask & jnp.broadcast_to(column < self.dim, shape)
        return (jnp.broadcast_to(token[:, None], shape), jnp.broadcast_to(column, shape)), mask


def forward_kernel(x_ref: Any, weight_ref: Any, *refs: Any, launch: Launch) -> None:
    """x, weight, [cos, sin] → normed and rotated."""
    *tables, out_ref = refs
    token = pl.program_id(0) * launch.blocks.tokens + jnp.arange(launch.blocks.tokens)
    end = launch.tokens
    x = _wide(launch.load(x_ref, token, end))
    rms = launch.mean([part * part for part in x])
    rstd = [lax.rsqrt(mean + launch.options.eps) for mean in rms]
    triples = zip(x, rstd, launch.load_weight(weight_ref), strict=True)
    normed = [part * r * weight for part, r, weight in triples]
    angles = launch.load_angles(tuple(tables), token, end)
    launch.store(out_ref, token, end, launch.rotate(normed, angles))


def backward_kernel(x_ref: Any, weight_ref: Any, dout_ref: Any, *refs: Any, launch: Launch) -> None:
    """x, weight, gradient of the output, [cos, sin] → gradient of x, sums of the vectors'."""
    *tables, dx_ref, partial_ref = refs
    together = launch.blocks.tokens
    begin = pl.program_id(0) * launch.each
    end = jnp.minimum(begin + launch.each, launch.tokens)
    weight = launch.load_weight(weight_ref)

    def fetch(step: Any) -> Any:
        token = begin + step * together + jnp.arange(together)
        # Beyond the last token nothing is loaded.
        angles = launch.load_angles(tuple(tables), token, end)
        return launch.load(x_ref, token, end), launch.load(dout_ref, token, end), angles

    def work(step: Any, fetched: Any, sums: list[Parts]) -> list[Parts]:
        token = begin + step * together + jnp.arange(together)
        x, dout, angles = fetched
        x = _wide(x)
        gained = launch.rotate(_wide(dout), None if angles is None else angles.inverse())
        pulled = [g * w for g, w in zip(gained, weight, strict=True)]
        squares = launch.mean([part * part for part in x])
        along = launch.mean([g * part for g, part in zip(pulled, x, strict=True)])
        rstd = [lax.rsqrt(mean + launch.options.eps) for mean in squares]
        normed = [part * r for part, r in zip(x, rstd, strict=True)]
        dx = [(g - n * (a * r)) * r for g, n, a, r in zip(pulled, normed, along, rstd, strict=True)]
        launch.store(dx_ref, token, end, dx)
        of_weight = [g * n for g, n in zip(gained, normed, strict=True)]
        # There are sums of dx only where the bias's gradient is asked for.
        pairs = zip(sums, (of_weight, dx), strict=False)
        return [[total + part for total, part in zip(*pair, strict=True)] for pair in pairs]

    def body(step: Any, state: Any) -> Any:
        fetched, sums = state
        following = fetch(step + 1)
        return following, work(step, fetched, sums)

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


def _wide(parts: Parts) -> Parts:
    return [part.astype(jnp.float32) for part in parts]
