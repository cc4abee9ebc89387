"""Rows in which the tokens of latents and those of conditions attend to each other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.models.common.segments import (
    PADDING,
    AttentionSegments,
    PackedMetadata,
    Segments,
)


class JointRows(NamedTuple):
    """Positions of condition tokens in rows that hold both kinds of tokens.

    In bucketed rows all condition tokens follow those of the latents, padding last. In packed rows
    the tokens of a sample's condition follow those of its latents, in positions that are padding
    among the tokens of latents: joining writes the few condition tokens there, and moves no others.

    Attributes:
      segments: joint segments of packed rows; None for bucketed rows.
      lengths: [B] int32, tokens of bucketed rows that are not padding; None if all are, and for
        packed rows.
      place: [R, C] int32, the position of each condition token in packed rows; the row's length
        for padding. None for bucketed rows.
    """

    segments: AttentionSegments | None = None
    lengths: jax.Array | None = None
    place: jax.Array | None = None

    def join(self, tokens: jax.Array, condition: jax.Array) -> jax.Array:
        """Joins tokens [R, T, ...] with those of the condition, [R, C, ...].

        Returns:
          [R, T, ...] packed, [R, T + C, ...] bucketed.
        """
        if self.place is None:
            return jnp.concatenate([tokens, condition], axis=1)
        put = jax.vmap(lambda row, place, part: row.at[place].set(part, mode="drop"))
        return put(tokens, self.place, condition)

    def separate(self, joined: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
        """Inverts `join` for rows of `tokens` tokens, up to tokens of no sample.

        Returns:
          [R, T, ...], in packed rows with tokens of conditions in its padding; and [R, C, ...],
          zeros in padding.
        """
        if self.place is None:
            return joined[:, :tokens], joined[:, tokens:]
        take = jax.vmap(lambda row, place: row.at[place].get(mode="fill", fill_value=0))
        return joined, take(joined, self.place)


def bucketed_joint_rows(tokens: int, condition: Segments | None) -> JointRows:
    """Joint rows of one sample each.

    Args:
      tokens: number of tokens of the latents.
      condition: the condition's tokens, padding last; None if there is no padding.
    """
    if condition is None:
        return JointRows()
    return JointRows(lengths=tokens + condition.length[:, 0])


def packed_joint_rows(metadata: PackedMetadata, condition: Segments) -> JointRows:
    """Joint rows of several samples each.

    Args:
      metadata: positions of the samples in tokens. Each has room for its condition behind it, and
        `lengths` bounds the lengths of samples with their conditions.
      condition: the samples' tokens in the condition.

    Raises:
      NotImplementedError: the rows hold split samples.
    """
    if metadata.split is not None:
        raise NotImplementedError(
            "samples with joint attention cannot be split; set mesh.context to 1"
        )
    offset, length, ids = metadata.tokens
    slot = jnp.maximum(condition.ids, 0)
    index = jnp.arange(condition.ids.shape[1]) - jnp.take_along_axis(condition.offset, slot, 1)
    place = jnp.take_along_axis(offset + length, slot, 1) + index
    place = jnp.where(condition.ids == PADDING, ids.shape[1], place)
    rows = JointRows(place=place)
    both = Segments(offset, length + condition.length, rows.join(ids, condition.ids))
    return rows._replace(segments=AttentionSegments(both, both, metadata.lengths, None))
