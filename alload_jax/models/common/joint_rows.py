"""Rows in which the tokens of latents and those of conditions attend to each other.

The latents of a sample are ordered in tiles; the tokens of its condition follow one another in
blocks of their own. Which tokens a sample's condition has is known in the step alone.
"""

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
    SplitTiles,
    TileLayout,
)
from alload_jax.sharding.mesh import CONTEXT
from pallas_kernels.block_sparse_attention import BlockLists


def with_conditions(
    layout: TileLayout | None, latents: Segments, joint: Segments
) -> TileLayout | None:
    """The layout with blocks of the conditions of those samples whose latents are in tiles.

    Args:
      layout: tiles of the latents, with room for `condition_blocks`; None if none is tiled.
      latents: the latents of the samples in the row.
      joint: the samples, each with its condition behind its latents.
    """
    if layout is None:
        return None
    block, rooms = layout.block, layout.condition_blocks
    slots = latents.length.shape[1]
    tiled = layout.of_slots(slots).any(axis=-1)
    length = jnp.where(tiled, joint.length - latents.length, 0)
    blocks = -(-length // block)
    first = jnp.cumsum(blocks, axis=1) - blocks
    begin = latents.offset + latents.length

    number = jnp.arange(rooms)[:, None]
    inside = (number >= first[:, None]) & (number < (first + blocks)[:, None])
    segments = jnp.where(inside, jnp.arange(slots), PADDING).max(axis=-1)
    slot = jnp.maximum(segments, 0)
    before = (number[:, 0] - _of(first, slot)) * block
    tokens = jnp.clip(_of(length, slot) - before, 0, block)
    tokens = jnp.where(segments == PADDING, 0, tokens)
    within = jnp.arange(block)
    source = (_of(begin, slot) + before)[..., None] + within
    source = jnp.where(within < tokens[..., None], source, -1).reshape(len(tokens), -1)

    ids = jnp.maximum(joint.ids, 0)
    index = jnp.arange(joint.ids.shape[1]) - _of(begin, ids)
    counted = (joint.ids != PADDING) & (index >= 0) & (index < _of(length, ids))
    place = jnp.where(counted, _of(first, ids) * block + index, -1)
    condition = TileLayout(source, place, tokens, segments, block, layout.longest_condition)
    return replace(layout, condition=condition)


def with_condition_blocks(lists: BlockLists, layout: TileLayout) -> BlockLists:
    """The lists, followed by all blocks of the condition of each block's sample.

    Args:
      lists: chosen blocks of the tiles.
      layout: the tiles, of which the conditions' blocks are numbered behind the others.
    """
    tiles = layout.condition
    assert tiles is not None
    same = layout.segments[:, :, None] == tiles.segments[:, None]
    same &= (layout.tokens[:, :, None] > 0) & (tiles.tokens[:, None] > 0)
    count = same.sum(axis=-1, dtype=jnp.int32)[:, None]
    first = layout.blocks + jnp.argmax(same, axis=-1).astype(jnp.int32)[:, None]
    indices = jnp.pad(lists.indices, ((0, 0),) * 3 + ((0, tiles.longest),))
    behind = jnp.arange(indices.shape[-1], dtype=jnp.int32) - lists.counts[..., None]
    added = (behind >= 0) & (behind < count[..., None])
    return replace(
        lists,
        indices=jnp.where(added, first[..., None] + behind, indices),
        counts=lists.counts + count,
        key_tokens=jnp.concatenate([lists.key_tokens, tiles.tokens], axis=1),
    )


def to_samples(layout: TileLayout, joint: AttentionSegments) -> AttentionSegments:
    """Condition tokens in blocks attend to all tokens of their sample in the row.

    Args:
      layout: the blocks of the conditions.
      joint: the samples in the row.
    """
    slots = joint.key.length.shape[1]
    same = layout.of_slots(slots)
    length = jnp.where(same, layout.tokens[:, None], 0).sum(axis=-1)
    valid = jnp.arange(layout.block) < layout.tokens[..., None]
    ids = jnp.where(valid, layout.segments[..., None], PADDING).reshape(len(layout.tokens), -1)
    offset = jnp.argmax(same, axis=-1).astype(jnp.int32) * layout.block
    queries = Segments(offset, length, ids)
    most = min(slots, max(1, layout.blocks))
    lengths = ((0, most), (max(1, layout.longest) * layout.block, 0))
    return AttentionSegments(queries, joint.key, lengths, joint.lengths[-1][0])


def _of(values: jax.Array, slot: jax.Array) -> jax.Array:
    """Values of slots [R, M] at [R, N] slots."""
    return jnp.take_along_axis(values, slot, axis=1)


class JointRows(NamedTuple):
    """Positions of condition tokens in rows that hold both kinds of tokens.

    In bucketed rows all condition tokens follow those of the latents, padding last. In packed rows
    the tokens of a sample's condition follow those of its latents, in positions that are padding
    among the tokens of latents: joining writes the few condition tokens there, and moves no others.

    The tokens of a split sample's condition follow those of its latents among the split tokens of
    its group. Each rank with a part of the sample computes the whole condition, and joins those of
    its tokens whose positions are in its own row. No layer communicates more than for latents.

    Attributes:
      segments: positions of the samples with their conditions; None for bucketed rows without
        padding.
      packed: metadata of packed rows in which each sample has its condition, in segments and in
        tiles; of bucketed rows likewise if they have sparse attention, else None.
      place: [R, C] int32, the position of each condition token in packed rows; the row's length
        for padding and for tokens in the row of another rank. None for bucketed rows.
    """

    segments: AttentionSegments | SplitRows | None = None
    packed: PackedMetadata | None = None
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


def bucketed_joint_rows(
    tokens: int, condition: Segments | None, layout: TileLayout | None = None
) -> JointRows:
    """Joint rows of one sample each.

    Args:
      tokens: number of tokens of the latents.
      condition: the condition's tokens, padding last; None if there is no padding.
      layout: tiles of each row; None if attention is always dense.
    """
    if condition is not None:
        row_tokens, lengths = tokens + condition.ids.shape[1], tokens + condition.length[:, 0]
    elif layout is not None:
        rows, row_tokens = layout.place.shape
        lengths = jnp.full(rows, row_tokens, jnp.int32)
    else:
        return JointRows()
    zeros, bounds = jnp.zeros_like(lengths)[:, None], ((0, 1), (row_tokens, 0))
    joint = Segments(zeros, lengths[:, None], None)
    if layout is None:
        return JointRows(AttentionSegments(joint, joint, bounds, None))
    valid = jnp.arange(row_tokens) < lengths[:, None]
    joint = joint._replace(ids=jnp.where(valid, 0, PADDING))
    latents = Segments(zeros, jnp.full_like(zeros, tokens), None)
    tiles = with_conditions(layout, latents, joint)
    packed = PackedMetadata(joint, joint, None, (1, 1, 1), bounds, row_tokens, tiles)
    return JointRows(packed.within_tokens(), packed)


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
        tiles = with_conditions(metadata.row_tiles, metadata.tokens, both)
        packed = replace(metadata, tokens=both, row_tiles=tiles)
        return JointRows(packed.within_tokens(), packed, rows.place)
    if sharding is None:
        raise ValueError("sharding is None, but the rows hold split samples; give their sharding")
    spec = jax.P(sharding.spec[0])
    place, split = jax.shard_map(
        _split_joint, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )(metadata.tokens, metadata.split, condition)
    return JointRows(split, replace(metadata, split=split), place)


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
    number = jnp.where(is_split, row_tokens, jnp.cumsum(~is_split, axis=1) - 1)
    whole = _extended(split.whole, _by_slot(condition.length, number, split.whole))
    number = jnp.where(is_split, split.slots, row_tokens)
    own = _by_slot(condition.length, number, split.split)
    together = _extended(split.split, jax.lax.pmax(own, CONTEXT))
    tiles = split.tiles and SplitTiles(
        with_conditions(split.tiles.whole, split.whole, whole),
        with_conditions(split.tiles.split, split.split, together),
    )
    return place, replace(split, whole=whole, split=together, tiles=tiles, slots=None)


def _by_slot(lengths: jax.Array, slot: jax.Array, segments: Segments) -> jax.Array:
    """Lengths [1, M] of the samples of a row by their slots [1, M] among other segments."""
    none = jnp.zeros_like(segments.length)
    return none.at[:, slot[0]].max(lengths, mode="drop")


def _extended(segments: Segments, beside: jax.Array) -> Segments:
    """Segments of [1, T] with as many tokens more, [1, M], behind each of them."""
    offset, length, ids = segments
    length = length + beside
    position, number = jnp.arange(ids.shape[1]), jnp.arange(length.shape[1], dtype=ids.dtype)
    inside = (position >= offset[..., None]) & (position < (offset + length)[..., None])
    return Segments(offset, length, jnp.where(inside, number[:, None], PADDING).max(axis=1))
