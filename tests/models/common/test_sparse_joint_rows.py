"""Sparse attention of rows that hold conditions too, against a mask over all pairs of tokens."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alload_jax.models.common.attention import attention, xla_packed
from alload_jax.models.common.joint_rows import bucketed_joint_rows, packed_joint_rows
from alload_jax.models.common.segments import (
    PADDING,
    PackedMetadata,
    TiledSegment,
    empty_layout,
    joint_clip_layout,
    lay_out,
    segments_of,
)
from alload_jax.models.common.sparse_attention import SparseAttentionConfig
from alload_jax.models.common.sparse_attention.layer import Choice, Heads, attend
from alload_jax.models.common.sparse_attention.selectors import Features

HEADS, WIDTH, BLOCK = 2, 4, 64
DENSITY = 0.4


class Sample(NamedTuple):
    """(t, h, w) of the latents; tokens of the condition, and room for them."""

    grid: tuple[int, int, int]
    condition: int
    room: int

    @property
    def latents(self):
        return int(np.prod(self.grid))


LONG, OTHER = Sample((4, 9, 10), 70, 75), Sample((5, 8, 8), 0, 3)
SHORT = Sample((1, 5, 5), 9, 9)


def config(**fields):
    loose = {"forced": (DENSITY,), "min_tokens": 100}
    return SparseAttentionConfig(**loose | fields)


def packed_case():
    """A row of samples, some too short for tiles, and one of none; joint metadata."""
    samples = [LONG, SHORT, OTHER]
    ends = np.cumsum([sample.latents + sample.room for sample in samples])
    offsets, tokens = [0, *ends[:-1].tolist()], int(ends[-1]) + 7
    table = np.zeros((2, 2, 4), np.int32)
    conditions = np.zeros_like(table)
    for slot, (sample, offset) in enumerate(zip(samples, offsets, strict=True)):
        table[:, 0, slot] = offset, sample.latents
        conditions[:, 0, slot] = conditions[1, 0].sum(), sample.condition
    segments = [TiledSegment(n, offsets[n], samples[n].grid) for n in (0, 2)]
    layout = empty_layout(2, tokens, 14, BLOCK)
    lay_out(layout, 0, segments)
    layout = dataclasses.replace(
        layout, longest=6, covers_all=False, condition_blocks=4, longest_condition=2
    )
    condition = segments_of(conditions, 90)
    metadata = PackedMetadata(
        *(segments_of(table, tokens), condition, None, (9, 9, 9)),
        lengths=((0, 4), (500, 0)),
        longest_condition=80,
        row_tiles=layout,
    )
    rows = packed_joint_rows(jax.tree.map(jnp.asarray, metadata), condition)
    return rows, xla_packed, [(0, *each) for each in zip(samples, offsets, strict=True)]


def bucketed_case():
    """Rows of one size, whose conditions have other lengths."""
    layout = joint_clip_layout(LONG.grid, BLOCK, 75)
    table = np.array([[[0], [0], [0]], [[70], [0], [75]]], np.int32)
    rows = bucketed_joint_rows(LONG.latents, segments_of(table, 75), layout.of_rows(3))
    samples = [(n, LONG._replace(condition=int(table[1, n, 0])), 0) for n in range(3)]
    return rows, partial(attention, implementation="xla"), samples


def allowed_pairs(rows, samples, heads, density):
    """[R, H, T, T] bool: the best tiles of the sample and its condition; conditions all of it."""
    layout = rows.packed.row_tiles
    source = np.asarray(layout.source).reshape(*layout.tokens.shape, BLOCK)
    query, key = (np.asarray(part, np.float64) for part in heads)
    shape = (query.shape[0], HEADS, query.shape[1], query.shape[1])
    allowed = np.zeros(shape, bool)
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


def masked(query, key, value, allowed):
    logits = jnp.einsum("rshd,rthd->rhst", query, key) / np.sqrt(WIDTH)
    some = allowed.any(axis=-1, keepdims=True)
    logits = jnp.where(allowed, logits, jnp.where(some, -jnp.inf, 0.0))
    output = jnp.einsum("rhst,rthd->rshd", jax.nn.softmax(logits, axis=-1), value)
    return jnp.where(some[..., 0].transpose(0, 2, 1)[..., None], output, 0)


@pytest.mark.parametrize("make", [packed_case, bucketed_case])
@pytest.mark.parametrize("selector", ["pooled", pytest.param("all", marks=pytest.mark.slow)])
def test_latents_attend_to_chosen_tiles_and_conditions_to_all(make, selector):
    rows, within, samples = make()
    settings = config(selector=selector)
    density = 1.0 if selector == "all" else DENSITY
    row_count, tokens = rows.packed.tokens.ids.shape
    rng = np.random.default_rng(0)
    *arrays, weight = rng.normal(size=(4, row_count, tokens, HEADS, WIDTH)).astype(np.float32)
    arrays[1] += rng.normal(size=(row_count, 1, HEADS, WIDTH))  # scores that are far apart
    allowed = allowed_pairs(rows, samples, arrays[:2], density)
    state = jnp.zeros((3,), jnp.int32)

    def sparse(arrays):
        query, key, value = arrays
        features = Features(query, key) if selector == "pooled" else None
        numbers = jnp.arange(HEADS)
        heads = Heads(query, key, value, features, jnp.full(HEADS, DENSITY), numbers)
        layout, segments = rows.packed.row_tiles, rows.packed.within_tokens()
        found = attend(heads, layout, segments, Choice(settings, density, within, *state))
        return jnp.sum(found * weight), found

    def expected(arrays):
        found = masked(*arrays, allowed)
        return jnp.sum(found * weight), found

    with jax.default_matmul_precision("highest"):
        (_, ours), grads = jax.jit(jax.value_and_grad(sparse, has_aux=True))(arrays)
        (_, theirs), exact = jax.jit(jax.value_and_grad(expected, has_aux=True))(arrays)
    valid = np.asarray(rows.packed.tokens.ids != PADDING)
    np.testing.assert_array_equal(np.asarray(ours)[~valid], 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for one, other in zip(grads, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
