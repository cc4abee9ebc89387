"""Sparse attention within the samples that one device holds, of some heads, and its profile."""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alload_jax.models.common.condition_tiles import to_samples, with_condition_blocks
from alload_jax.models.common.remat import BLOCK_LISTS
from alload_jax.models.common.segments import AttentionSegments
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.sparse_attention.profile import Profile, profile, sample_attention
from alload_jax.models.common.sparse_attention.selectors import Features, block_scores
from alload_jax.models.common.split_attention import Within
from alload_jax.models.common.tile_layout import (
    TileLayout,
    from_tiles,
    to_tiles,
    whole_blocks,
)
from pallas_kernels.block_sparse_attention import (
    BlockLists,
    PooledScores,
    block_sparse_attention,
    top_k_blocks,
)


class Heads(NamedTuple):
    """Some heads of a layer.

    Attributes:
      query, key, value: [R, S, H, head_dim]; no value to measure.
      features: the selector's, of the tokens; None where scores do not depend on them.
      density: [H], share of the blocks of keys that lists hold.
      number: [H] int32, the number of each head in the layer.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array | None
    features: Features | None
    density: jax.Array
    number: jax.Array


class Rows(NamedTuple):
    """The samples of the rows.

    Attributes:
      layout: their tiles; None if none has any.
      segments: positions of the samples; None for rows of one sample each.
      slots: M, segments that a row can have; 1 for rows of one sample each.
    """

    layout: TileLayout | None
    segments: AttentionSegments | None
    slots: int


class Place(NamedTuple):
    """Where training and the layer are, int32 scalars.

    Attributes:
      step: training step.
      layer: number of the layer.
      measured: measurements of the layer so far.
    """

    step: jax.Array
    layer: jax.Array
    measured: jax.Array


class Choice(NamedTuple):
    """How blocks are chosen.

    Attributes:
      config: the layer's.
      list_density: the most that lists hold, as a share of the longest sample's blocks.
      within: dense attention within segments; None for rows of one sample each.
      place: where training and the layer are.
    """

    config: SparseAttentionConfig
    list_density: float
    within: Within | None
    place: Place


def attend(heads: Heads, rows: Rows, choice: Choice) -> jax.Array:
    """Sparse attention of the samples that have tiles, dense attention of the others.

    Condition tokens that stand in the row are attended to by all tokens of their sample, and attend
    to all of them.

    Returns:
      [R, S, H, head_dim].
    """
    layout, segments = rows.layout, rows.segments
    assert heads.value is not None
    arrays = (heads.query, heads.key, heads.value)
    if layout is None:
        return _dense(choice, *arrays, segments)
    query, key, value = (to_tiles(each, layout) for each in arrays)
    lists, tiles = _lists(heads, layout, choice), layout.condition
    if tiles is not None:
        lists = with_condition_blocks(lists, layout)
        key, value = (
            jnp.concatenate([part, to_tiles(each, tiles)], axis=1)
            for part, each in ((key, heads.key), (value, heads.value))
        )
    output = from_tiles(block_sparse_attention(query, key, value, lists), layout)
    if tiles is not None:
        assert segments is not None
        asking = to_tiles(heads.query, tiles)
        seen = _dense(choice, asking, *arrays[1:], to_samples(tiles, segments))
        output = output + from_tiles(seen, tiles)
    if layout.covers_all:
        return output
    assert segments is not None
    return output + _dense(choice, *arrays, _untiled(segments, layout, choice.config))


def _untiled(
    segments: AttentionSegments, layout: TileLayout, config: SparseAttentionConfig
) -> AttentionSegments:
    """The samples that have no tiles: their latents have fewer than `min_tokens` tokens."""
    if layout.condition is None:
        return segments.shorter(config.min_tokens)
    slots = jnp.arange(segments.query.length.shape[1])[:, None]
    tiled = ((layout.segments[:, None] == slots) & (layout.tokens[:, None] > 0)).any(axis=-1)
    beside = layout.longest_condition * layout.block
    return segments.only(~tiled, config.min_tokens - 1 + beside)


def measure(heads: Heads, rows: Rows, choice: Choice) -> Profile:
    """Profile of the samples that have tiles, by segment: [R, M, ...]."""
    layout, config = rows.layout, choice.config
    if layout is None:
        none = jnp.zeros((len(heads.query), rows.slots))
        per_head = jnp.zeros((*none.shape, len(heads.number)))
        return Profile(none, per_head, per_head, per_head)
    query, key = (whole_blocks(x, layout) for x in (heads.query, heads.key))
    sample = sample_attention(query, key, layout, choice.place.measured, config)
    of_block = jnp.take_along_axis(layout.segments, sample.block, axis=1)
    segments = of_block[..., None] == jnp.arange(rows.slots)
    return profile(sample, _scores(heads, layout, choice), segments, config)


def _dense(
    choice: Choice,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: AttentionSegments | None,
) -> jax.Array:
    assert choice.within is not None
    assert segments is not None
    return choice.within(query, key, value, segments)


def _scores(heads: Heads, layout: TileLayout, choice: Choice) -> PooledScores | jax.Array:
    place = choice.place
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), place.step), place.layer)
    return block_scores(choice.config, heads.features, layout, heads.number, key)


def _lists(heads: Heads, layout: TileLayout, choice: Choice) -> BlockLists:
    """The chosen blocks, named so that a recomputed layer cannot choose otherwise.

    They are kept in an array of the layer's longest lists, which the branches of a conditional
    share.
    """
    density = jnp.ones_like(heads.density) if choice.config.selector == "all" else heads.density
    most, kept = (
        min(layout.blocks, math.ceil(density * layout.longest))
        for density in (choice.list_density, choice.config.list_densities()[0])
    )
    share = density[None, :, None] * layout.blocks_of_segment()[:, None]
    lists = top_k_blocks(
        _scores(heads, layout, choice),
        jnp.clip(jnp.ceil(share).astype(jnp.int32), 1, most),
        layout.block_segments,
        layout.tokens,
        layout.tokens,
        k_max=most,
        query_block=layout.block,
        key_block=layout.block,
    )
    # Half the bytes of int32 wherever a row has fewer than 4 million tokens.
    small = jnp.uint16 if layout.blocks <= jnp.iinfo(jnp.uint16).max else jnp.int32
    indices = jnp.pad(lists.indices.astype(small), ((0, 0),) * 3 + ((0, kept - most),))
    indices = checkpoint_name(indices, BLOCK_LISTS)[..., :most].astype(jnp.int32)
    return replace(lists, indices=indices, counts=checkpoint_name(lists.counts, BLOCK_LISTS))
