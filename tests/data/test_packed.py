"""Packed rows contain every sample at its planned position, and padding elsewhere."""

import dataclasses
import itertools

import jax
import numpy as np
from data_helpers import NULL_LABEL, PATCH, SpyReader, classes, manifest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.batch import signature
from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for, samples_for
from alload_jax.data.packed import THINNED
from alload_jax.data.record import SampleForm
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.parts import patchify
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig

MODEL = WanConfig(dim=16, num_heads=2, num_layers=1, patch_size=PATCH)
TILED = dataclasses.replace(MODEL, sparse_attention=SparseAttentionConfig(min_tokens=8))
JOINT = HunyuanVideoConfig(
    dim=16, num_heads=2, num_layers=1, patch_size=PATCH, in_channels=3, out_channels=1,
    text=TextConfig(4, 5), glyphs=TextConfig(2, 3), image=ImageConfig(5), rotary_dims=(4, 2, 2),
)  # fmt: skip
FORM = SampleForm(4, 2, (3, 5), (("glyphs", 2),))
SIZES = [(1, 2, 2), (1, 4, 4), (1, 4, 8), (5, 4, 4), (5, 8, 6), (9, 2, 2)]


@st.composite
def packed_cases(draw, ranks=(1, 2, 4)):
    lengths = st.integers(0, 3)
    rows = draw(st.lists(st.tuples(st.sampled_from(SIZES), lengths, lengths), min_size=1))
    *sizes_and_texts, glyphs = zip(*rows, strict=True)
    model = draw(st.sampled_from([MODEL, TILED, JOINT]))
    form = (FORM, np.array(glyphs)[:, None]) if model is JOINT else ()
    manifest = manifest_of(*sizes_and_texts, *form)
    conditions = classes(draw(st.integers(0, 2)) + manifest.longest_text(), images=True)
    if model is JOINT:
        conditions = conditions_for(model, manifest)
    align = draw(st.sampled_from([1, 1, 8]))
    policy = draw(st.sampled_from(["first_fit", "balanced"]))
    ranks = draw(st.sampled_from(ranks))
    config = PlanningConfig(
        policy=policy,
        context=draw(st.sampled_from([1, ranks])) if policy == "balanced" else 1,
        split_above=draw(st.sampled_from([1.0, 0.0])),
        m_mem=draw(st.integers(72, 150)) // align * align,
        align=align,
        max_segments=draw(st.sampled_from([None, 3])),
        micro_batches_per_step=draw(st.integers(1, 2)),
        ranks=ranks,
        look_ahead=2,
    )
    samples = samples_for(model, manifest, conditions, packed=True)
    plan = make_plan(config, samples, 1, draw(st.integers(0, 9)))
    return manifest, plan, collation_for(plan, manifest, model, conditions)


def region_of(batch):
    split = batch.metadata.split
    return split.split_tokens if split else 0


def collated(case, ranks=None, damaged=(), epochs=1):
    manifest, plan, collation = case
    wanted = frozenset(range(plan.topology.ranks) if ranks is None else ranks)
    collate = Collator(SpyReader(manifest, damaged), wanted, collation)
    steps = itertools.takewhile(lambda number: plan.locate(number)[0] < epochs, itertools.count())
    return [collate(plan.step(number)) for number in steps]


def samples_in(batch):
    """(sample, row, slot, slice of its tokens) of every sample."""
    for row, slot in zip(*np.nonzero(batch.weight), strict=True):
        begin = batch.metadata.tokens.offset[row, slot]
        here = slice(begin, begin + batch.metadata.tokens.length[row, slot])
        yield batch.sample[row, slot], row, slot, here


def bounded(batch):
    """(segments, their static lengths) of each attention of tokens to tokens."""
    split = batch.metadata.split
    parts = zip((split.whole, split.split), split.lengths, strict=True) if split else ()
    return [(batch.metadata.tokens, batch.metadata.lengths), *parts]


def conditions_of(batch):
    """(segments, values) of each kind of condition tokens, by name."""
    if not isinstance(batch.condition, dict):
        return {"labels": (batch.metadata.condition, batch.condition)}
    return {name: (part.segments, part.values) for name, part in batch.condition.items()}


def holds_samples_in_segments_and_padding_in_none(batch, length):
    sides = [segments for segments, _ in (*conditions_of(batch).values(), *bounded(batch))]
    for segments in sides:
        for row, ids in enumerate(segments.ids):
            used = segments.length[row] > 0
            assert isinstance(batch.condition, dict) or (used[:-1] >= used[1:]).all()
            counts = np.bincount(ids[ids >= 0], minlength=len(used))
            assert (counts == segments.length[row]).all()
            begins = [np.argmax(ids == slot) for slot in np.flatnonzero(used)]
            assert begins == segments.offset[row, used].tolist()
    used = batch.metadata.tokens.length > 0
    assert (used == (batch.weight > 0)).all()
    assert isinstance(batch.condition, dict) or (batch.sample[~used] == -1).all()
    assert (batch.metadata.condition.length == used * length).all()
    for array in (batch.tokens, batch.given):
        assert not array[batch.metadata.tokens.ids < 0].any()
    assert batch.image is None or not batch.image[~used].any()


