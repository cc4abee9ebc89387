"""Tokens in tiles: where each token of a row is in the blocks of sparse attention, and back."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import BlockSegments, tile_order


class TileLayout(NamedTuple):
    """Places of the tokens of R rows in N blocks; R is 1 if all rows have the same.

    Attributes:
      source: [R, N·block] int32, the token at each place; −1 where there is none.
      place: [R, S] int32, the place of each token.
      tokens: [R, N] int32, valid tokens of each block, which are its first.
      segments: [R, N] int32, the sample of each block; −1 for none.
    """

    source: Any
    place: Any
    tokens: Any
    segments: Any

    def of_rows(self, rows: int) -> "TileLayout":
        """The layout of each of `rows` rows."""
        return TileLayout(*(jnp.broadcast_to(x, (rows, x.shape[1])) for x in self))

    @property
    def blocks(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.source.shape[1] // self.blocks

    @property
    def block_segments(self) -> BlockSegments:
        """As the selection of blocks takes them: queries and keys are the same blocks."""
        return BlockSegments(self.segments, self.segments)


def clip_layout(grid: tuple[int, int, int], block: int) -> TileLayout:
    """The layout of rows that hold one sample each, in the order of `patchify`.

    Args:
      grid: (t, h, w) tokens of the samples.
      block: tokens of a block.
    """
    order = tile_order(grid, block=block)
    arrays = (order.source, order.place, order.tokens)
    source, place, tokens = (jnp.asarray(each, jnp.int32)[None] for each in arrays)
    return TileLayout(source, place, tokens, jnp.zeros_like(tokens))


def to_tiles(x: jax.Array, layout: TileLayout) -> jax.Array:
    """Orders tokens in tiles: [R, S, ...] → [R, N·block, ...], zeros at empty places."""
    return _moved(x, layout.source, layout.place)


def from_tiles(x: jax.Array, layout: TileLayout) -> jax.Array:
    """Inverts `to_tiles`: [R, N·block, ...] → [R, S, ...]."""
    return _moved(x, layout.place, layout.source)


@jax.custom_vjp
def _moved(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """x at the indices, zeros where they are negative. The gradient is as simple: no scatter."""
    taken = jax.vmap(partial(jnp.take, axis=0, mode="clip"))(x, jnp.maximum(index, 0))
    return jnp.where((index >= 0).reshape(*index.shape, *(1,) * (x.ndim - 2)), taken, 0)


def _moved_forward(x: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple[jax.Array, Any]:
    return _moved(x, index, inverse), (index, inverse)


def _moved_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, None, None]:
    index, inverse = saved
    return _moved(grad, inverse, index), None, None


_moved.defvjp(_moved_forward, _moved_backward)
