"""The self-attention of a layer: dense or sparse, as its state says.

All-to-alls exchange tokens of split samples for heads, as for dense attention (`split_packed`).
Heads of a sparse layer cost what their densities say, so that each rank gets heads of about the
same total density. Where ranks would still wait, fewer of them exchange heads, and each chooses
blocks for its own queries among the keys of all, by predicted time (DSV, arXiv 2502.07590,
section 5).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from alload_jax.models.common.attention import (
    AttentionImplementation,
    attention,
    gathered_heads,
    head_spec,
    heads_together,
    parts_together,
    tokens_together,
)
from alload_jax.models.common.config import TransformerConfig
from alload_jax.models.common.parts import BLOCK_LISTS, Auxiliary
from alload_jax.models.common.segments import (
    PADDING,
    AttentionSegments,
    PackedMetadata,
    SplitRows,
    TileLayout,
    from_tiles,
    to_samples,
    to_tiles,
    to_tokens,
    whole_blocks,
    with_condition_blocks,
    with_inverse,
)
from alload_jax.models.common.sparse_attention import config as switching
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig, Switch
from alload_jax.models.common.sparse_attention.selectors import (
    Features,
    PartOfGroup,
    Predictor,
    Profile,
    block_scores,
    profile,
    sample_attention,
)
from alload_jax.models.common.sublayers import RotaryTable
from alload_jax.planning.cost import sent_share
from alload_jax.planning.devices import DEVICES, Device
from alload_jax.sharding.mesh import CONTEXT, TENSOR
from pallas_kernels.block_sparse_attention import (
    BlockLists,
    BlockSegments,
    PooledScores,
    block_sparse_attention,
    top_k_blocks,
)

Samples = TileLayout | PackedMetadata
"""The samples of rows: one in each, all in the same tiles, or packed."""


class RowsOfLayer(NamedTuple):
    """What the attention of a layer is given.

    Attributes:
      x: [R, S, width], input of the attention.
      heads: query, key and value, [R, S, num_heads, head_dim] each.
      rotary: table that queries and keys were rotated by, [S, ...] or [R, S, ...].
      samples: segments of the rows, with their tiles; or the tiles of rows that hold one sample
        each; None for such rows if their attention is always dense.
      segments: positions of the samples for dense attention; None for rows of one sample each.
      slots: M, where auxiliary values are of the samples of packed rows; 0 for one sample in each.
      implementation: of dense attention.
      sharding: of the rows over a mesh of Auto axes.
    """

    x: jax.Array
    heads: tuple[jax.Array, jax.Array, jax.Array]
    rotary: RotaryTable
    samples: Samples | None
    segments: AttentionSegments | SplitRows | None
    slots: int
    implementation: AttentionImplementation
    sharding: NamedSharding | None

    def dense(self) -> jax.Array:
        """Dense attention."""
        return attention(
            *self.heads,
            segments=self.segments,
            implementation=self.implementation,
            sharding=self.sharding,
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


class Choice(NamedTuple):
    """How blocks are chosen.

    Attributes:
      config: the layer's.
      list_density: the most that lists hold, as a share of the longest sample's blocks.
      implementation: of dense attention.
      step: int32, training step.
      layer: int32, number of the layer.
      measured: int32, measurements of the layer so far.
    """

    config: SparseAttentionConfig
    list_density: float
    implementation: AttentionImplementation
    step: jax.Array
    layer: jax.Array
    measured: jax.Array


class SparseSelfAttention(nnx.Module):
    """Attention of a layer's queries to its keys, after projection and rotation."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        assert config.sparse_attention is not None
        self.config, width, heads = config.sparse_attention, config.dim, config.num_heads
        self.switch = Switch(self.config, heads)
        self.selector = (
            Predictor(width, heads, self.config.rank, config.compute_dtype, rngs=rngs)
            if self.config.selector == "predictor"
            else None
        )

    def __call__(self, rows: RowsOfLayer) -> tuple[jax.Array, Auxiliary]:
        """Attends, and measures every few steps.

        Returns:
          [R, S, num_heads, head_dim]; auxiliary values of each sample.
        """
        samples, num_heads = rows.samples, rows.heads[0].shape[2]
        shape = (len(rows.x), rows.slots) if rows.slots else (len(rows.x),)
        if samples is None or (isinstance(samples, PackedMetadata) and samples.tiles() is None):
            return rows.dense(), self._auxiliary(_no_profile(shape, num_heads), shape)
        if isinstance(samples, TileLayout):
            samples = samples.of_rows(len(rows.x))
        profile = _no_profile(shape, num_heads)
        if self.config.measures:
            profile = self._profile(rows, samples)
        densities, (exchanges, exchange) = self.config.list_densities(), self._exchange(rows)

        def sparse(density: float, exchanged: int) -> jax.Array:
            split = partial(attend_split, exchanged=exchanged)
            return self._on_devices((attend, split), head_spec, density, rows, samples)

        lists = [partial(sparse, *each) for each in product(densities, exchanges)]
        # Dense attention, or the shortest lists that hold every head's.
        enough = jnp.asarray(densities, jnp.float32) >= self.switch.density[...].max()
        branch = jnp.maximum(enough.sum(dtype=jnp.int32) - 1, 0) * len(exchanges) + exchange
        branch = jnp.where(self.switch.sparse[...], 1 + branch, 0)
        output = jax.lax.switch(branch, [rows.dense, *lists])
        return output, self._auxiliary(profile, shape)

    def _exchange(self, rows: RowsOfLayer) -> tuple[list[int], jax.Array | int]:
        """How many ranks may exchange heads of split samples, and which number is the fastest."""
        split, sharding = rows.segments, rows.sharding
        if sharding is None or not isinstance(split, SplitRows):
            return [1], 0
        mesh, num_heads = sharding.mesh, rows.heads[0].shape[2]
        ranks, tensor = (mesh.shape.get(axis, 1) for axis in (CONTEXT, TENSOR))
        exchanges = head_exchanges(ranks, num_heads // tensor)
        equal = self.config.forced is not None or self.config.selector == "all"  # densities
        if equal or len(exchanges) == 1 or self.config.head_exchange == "most":
            return exchanges[:1], 0
        kinds = {device.name: device for device in DEVICES.values()}
        seconds = partial(
            exchange_seconds,
            self.switch.density[...].reshape(tensor, -1),
            split,
            ranks=ranks,
            channels=rows.heads[0].shape[3],
            itemsize=rows.heads[0].dtype.itemsize,
            device=kinds.get(mesh.devices.flat[0].device_kind, DEVICES["h200"]),
        )
        return exchanges, jnp.argmin(jnp.stack([seconds(exchanged=each) for each in exchanges]))

    def _profile(self, rows: RowsOfLayer, samples: Samples) -> Profile:
        """What this step finds; zeros if it does not measure."""

        def found() -> Profile:
            def specs(sharding: NamedSharding) -> PyTree:
                by_head, of_profile = head_spec(sharding), cast(PyTree, Profile)
                return of_profile(PartitionSpec(by_head[0]), *(by_head,) * 3)

            return self._on_devices((measure, measure_split), specs, 1.0, rows, samples)

        def nothing() -> Profile:
            return _no_profile((len(rows.x), rows.slots or 1), rows.heads[0].shape[2])

        config = self.config
        every = jnp.where(
            self.switch.sparse[...], config.sparse_profile_every, config.profile_every
        )
        return jax.lax.cond(self.switch.step[...] % every == 0, found, nothing)

    def _on_devices(
        self,
        functions: tuple[Callable[..., PyTree], Callable[..., PyTree]],
        out_specs: Callable[[NamedSharding], PyTree],
        density: float,
        rows: RowsOfLayer,
        samples: Samples,
    ) -> PyTree:
        """Runs on each device's rows and heads; nothing but split samples is communicated.

        Args:
          functions: `attend` and `attend_split`, or `measure` and `measure_split`.
          out_specs: of what they return, by the sharding of the rows.
          density: of the lists.
          rows: the layer's.
          samples: of the rows.
        """
        of_rows, of_split = functions
        switch, sharding = self.switch, rows.sharding

        def run(
            heads: Heads, samples: Samples, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> PyTree:
            choice = Choice(self.config, density, rows.implementation, *state)
            if isinstance(samples, TileLayout):
                return of_rows(heads, samples, None, choice)
            if samples.split is not None:
                return of_split(heads, samples, choice)
            return of_rows(heads, samples.row_tiles, samples.within_tokens(), choice)

        query, key, value = rows.heads
        features = None  # scores do not depend on the tokens
        if self.selector is not None:
            features = self.selector(rows.x, rows.rotary, sharding)
        elif self.config.selector == "pooled":
            # Queries and keys themselves (as VSA's coarse stage, arXiv 2505.13389).
            features = Features(*jax.lax.stop_gradient((query, key)))
        heads = Heads(
            query,
            key,
            None if of_rows is measure else value,
            features,
            switch.density[...],
            jnp.arange(query.shape[2], dtype=jnp.int32),
        )
        state = (switch.step[...], switch.layer[...], switch.measured[...])
        if sharding is None or sharding.mesh.size == 1:
            return run(heads, samples, state)
        by_head = head_spec(sharding)
        of_heads = PartitionSpec(by_head[2])
        in_specs = cast(PyTree, Heads)(*(by_head,) * 4, density=of_heads, number=of_heads)
        return jax.shard_map(
            run,
            mesh=sharding.mesh,
            in_specs=(in_specs, PartitionSpec(by_head[0]), PartitionSpec()),
            out_specs=out_specs(sharding),
            check_vma=False,
        )(heads, samples, state)

    def _auxiliary(self, profile: Profile, shape: tuple[int, ...]) -> Auxiliary:
        """What was found of samples of this shape: (R,), or (R, M) for packed rows."""
        num_heads = profile.sparsity.shape[-1]
        auxiliary = {
            switching.PROFILED: profile.found.reshape(shape),
            switching.SPARSITY: profile.sparsity.reshape(*shape, num_heads),
            switching.RECALL: profile.recall.reshape(*shape, num_heads),
        }
        if self.config.selector == "predictor":
            auxiliary[switching.PREDICTOR_LOSS] = profile.loss.mean(axis=-1).reshape(shape)
        return auxiliary


def _no_profile(shape: tuple[int, ...], num_heads: int) -> Profile:
    per_head = jnp.zeros((*shape, num_heads))
    return Profile(jnp.zeros(shape), per_head, per_head, per_head)


# ---------------------------------------------------------------- samples of one device


def attend(
    heads: Heads,
    layout: TileLayout | None,
    segments: AttentionSegments | None,
    choice: Choice,
    part: PartOfGroup | None = None,
) -> jax.Array:
    """Sparse attention of the samples that have tiles, dense attention of the others.

    Condition tokens that stand in the row are attended to by all tokens of their sample, and attend
    to all of them.

    Args:
      heads: some heads of the layer.
      layout: tiles of the samples; None if none has any.
      segments: positions of the samples; None for rows of one sample each.
      choice: how blocks are chosen.
      part: which queries of the samples the heads have; None for all.

    Returns:
      [R, S, H, head_dim].
    """
    assert heads.value is not None
    arrays = (heads.query, heads.key, heads.value)
    if layout is None:
        return _dense(choice, *arrays, segments)
    queries = layout if part is None else part.layout
    query, key, value = map(to_tiles, arrays, (queries, layout, layout))
    lists, tiles = _lists(heads, layout, choice, part), layout.condition
    if tiles is not None:
        lists = with_condition_blocks(lists, layout, queries)
        key, value = (
            jnp.concatenate([latents, to_tiles(each, tiles)], axis=1)
            for latents, each in ((key, heads.key), (value, heads.value))
        )
    output = from_tiles(block_sparse_attention(query, key, value, lists), queries)
    if (tiles := queries.condition) is not None:
        assert segments is not None
        asking = to_tiles(heads.query, tiles)
        seen = _dense(choice, asking, *arrays[1:], to_samples(tiles, segments))
        output = output + from_tiles(seen, tiles)
    if layout.covers_all:
        return output
    assert segments is not None
    # The samples without tiles: their latents have fewer than `min_tokens` tokens.
    shortest = choice.config.min_tokens
    if layout.condition is None:
        untiled = segments.only(segments.key.length < shortest, shortest - 1)
    else:
        tiled = layout.of_slots(segments.key.length.shape[1]).any(axis=-1)
        beside = layout.longest_condition * layout.block
        untiled = segments.only(~tiled, shortest - 1 + beside)
    return output + _dense(choice, *arrays, untiled)


def measure(
    heads: Heads, layout: TileLayout | None, segments: AttentionSegments | None, choice: Choice
) -> Profile:
    """Profile of the samples that have tiles, by segment: [R, M, ...]; arguments as `attend`."""
    slots = 1 if segments is None else segments.query.offset.shape[1]
    if layout is None:
        return _no_profile((len(heads.query), slots), len(heads.number))
    query, key = (whole_blocks(x, layout) for x in (heads.query, heads.key))
    sample = sample_attention(query, key, layout, choice.measured, choice.config)
    of_block = jnp.take_along_axis(layout.segments, sample.block, axis=1)
    sampled = of_block[..., None] == jnp.arange(slots)
    return profile(sample, _scores(heads, layout, choice), sampled, choice.config)


def _dense(
    choice: Choice,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: AttentionSegments | None,
) -> jax.Array:
    assert segments is not None
    return attention(query, key, value, segments, implementation=choice.implementation)


def _scores(
    heads: Heads, layout: TileLayout, choice: Choice, part: PartOfGroup | None = None
) -> PooledScores | jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), choice.step), choice.layer)
    return block_scores(choice.config, heads.features, layout, heads.number, key, part)


