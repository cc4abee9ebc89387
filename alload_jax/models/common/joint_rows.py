"""Rows in which the tokens of latents and those of conditions attend to each other."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from alload_jax.models.common.segments import (
    PADDING,
    AttentionSegments,
    PackedMetadata,
    Segments,
    SplitRows,
)
from alload_jax.sharding.mesh import CONTEXT


class JointRows(NamedTuple):
    """Positions of condition tokens in rows that hold both kinds of tokens.

    In bucketed rows all condition tokens follow those of the latents, padding last. In packed rows
    the tokens of a sample's condition follow those of its latents, in positions that are padding
    among the tokens of latents: joining writes the few condition tokens there, and moves no others.

    The tokens of a split sample's condition follow those of its latents among the split tokens of
    its group. Each rank with a part of the sample computes the whole condition, and joins those of
    its tokens whose positions are in its own row. No layer communicates more than for latents.

    Attributes:
      segments: joint segments of packed rows; None for bucketed rows.
      lengths: [B] int32, tokens of bucketed rows that are not padding; None if all are, and for
        packed rows.
      place: [R, C] int32, the position of each condition token in packed rows; the row's length
        for padding and for tokens in the row of another rank. None for bucketed rows.
    """

    segments: AttentionSegments | SplitRows | None = None
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
          zeros in padding and for tokens in the row of another rank.
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


def packed_joint_rows(
    metadata: PackedMetadata, condition: Segments, sharding: NamedSharding | None = None
) -> JointRows:
    """Joint rows of several samples each.

    Args:
      metadata: positions of the samples in tokens. Each has room for its condition behind it, and
        `lengths` bounds the lengths of samples with their conditions.
      condition: the samples' tokens in the condition; parts of a split sample have all of them.
      sharding: sharding of rows over a mesh of Auto axes; rows with split samples need it.

    Raises:
      ValueError: rows with split samples have no sharding.
    """
    offset, length, ids = metadata.tokens
    if metadata.split is None:
        rows = JointRows(place=_places(condition, offset + length, ids.shape[1]))
        both = Segments(offset, length + condition.length, rows.join(ids, condition.ids))
        return rows._replace(segments=AttentionSegments(both, both, metadata.lengths, None))
    if sharding is None:
        raise ValueError("sharding is None, but the rows hold split samples; give their sharding")
    spec = jax.P(sharding.spec[0])
    place, split = jax.shard_map(
        _split_joint, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )(metadata.tokens, metadata.split, condition)
    return JointRows(split, None, place)


def _places(condition: Segments, begin: jax.Array, tokens: int) -> jax.Array:
    """[R, C], the position of each condition token; `tokens` for padding.

    Args:
      condition: the samples' tokens in the condition.
      begin: [R, M], where the condition of each sample begins.
      tokens: of a row.
    """
    slot = jnp.maximum(condition.ids, 0)
    index = jnp.arange(condition.ids.shape[1]) - jnp.take_along_axis(condition.offset, slot, 1)
    place = jnp.take_along_axis(begin, slot, 1) + index
    return jnp.where(condition.ids == PADDING, tokens, place)


def _split_joint(
    tokens: Segments, split: SplitRows, condition: Segments
) -> tuple[jax.Array, SplitRows]:
    """Places of condition tokens in the row of one rank, and the joint segments of its group.

    It must run inside `shard_map`.
    """
    count, row_tokens = split.split_tokens, tokens.ids.shape[1]
    is_split = split.slots != PADDING
    slot = jnp.maximum(split.slots, 0)
    in_group = jnp.take_along_axis(split.split.offset + split.split.length, slot, 1)
    behind = in_group - jax.lax.axis_index(CONTEXT) * count
    begin = jnp.where(is_split, behind, tokens.offset + tokens.length)
    place = _places(condition, begin, row_tokens)
    of_split = jnp.take_along_axis(is_split, jnp.maximum(condition.ids, 0), 1)
    elsewhere = of_split & ((place < 0) | (place >= count))
    place = jnp.where(elsewhere, row_tokens, place)
    whole_ids = JointRows(place=place).join(tokens.ids, condition.ids)[:, count:]
    whole = Segments(
        jnp.where(is_split, 0, jnp.maximum(tokens.offset - count, 0)),
        jnp.where(is_split, 0, tokens.length + condition.length),
        whole_ids,
    )
    joint = _group_segments(split, condition.length)
    return place, replace(split, whole=whole, split=joint, slots=None)


def _group_segments(split: SplitRows, lengths: jax.Array) -> Segments:
    """The group's split samples with their conditions.

    Args:
      split: the split samples of a rank's group.
      lengths: [1, M], condition tokens of the samples of its row.
    """
    offset, length, ids = split.split
    slot = jnp.where(split.slots == PADDING, length.shape[1], split.slots)
    own = jnp.zeros_like(length).at[:, slot[0]].max(lengths, mode="drop")
    length = length + jax.lax.pmax(own, CONTEXT)
    position = jnp.arange(ids.shape[1])
    begin, end = offset[..., None], (offset + length)[..., None]
    number = jnp.arange(length.shape[1], dtype=ids.dtype)[:, None]
    inside = (position >= begin) & (position < end)
    return Segments(offset, length, jnp.where(inside, number, PADDING).max(axis=1))
