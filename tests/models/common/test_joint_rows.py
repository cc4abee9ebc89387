"""Condition tokens whose number differs by sample, and rows in which they attend with others."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import graded, laid_out, masked, same_sample
from jax.sharding import NamedSharding

from alload_jax.models.common import attention as attentions
from alload_jax.models.common.attention import attention, triton_packed
from alload_jax.models.common.embedding import ConditionTokens, mean_by_sample, side_by_side
from alload_jax.models.common.segments import (
    PADDING,
    PackedMetadata,
    SplitRows,
    TiledSegment,
    bucketed_joint_rows,
    clip_layout,
    empty_layout,
    lay_out,
    packed_joint_rows,
    to_samples,
)
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.sparse_attention.layer import Choice, Heads, attend
from alload_jax.models.common.sparse_attention.selectors import Features
from alload_jax.sharding.mesh import BATCH_AXES, MeshConfig, make_mesh


def test_dropped_samples_have_no_tokens_and_others_all():
    segments = laid_out([[(0, 2), (4, 3)], [(0, 4), (4, 0)]], 2, 8)
    tokens = ConditionTokens(np.ones((2, 8, 3), np.float32), segments)
    dropped = tokens.without(jnp.asarray([[True, False], [False, True]])).segments
    assert dropped.length.tolist() == [[0, 3], [4, 0]]
    expected = np.where([[False] * 4 + [True] * 4, [True] * 4 + [False] * 4], segments.ids, PADDING)
    np.testing.assert_array_equal(dropped.ids, expected)


def test_side_by_side_keeps_every_token_and_means_are_of_each_sample():
    rng = np.random.default_rng(0)
    lengths = np.array([[[2, 0, 3], [1, 4, 0]], [[0, 0, 4], [3, 1, 2]]])
    parts = []
    for each in lengths:
        spans = [[(4 * slot, length) for slot, length in enumerate(row)] for row in each]
        segments = laid_out(spans, 3, 12)
        values = rng.normal(size=(2, 12, 3)).astype(np.float32)
        values[segments.ids == PADDING] = np.nan
        parts.append(ConditionTokens(values, segments))
    joined, means = side_by_side(parts), mean_by_sample(parts[0])
    expected, ids = np.zeros((2, 24, 3), np.float32), np.full((2, 24), PADDING)
    for row in range(2):
        at = 0
        for slot in range(3):
            own = [
                part.values[row, 4 * slot :][: part.segments.length[row, slot]] for part in parts
            ]
            end = at + sum(map(len, own))
            expected[row, at:end], ids[row, at:end] = np.concatenate(own), slot
            mean = own[0].mean(axis=0) if len(own[0]) else np.zeros(3)
            np.testing.assert_allclose(means[row, slot], mean, rtol=1e-5, atol=1e-6)
            place = joined.segments.offset[row, slot], joined.segments.length[row, slot]
            assert place == (at, end - at)
            at = end
    np.testing.assert_array_equal(joined.values, expected)
    np.testing.assert_array_equal(joined.segments.ids, ids)


HEADS, CHANNELS, BLOCK, DENSITY = 2, 4, 64, 0.4


class Sample(NamedTuple):
    """(t, h, w) of the latents; tokens of the condition, and room for them."""

    grid: tuple[int, int, int]
    condition: int
    room: int

    @property
    def latents(self):
        return int(np.prod(self.grid))


LONG, OTHER = Sample((4, 9, 10), 70, 75), Sample((5, 8, 8), 1, 3)
SHORT = Sample((1, 5, 5), 9, 9)


def packed_case():
    """A row of samples, some too short for tiles, and one of none; joint metadata."""
    samples = [LONG, SHORT, OTHER]
    ends = np.cumsum([sample.latents + sample.room for sample in samples])
    offsets, tokens = [0, *ends[:-1].tolist()], int(ends[-1]) + 7
    latents = [(offset, each.latents) for offset, each in zip(offsets, samples, strict=True)]
    layout = empty_layout(2, tokens, 14, BLOCK)
    lay_out(layout, 0, [TiledSegment(n, offsets[n], samples[n].grid) for n in (0, 2)])
    layout = dataclasses.replace(
        layout, longest=6, covers_all=False, condition_blocks=5, longest_condition=2
    )
    condition = laid_out([[(0, 70), (70, 9), (79, 1)], []], 4, 90)
    metadata = PackedMetadata(
        *(laid_out([latents, []], 4, tokens), condition, None, (9, 9, 9)),
        lengths=((0, 4), (500, 0)),
        longest_condition=80,
        row_tiles=layout,
    )
    rows = packed_joint_rows(jax.tree.map(jnp.asarray, metadata), condition)
    return rows, [(0, *each) for each in zip(samples, offsets, strict=True)]


def bucketed_case():
    """Rows of one size, whose conditions have other lengths."""
    layout = clip_layout(LONG.grid, BLOCK, 75)
    condition = laid_out([[(0, 70)], [(0, 0)], [(0, 75)]], 1, 75)
    rows = bucketed_joint_rows(LONG.latents, condition, layout.of_rows(3))
    samples = [(n, LONG._replace(condition=each), 0) for n, each in enumerate((70, 0, 75))]
    return rows, samples


def allowed_pairs(rows, samples, heads, density):
    """[R, H, T, T] bool: the best tiles of the sample and its condition; conditions all of it."""
    layout = rows.packed.row_tiles
    source = np.asarray(layout.source).reshape(*layout.tokens.shape, BLOCK)
    query, key = (np.asarray(part, np.float64) for part in heads)
    allowed = np.zeros((query.shape[0], HEADS, query.shape[1], query.shape[1]), bool)
    for row, sample, offset in samples:
        latents = np.arange(offset, offset + sample.latents)
        condition = latents[-1] + 1 + np.arange(sample.condition)
        everything = np.concatenate([latents, condition])
        tiles = [tile[tile >= 0] for tile in source[row]]
        tiles = [tile for tile in tiles if len(tile) and offset <= tile[0] <= latents[-1]]
        allowed[np.ix_([row], range(HEADS), condition, everything)] = True
        if not tiles:
            allowed[np.ix_([row], range(HEADS), everything, everything)] = True
        else:
            assert sorted(np.concatenate(tiles)) == latents.tolist()
        keep = int(np.ceil(density * len(tiles)))
        for head in range(HEADS):
            means = [[x[row, tile, head].mean(0) for tile in tiles] for x in (query, key)]
            for number, tile in enumerate(tiles):
                scores = np.array([means[0][number] @ mean for mean in means[1]])
                scores[number] = np.inf  # its own is always one of them
                chosen = [tiles[n] for n in np.argsort(-scores)[:keep]]
                keys = np.concatenate([*chosen, condition])
                allowed[np.ix_([row], [head], tile, keys)] = True
    return jnp.asarray(allowed)


def test_conditions_that_attend_to_their_samples_keep_the_bounds_of_lengths():
    found = jax.jit(lambda packed: to_samples(packed.row_tiles.condition, packed.within_tokens()))(
        packed_case()[0].packed
    )
    for side in (found.query, found.key):
        for row, places in enumerate(zip(*side[:2], strict=True)):
            for slot, (offset, length) in enumerate(zip(*places, strict=True)):
                own = np.flatnonzero(side.ids[row] == slot)
                np.testing.assert_array_equal(own, offset + np.arange(length))
    assert found.query.length.tolist() == [[70, 0, 1, 0], [0] * 4]
    assert found.lengths == ((0, 4), (2 * BLOCK, 0))
    assert found.key.length.max() <= found.longest_key


@pytest.mark.parametrize(
    ("make", "selector"),
    [
        (packed_case, "pooled"),
        (bucketed_case, "pooled"),
        pytest.param(packed_case, "all", marks=pytest.mark.slow),
    ],
)
def test_latents_attend_to_chosen_tiles_and_conditions_to_all(make, selector, monkeypatch):
    # Unlike XLA's attention, the kernels' needs the bounds of lengths.
    monkeypatch.setattr(attentions, "xla_packed", partial(triton_packed, implementation="xla"))
    rows, samples = make()
    settings = SparseAttentionConfig(forced=(DENSITY,), min_tokens=100, selector=selector)
    density, ids = 1.0 if selector == "all" else DENSITY, rows.packed.tokens.ids
    rng = np.random.default_rng(0)
    arrays = list(rng.normal(size=(3, *ids.shape, HEADS, CHANNELS)).astype(np.float32))
    arrays[1] += rng.normal(size=(len(ids), 1, HEADS, CHANNELS))  # scores that are far apart
    allowed = allowed_pairs(rows, samples, arrays[:2], density)
    choice = Choice(settings, density, "xla", *jnp.zeros((3,), jnp.int32))

    def sparse(query, key, value):
        features = Features(query, key) if selector == "pooled" else None
        densities, numbers = jnp.full(HEADS, DENSITY), jnp.arange(HEADS)
        heads = Heads(query, key, value, features, densities, numbers)
        return attend(heads, rows.packed.row_tiles, rows.packed.within_tokens(), choice)

    found, expected = graded(sparse, arrays), graded(lambda *p: masked(*p, allowed), arrays)
    np.testing.assert_array_equal(np.asarray(found[0])[np.asarray(ids) == PADDING], 0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


SLOTS, BEHIND = 4, 12


class Piece(NamedTuple):
    """Tokens of a sample's latents, room for those of its condition, and those that there are."""

    latents: int
    room: int
    condition: int