def _lists(
    heads: Heads, layout: TileLayout, choice: Choice, part: PartOfGroup | None
) -> BlockLists:
    """The chosen blocks, named so that a recomputed layer cannot choose otherwise.

    They are kept in an array of the layer's longest lists, which the branches of a conditional
    share.
    """
    density = jnp.ones_like(heads.density) if choice.config.selector == "all" else heads.density
    most, kept = (
        min(layout.blocks, math.ceil(density * layout.longest))
        for density in (choice.list_density, choice.config.list_densities()[0])
    )
    segments = layout.segments
    same = (segments[:, :, None] == segments[:, None]) & (layout.tokens[:, None] > 0)
    blocks_of_segment = same.sum(axis=-1, dtype=jnp.int32)
    share = density[None, :, None] * blocks_of_segment[:, None]
    scores = _scores(heads, layout, choice, part)
    number = jnp.clip(jnp.ceil(share).astype(jnp.int32), 1, most)
    choose = partial(top_k_blocks, k_max=most, query_block=layout.block, key_block=layout.block)
    if part is None:
        own = BlockSegments(segments, segments)
        lists = choose(scores, number, own, layout.tokens, layout.tokens)
    else:
        lists = _lists_of_part(choose, scores, number, layout, part)
    # Half the bytes of int32 wherever a row has fewer than 4 million tokens.
    small = jnp.uint16 if layout.blocks <= jnp.iinfo(jnp.uint16).max else jnp.int32
    indices = jnp.pad(lists.indices.astype(small), ((0, 0),) * 3 + ((0, kept - most),))
    indices = checkpoint_name(indices, BLOCK_LISTS)[..., :most].astype(jnp.int32)
    return replace(lists, indices=indices, counts=checkpoint_name(lists.counts, BLOCK_LISTS))