def long_samples_are_in_tiles_and_others_in_none(batch):
    split = batch.metadata.split
    layouts = batch.metadata.tiles()
    sides = [(batch.metadata.tokens, layouts)]
    if split is not None:
        sides = [(split.whole, layouts.whole), (split.split, layouts.split)]
    for segments, layout in sides:
        for row, ids in enumerate(segments.ids if layout is not None else ()):
            is_long = segments.length[row][ids] >= TILED.sparse_attention.min_tokens
            place = layout.place[row]
            assert ((place >= 0) == is_long & (ids >= 0)).all()
            assert (layout.source[row, place[place >= 0]] == np.flatnonzero(place >= 0)).all()
            assert (layout.segments[row, place[place >= 0] // 64] == ids[place >= 0]).all()
            assert layout.tokens[row].sum() == (place >= 0).sum()


def has_no_more_long_segments_than_is_static(batch):
    for segments, lengths in bounded(batch):
        above, most = np.transpose(lengths)
        assert (np.diff(above) > 0).all()
        assert (np.diff(most) < 0).all()
        assert (above[0], most[-1]) == (0, 0)
        longer = segments.length[:, :, None] > above
        assert (longer.sum(axis=1) <= most).all()
    assert batch.metadata.condition.length.max() <= batch.metadata.longest_condition


def tokens_as_they_are_stored(batch, reader, length):
    """(sample, its tokens, weight) of each slot, whose patches, positions and text are right."""
    manifest = reader.manifest
    for sample, row, slot, here in samples_in(batch):
        grid = np.asarray(manifest.shape[sample]) // PATCH
        assert batch.frame_tokens[row, slot] == grid[1] * grid[2]
        assert batch.line_tokens[row, slot] == grid[2]
        assert (batch.position[row, here] < batch.metadata.grid).all()
        part = np.ravel_multi_index(batch.position[row, here].T, grid)  # a split one is in tiles
        patches, given = (
            patchify(array[None], PATCH)[0]
            for array in (reader.latents(sample), reader.given(sample))
        )
        assert (batch.tokens[row, here] == patches[part]).all()
        assert (batch.given[row, here] == given[part]).all()
        if batch.image is not None:
            assert (batch.image[row, slot] == reader.image(sample)).all()
        assert batch.metadata.split is not None or (np.diff(part) == 1).all()
        assert batch.seq_len[row, slot] == len(patches)
        for name, (segments, values) in conditions_of(batch).items():
            begin, tokens = segments.offset[row, slot], segments.length[row, slot]
            expected = getattr(reader, name)(sample)
            if name == "labels":
                expected = np.append(expected, [NULL_LABEL] * (length - len(expected)))
            np.testing.assert_array_equal(values[row, begin : begin + tokens], expected)
        yield int(sample), part.tolist(), batch.weight[row, slot]


@settings(max_examples=40)
@given(packed_cases())
def test_an_epoch_holds_each_sample_once_as_it_is_stored_in_shapes_that_are_compiled(case):
    manifest, plan, collation = case
    reader, conditions = SpyReader(manifest), collation.conditions
    length = 0 if conditions.parts else conditions.length
    seen, weights = [[] for _ in range(len(manifest))], np.zeros(len(manifest))
    shapes = {region_of(shape): shape for shape in collation.shapes(plan)}
    assert len(shapes) <= 5
    for batch in (batch for step in collated(case) for batch in step.batches):
        for sample, tokens, weight in tokens_as_they_are_stored(batch, reader, length):
            seen[sample] += tokens
            weights[sample] += weight
        holds_samples_in_segments_and_padding_in_none(batch, length)
        has_no_more_long_segments_than_is_static(batch)
        if collation.tiling is not None:
            long_samples_are_in_tiles_and_others_in_none(batch)
        shape = shapes[region_of(batch)]
        assert signature(batch) == signature(shape)
        assert jax.tree.structure(batch) == jax.tree.structure(shape)
    seq_len = manifest.samples(PATCH).seq_len.tolist()
    assert [sorted(tokens) for tokens in seen] == [list(range(length)) for length in seq_len]
    np.testing.assert_allclose(weights, 1, rtol=1e-6)
    # No more long segments are static than fit into a row.
    for segments, lengths in (each for shape in shapes.values() for each in bounded(shape)):
        for size in plan.samples.seq_len.tolist():
            most = min(most for above, most in lengths if above <= size)
            assert most <= segments.ids.shape[1] / (size + 1) / THINNED


@settings(max_examples=8)
@given(packed_cases(ranks=(4,)))
def test_two_processes_halves_stacked_are_the_whole(case):
    whole, first, second = (collated(case, ranks) for ranks in (None, {0, 1}, {2, 3}))
    for step, upper, lower in zip(whole, first, second, strict=True):
        for batch, *halves in zip(step.batches, upper.batches, lower.batches, strict=True):
            stacked = [np.concatenate([half.tokens for half in halves])]
            assert (stacked[0] == batch.tokens).all()
            assert (np.concatenate([half.sample for half in halves]) == batch.sample).all()


@settings(max_examples=10)
@given(packed_cases(), st.data())
def test_damaged_records_become_padding_and_are_reported(case, data):
    manifest = case[0]
    damaged = data.draw(st.sets(st.integers(0, len(manifest) - 1), min_size=1))
    steps = collated(case, damaged=damaged)
    problems = sorted(problem for step in steps for problem in step.problems)
    assert problems == sorted(f"shard: record {n} is damaged" for n in damaged)
    shown = {int(s) for step in steps for b in step.batches for s, *_ in samples_in(b)}
    assert shown == set(range(len(manifest))) - damaged