GROUPS = {
    "condition over a border": (8, [Piece(7, 4, 4), Piece(3, 1, 1)], [Piece(5, 3, 2)] * 2),
    "condition on ranks without latents": (
        4,
        [Piece(3, 12, 11), Piece(1, 0, 0)],
        [Piece(2, 6, 5), Piece(9, 2, 0)] * 2,
    ),
    "dropped condition": (10, [Piece(14, 4, 0), Piece(1, 1, 1)], [Piece(6, 4, 0)] * 2),
    "several in a region": (
        9,
        [Piece(2, 2, 1), Piece(1, 3, 3), Piece(8, 2, 2)],
        [Piece(11, 1, 1)] * 2,
    ),
}
"""Tokens of a region, split samples one after another, and a whole one behind on each rank."""


class Laid(NamedTuple):
    """A group in rows, and where the tokens of each sample are, as (row, token).

    `copies`: of its condition, a list for every rank that has one; `joined`: the copy of each token
    that is in the rank's own row.
    """

    metadata: PackedMetadata
    latents: list
    copies: list
    joined: list


def laid_group(region, split, whole):
    """The metadata as a collator makes it."""
    ranks, together = len(whole), len(whole) * region
    tokens, conditions = ([[] for _ in range(ranks)] for _ in range(2))
    slots, places = np.full((ranks, SLOTS), PADDING, np.int32), Laid(None, [], [], [])
    starts, start = [], 0

    def add(rank, offset, count, condition):
        begin = sum(each for _, each in conditions[rank])
        tokens[rank].append((offset, count))
        conditions[rank].append((begin, condition))
        return [(rank, begin + n) for n in range(condition)]

    for number, sample in enumerate(split):
        starts.append((start, sample.latents))
        all_places = [divmod(start + n, region) for n in range(sample.latents + sample.room)]
        copies = {}
        for rank in sorted({rank for rank, _ in all_places}):
            own = [(n, at) for n, (r, at) in enumerate(all_places) if r == rank]
            slots[rank, len(tokens[rank])] = number
            count = sum(n < sample.latents for n, _ in own)
            copies[rank] = add(rank, own[0][1], count, sample.condition)
        behind = all_places[sample.latents : sample.latents + sample.condition]
        places.latents.append(all_places[: sample.latents])
        places.copies.append(list(copies.values()))
        places.joined.append([copies[rank][n] for n, (rank, _) in enumerate(behind)])
        start += sample.latents + sample.room
    for rank, sample in enumerate(whole):
        copy = add(rank, region, sample.latents, sample.condition)
        places.latents.append([(rank, region + n) for n in range(sample.latents)])
        places.copies.append([copy])
        places.joined.append(copy)
    rows = SplitRows(
        laid_out([[(0, sample.latents)] for sample in whole], 1, BEHIND),
        laid_out([starts] * ranks, SLOTS, together),
        region,
        (((0, 1), (BEHIND, 0)), ((0, len(split)), (together, 0))),
        slots=slots,
    )
    room = max(sum(each for _, each in row) for row in conditions) + 1
    both = laid_out(tokens, SLOTS, region + BEHIND), laid_out(conditions, SLOTS, room)
    metadata = PackedMetadata(*both, rows, (1, 1, 1), ((0, SLOTS), (together, 0)), room)
    return places._replace(metadata=metadata)


