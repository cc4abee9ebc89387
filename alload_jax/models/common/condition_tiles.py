"""Condition tokens that stand in a row, in blocks of sparse attention.

The latents of a sample are ordered in tiles; the tokens of its condition follow one another in
blocks of their own. Which tokens a sample's condition has is known in the step alone.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from alload_jax.models.common.segments import PADDING, AttentionSegments, Segments
from alload_jax.models.common.tile_layout import TileLayout
from pallas_kernels.block_sparse_attention import BlockLists


def with_conditions(layout: TileLayout, latents: Segments, joint: Segments) -> TileLayout:
    """The layout with blocks of the conditions of those samples whose latents are in tiles.

    Args:
      layout: tiles of the latents, with room for `condition_blocks`.
      latents: the latents of the samples in the row.
      joint: the samples, each with its condition behind its latents.
    """
    block, rooms = layout.block, layout.condition_blocks
    slots = latents.length.shape[1]
    of_slot = layout.segments[:, None] == jnp.arange(slots)[:, None]
    tiled = (of_slot & (layout.tokens[:, None] > 0)).any(axis=-1)
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
    same = (layout.segments[:, None] == jnp.arange(slots)[:, None]) & (layout.tokens[:, None] > 0)
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
