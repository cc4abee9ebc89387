"""Condition tokens of which samples have different numbers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.models.common.segments import PADDING, Segments


class ConditionTokens(NamedTuple):
    """Condition tokens of one kind, such as those of a text.

    A bucketed row has one segment, M = 1, which begins at token 0.

    Attributes:
      values: [R, C, width] embeddings; any finite values in padding.
      segments: the tokens of each sample, one sample after another.
    """

    values: Any
    segments: Segments

    def without(self, dropped: jax.Array) -> "ConditionTokens":
        """The tokens of those samples alone that are not dropped; `dropped`: [R, M] bool."""
        offset, length, ids = self.segments
        gone = jnp.take_along_axis(dropped, jnp.maximum(ids, 0), axis=1)
        length, ids = jnp.where(dropped, 0, length), jnp.where(gone, PADDING, ids)
        return self._replace(segments=Segments(offset, length, ids))


def mean_by_sample(tokens: ConditionTokens) -> jax.Array:
    """Means over the tokens of each sample, [R, M, width] float32; zeros for samples without any.

    Values that are not finite reach only the mean of their own sample.
    """
    values, (_, length, ids) = tokens
    of_slot = ids[:, None] == jnp.arange(length.shape[1])[:, None]
    total = jnp.sum(values[:, None].astype(jnp.float32), 2, where=of_slot[..., None])
    return total / jnp.maximum(length, 1)[..., None]


def side_by_side(parts: Sequence[ConditionTokens]) -> ConditionTokens:
    """Brings the tokens of each sample together; padding is zero and comes last.

    Args:
      parts: [R, C, D] each, with the same R, M and D, and tokens in the order of their segments.

    Returns:
      [R, ΣC, D]; a sample's tokens are in the order of the parts.
    """
    values = jnp.concatenate([part.values for part in parts], axis=1)
    ids = jnp.concatenate([part.segments.ids for part in parts], axis=1)
    length = sum(part.segments.length for part in parts)
    slots = length.shape[1]
    order = jnp.argsort(jnp.where(ids == PADDING, slots, ids), axis=1, stable=True)
    ids = jnp.take_along_axis(ids, order, axis=1)
    values = jnp.take_along_axis(values, order[..., None], axis=1)
    values = jnp.where(ids[..., None] == PADDING, 0, values)
    offset = jnp.cumsum(length, axis=1) - length
    return ConditionTokens(values, Segments(offset, length, ids))