@pytest.mark.skipif(
    len(jax.devices()) < 8 or jax.default_backend() != "cpu", reason="needs 8 CPU devices"
)
@pytest.mark.parametrize("name", GROUPS)
def test_split_samples_attend_to_their_conditions_as_whole_ones(name):
    laid, ranks = laid_group(*GROUPS[name]), len(GROUPS[name][2])
    mesh = make_mesh(MeshConfig(context=ranks), jax.devices()[:ranks])
    sharding = NamedSharding(mesh, jax.P(BATCH_AXES))
    metadata, rng = jax.device_put(laid.metadata, sharding), np.random.default_rng(0)
    widths = [part.ids.shape[1] for part in (laid.metadata.tokens, laid.metadata.condition)]
    both = rng.normal(size=(3, ranks, sum(widths), 4, 2)).astype(np.float32)
    sample = np.full((ranks, sum(widths)), PADDING)
    for number, places in enumerate(zip(laid.latents, laid.copies, laid.joined, strict=True)):
        latents, copies, joined = places
        for rank, token in [*latents, *((rank, widths[0] + n) for rank, n in joined)]:
            sample[rank, token] = number
        for copy in filter(None, copies):  # every rank computes the same
            for (rank, token), (first, other) in zip(copy, copies[0], strict=True):
                both[:, rank, widths[0] + token] = both[:, first, widths[0] + other]

    with pytest.raises(ValueError, match="give their sharding"):
        packed_joint_rows(metadata, metadata.condition)

    def jointly(*heads):
        rows = packed_joint_rows(metadata, metadata.condition, sharding)
        joined = (rows.join(part[:, : widths[0]], part[:, widths[0] :]) for part in heads)
        mixed = attention(*joined, segments=rows.segments, sharding=sharding)
        tokens, condition = rows.separate(mixed, widths[0])
        valid = metadata.tokens.ids[..., None, None] != PADDING
        return jnp.concatenate([jnp.where(valid, tokens, 0), condition], axis=1)

    # Copies on other ranks and padding are zero: nothing of them reaches an output.
    found = graded(jointly, jax.device_put(list(both), sharding))
    flat = [jnp.asarray(part).reshape(1, -1, *part.shape[2:]) for part in both]
    allowed = same_sample(sample.reshape(1, -1), sample.reshape(1, -1))
    for ours, theirs in zip(found, graded(lambda *p: masked(*p, allowed), flat), strict=True):
        ours = np.reshape(ours, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