def _lists_of_part(
    choose: Callable[..., BlockLists],
    scores: PooledScores | jax.Array,
    number: jax.Array,
    layout: TileLayout,
    part: PartOfGroup,
) -> BlockLists:
    """Chooses for some blocks of queries alone.

    Blocks of keys are numbered from the first block of queries on, so that the block with the own
    tokens of a block of queries has its number.
    """
    back = partial(jnp.roll, shift=-part.first)
    if isinstance(scores, PooledScores):
        scores = PooledScores(part.cut(scores.queries, 1), back(scores.keys, axis=1))
    else:
        scores = back(part.cut(scores, 2), axis=3)
    segments = BlockSegments(part.layout.segments, back(layout.segments, axis=1))
    tokens = part.layout.tokens, back(layout.tokens, axis=1)
    lists = choose(scores, part.cut(number, 2), segments, *tokens)
    indices = (lists.indices + part.first) % layout.blocks
    return replace(lists, indices=indices, key_tokens=layout.tokens)


# ---------------------------------------------------------------- samples over a context group


_PAIR_FLOPS = 14
"""Of attention for each channel of a pair, forward and backward: seven products."""


def head_exchanges(ranks: int, heads: int) -> list[int]:
    """The two largest numbers of neighbouring ranks that may exchange heads, which divide both.

    Each is compiled. The fewer ranks, the more time and memory keys and values take.

    Args:
      ranks: of a context group.
      heads: of a rank before the exchange.
    """
    most = math.gcd(ranks, heads)
    return [each for each in range(most, 0, -1) if most % each == 0][:2]


