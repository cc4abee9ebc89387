"""The columns of a group of threads, and how they lie in its registers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layernorm_modulate.mosaic.tuning import LANES, chunks_of

WARPS = 4
"""Of a group. Each has a row of a piece, so that sums over it need no other warp."""
_MOST_CHUNKS = 4
"""Of a piece: what a thread loads at once."""


class Piece(NamedTuple):
    """Some chunks of a group's columns.

    Attributes:
      at: the first.
      chunks: 1, 2 or 4.
      counts: 1.0 or 0.0, how often sums over the row count it; None for once.
    """

    at: int
    chunks: int
    counts: Any

    def load(self, ref: Any, optimized: bool = True) -> jax.Array:
        """This piece of a [chunks, LANES] ref, float32; not `optimized` from global memory."""
        lanes = plgpu.load(self._view(ref), (), layout=_layout(self.chunks), optimized=optimized)
        return lanes.astype(jnp.float32)

    def store(self, ref: Any, value: jax.Array) -> None:
        """Rounds a value to the ref's dtype and writes it."""
        self._view(ref)[...] = value.astype(ref.dtype)

    def zeros(self) -> jax.Array:
        """Float32 in registers."""
        zeros = jnp.zeros((WARPS, LANES // WARPS * self.chunks), jnp.float32)
        return plgpu.layout_cast(zeros, _layout(self.chunks))

    def _view(self, ref: Any) -> Any:
        part = ref.at[pl.ds(self.at, self.chunks)]
        return part.reshape(WARPS, LANES // WARPS * self.chunks)


@dataclass(frozen=True)
class Columns:
    """The columns of a group.

    Attributes:
      first: its first chunk of the row.
      chunks: how many.
      pieces: of them.
    """

    first: Any
    chunks: int
    pieces: tuple[Piece, ...]

    def of(self, ref: Any, row: Any) -> Any:
        """The group's part of a row of a [rows, chunks of a row, LANES] ref."""
        return ref.at[row, pl.ds(self.first, self.chunks)]


def columns_of(dim: int, groups: int, group: Any) -> Columns:
    """A group's columns: as many as any other's.

    Where groups do not divide the row's chunks, some groups begin with chunks of the one before.
    Both compute the same there, and only one counts it in sums over the row.
    """
    total = dim // LANES
    chunks = chunks_of(dim, groups)
    first = jnp.minimum(group * chunks, total - chunks)
    shared = groups * chunks - total
    # A chunk that the last group shares, by itself.
    counts = jnp.asarray(group * chunks == first).astype(jnp.float32)
    pieces = [Piece(at, 1, counts) for at in range(shared)]
    at = shared
    while at < chunks:
        size = min(_MOST_CHUNKS, 1 << ((chunks - at).bit_length() - 1))
        pieces.append(Piece(at, size, None))
        at += size
    return Columns(first, chunks, tuple(pieces))


def _layout(chunks: int) -> Any:
    tiling = plgpu.Tiling(((WARPS, LANES // WARPS * chunks), (chunks,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
