"""Where the segments of packed rows lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PADDING = -1
"""The segment of tokens that belong to none."""


class Segments(NamedTuple):
    """Up to M segments in each of R rows, in the order in which they lie; unused slots come last.

    Attributes:
      offset: [R, M] int32, the first token of each segment.
      length: [R, M] int32, its tokens; 0 in unused slots.
    """

    offset: jax.Array
    length: jax.Array

    def ids(self, tokens: int) -> jax.Array:
        """[R, tokens] int32: the slot of each token's segment, or PADDING."""
        place = jnp.arange(tokens, dtype=jnp.int32)
        # Unused slots begin behind the row, where no token finds them.
        offset = jnp.where(self.length > 0, self.offset, tokens)
        slot = jax.vmap(lambda begins: jnp.searchsorted(begins, place, side="right"))(offset) - 1
        clipped = jnp.maximum(slot, 0)
        end = jnp.take_along_axis(self.offset + self.length, clipped, axis=1)
        inside = (slot >= 0) & (place < end)
        return jnp.where(inside, slot, PADDING).astype(jnp.int32)


def equal_segments(used: jax.Array, length: int) -> Segments:
    """Segments of one length, end to end: [R, M] bool, which slots are used."""
    offset = jnp.arange(used.shape[1], dtype=jnp.int32) * length
    return Segments(
        jnp.broadcast_to(offset, used.shape), jnp.where(used, length, 0).astype(jnp.int32)
    )