def exchange_seconds(
    density: jax.Array,
    split: SplitRows,
    *,
    exchanged: int,
    ranks: int,
    channels: int,
    itemsize: int,
    device: Device,
) -> jax.Array:
    """Predicted seconds of a layer's attention to split samples, on the slowest rank.

    Args:
      density: [n, H] of the heads that each of n tensor ranks has before the exchange.
      split: the samples.
      exchanged: ranks that exchange heads. The fewer they are, the less unlike are their sums of
        densities, but the more keys and values are sent.
      ranks: of a context group.
      channels: of a head.
      itemsize: bytes of a value.
      device: its rates.
    """
    ids = split.split.ids
    keys = jnp.where(ids == PADDING, 0, to_tokens(split.split.length, ids))
    pairs = keys.reshape(len(keys), ranks // exchanged, -1).sum(axis=-1, dtype=jnp.float32).max()
    order = jax.vmap(partial(balanced_order, ranks=exchanged))(density)
    by_rank = jnp.take_along_axis(density, order, axis=1).reshape(len(density), exchanged, -1)
    load = by_rank.sum(axis=-1).max()
    computed = _PAIR_FLOPS * channels * pairs * load / (device.peak_flops * device.attention_share)
    arrays = 4 * itemsize * split.split_tokens * density.shape[1] * channels
    return computed + 2 * sent_share(ranks, exchanged) * arrays / device.link_bandwidth


def balanced_order(cost: jax.Array, ranks: int) -> jax.Array:
    """Orders heads so that equal consecutive parts of them have about the same total cost.

    Longest processing time first: the most costly head left goes to the rank with the least cost
    so far that has room, as each rank has the same number of heads (DSV, arXiv 2502.07590,
    section 5).

    Args:
      cost: [H] float32, at least 0.
      ranks: number of parts; it divides H.

    Returns:
      [H] int32, the heads of the first rank, then those of the second, and so on.
    """
    heads = len(cost)
    room = heads // ranks
    falling = jnp.argsort(-cost, stable=True).astype(jnp.int32)

    def give(
        place: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        order, load, count = state
        head = falling[place]
        rank = jnp.argmin(jnp.where(count < room, load, jnp.inf))
        order = order.at[rank * room + count[rank]].set(head)
        return order, load.at[rank].add(cost[head]), count.at[rank].add(1)

    none = jnp.zeros(ranks, jnp.int32)
    start = (jnp.zeros(heads, jnp.int32), jnp.zeros(ranks, jnp.float32), none)
    # Unrolled, as an iteration is less work than the launch of one.
    return jax.lax.fori_loop(0, heads, give, start, unroll=True)[0]


def attend_split(heads: Heads, packed: PackedMetadata, choice: Choice, exchanged: int) -> jax.Array:
    """`attend` for the row of one rank, [1, T, H, head_dim]. It must run inside `shard_map`.

    Args:
      heads: the heads of the rank's row.
      packed: the row's samples.
      choice: how blocks are chosen.
      exchanged: how many neighbouring ranks exchange heads, in parts of the group. A part has its
        own queries and the keys and values of the group.
    """
    split = packed.split
    assert split is not None
    count, order = split.split_tokens, jnp.arange(len(heads.number), dtype=jnp.int32)
    if choice.config.balance_heads and exchanged > 1:
        order = balanced_order(heads.density, exchanged)
    back = jnp.argsort(order)

    def together(x: jax.Array) -> jax.Array:
        return x if exchanged == 1 else tokens_together(_taken(x, order, back), exchanged)

    front = _of_rank(_of_tokens(heads, slice(None, count), together), order, exchanged)
    layout, segments = _group_rows(split)
    part = None
    if exchanged < jax.lax.axis_size(CONTEXT):
        number = jax.lax.axis_index(CONTEXT) // exchanged
        front = _with_keys_of_group(front, exchanged)
        segments = split.from_part(number, exchanged)
        if layout is not None:
            slots = split.split.length.shape[1]
            own = layout.from_part(number, exchanged * count, slots)
            part = PartOfGroup(*own, exchanged)
    output = heads_together(attend(front, layout, segments, choice, part), exchanged)
    outputs = [output if exchanged == 1 else _taken(output, back, order)]
    if count < heads.query.shape[1]:
        behind = _of_tokens(heads, slice(count, None), lambda x: x)
        outputs.append(attend(behind, *_own_rows(split), choice))
    return jnp.concatenate(outputs, axis=1)


def measure_split(heads: Heads, packed: PackedMetadata, choice: Choice) -> Profile:
    """`measure` for the row of one rank, [1, M, ...]. It must run inside `shard_map`.

    Each part of a split sample has the values of the sample.
    """
    split = packed.split
    assert split is not None
    count = split.split_tokens
    order = jnp.arange(len(heads.number), dtype=jnp.int32)
    exchanged = math.gcd(jax.lax.axis_size(CONTEXT), len(order))

    def together(x: jax.Array) -> jax.Array:
        return parts_together(tokens_together(x, exchanged), exchanged)

    front = _of_rank(_of_tokens(heads, slice(None, count), together), order, exchanged)
    group = measure(front, *_group_rows(split), choice)
    # [1, M, H / n] of each rank → [1, M, H].
    gather = partial(gathered_heads, together=exchanged)
    group = Profile(group.found, *map(gather, group[1:]))
    offset, exists = packed.tokens.offset, packed.tokens.length > 0
    # A part's place among the group's tokens is in its sample's segment.
    place = jax.lax.axis_index(CONTEXT) * count + jnp.minimum(offset, count - 1)
    in_front = exists & (offset < count)
    found = _of_slots(group, split.split.ids, place, in_front)
    if count == heads.query.shape[1]:
        return found
    behind = _of_tokens(heads, slice(count, None), lambda x: x)
    own = measure(behind, *_own_rows(split), choice)
    place = jnp.maximum(offset - count, 0)
    own = _of_slots(own, split.whole.ids, place, exists & ~in_front)
    return jax.tree.map(jnp.add, found, own)


def _group_rows(split: SplitRows) -> tuple[TileLayout | None, AttentionSegments]:
    """Tiles and segments of the group's split tokens."""
    return split.tiles and split.tiles.split, split.within_split()


def _own_rows(split: SplitRows) -> tuple[TileLayout | None, AttentionSegments]:
    """Tiles and segments of the row's other tokens."""
    return split.tiles and split.tiles.whole, split.within_whole()


def _of_tokens(heads: Heads, tokens: slice, change: Callable[[jax.Array], jax.Array]) -> Heads:
    """The heads of some tokens, each array changed."""
    arrays = (heads.query, heads.key, heads.value, heads.features)
    query, key, value, features = jax.tree.map(lambda x: change(x[:, tokens]), arrays)
    return Heads(query, key, value, features, heads.density, heads.number)


def _with_keys_of_group(heads: Heads, exchanged: int) -> Heads:
    """With the keys, values and features of keys of all split tokens of the group."""
    assert heads.value is not None
    key, value = (parts_together(x, exchanged) for x in (heads.key, heads.value))
    features = heads.features
    if features is not None:
        features = features._replace(key=parts_together(features.key, exchanged))
    return heads._replace(key=key, value=value, features=features)


def _of_rank(heads: Heads, order: jax.Array, exchanged: int) -> Heads:
    """With density and number of this rank's heads alone."""
    size = len(order) // exchanged
    place = jax.lax.axis_index(CONTEXT) % exchanged * size
    own = jax.lax.dynamic_slice_in_dim(order, place, size)
    return heads._replace(density=heads.density[own], number=heads.number[own])


def _of_slots(profile: Profile, ids: jax.Array, place: jax.Array, counted: jax.Array) -> Profile:
    """Values of the segments at these places, [1, M, ...]; zeros where they do not count."""
    segment = jnp.take_along_axis(ids, place, axis=1)
    counted = counted & (segment != PADDING)

    def of_slots(values: jax.Array) -> jax.Array:
        taken = to_tokens(values, segment)
        return jnp.where(counted.reshape(*counted.shape, *(1,) * (taken.ndim - 2)), taken, 0)

    return jax.tree.map(of_slots, profile)


@with_inverse
def _taken(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """Heads of x [R, S, H, ...] in an order."""
    return jnp.take(x, order, axis=2, unique_indices=True)
