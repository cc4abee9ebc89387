"""Condition tokens whose number differs by sample, and rows in which they attend with others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common.embedding import ConditionTokens, mean_by_sample, side_by_side
from alload_jax.models.common.joint_rows import bucketed_joint_rows, packed_joint_rows
from alload_jax.models.common.segments import PADDING, PackedMetadata, segments_of

WIDTH = 3


def tokens_of(lengths, room, seed):
    """Tokens of samples [rows][slots], in slots of `room` tokens; padding is not finite."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    rows, slots = lengths.shape
    offset = np.broadcast_to(np.arange(slots, dtype=np.int32) * room, lengths.shape)
    segments = segments_of(np.stack([offset, lengths]), room * slots)
    values = rng.normal(size=(rows, room * slots, WIDTH)).astype(np.float32)
    values[segments.ids == PADDING] = np.nan
    return ConditionTokens(values, segments)


def samples_in(tokens):
    """The tokens of every sample, by (row, slot)."""
    offset, length, _ = (np.asarray(part) for part in tokens.segments)
    return {
        (row, slot): np.asarray(tokens.values)[row, offset[row, slot] :][: length[row, slot]]
        for row, slot in np.ndindex(*length.shape)
    }


LENGTHS = st.integers(1, 3).flatmap(
    lambda slots: st.lists(
        st.tuples(*[st.lists(st.integers(0, 4), min_size=slots, max_size=slots)] * 2),
        min_size=1,
        max_size=3,
    )
)


@settings(max_examples=30, deadline=None)
@given(LENGTHS)
def test_side_by_side_keeps_every_token_of_each_sample_in_order(lengths):
    parts = [tokens_of([row[n] for row in lengths], 4, n) for n in range(2)]
    joined = side_by_side(parts)
    found, expected = samples_in(joined), [samples_in(part) for part in parts]
    for place, values in found.items():
        np.testing.assert_array_equal(values, np.concatenate([part[place] for part in expected]))
    values, ids = np.asarray(joined.values), np.asarray(joined.segments.ids)
    np.testing.assert_array_equal(values[ids == PADDING], 0)
    # Contiguous segments, padding last, as the norms and cuDNN take them.
    order = np.where(ids == PADDING, ids.max(initial=0) + 1, ids)
    assert (np.diff(order, axis=1) >= 0).all()


@settings(max_examples=30, deadline=None)
@given(LENGTHS)
def test_means_are_those_of_each_sample_by_itself(lengths):
    tokens = tokens_of([row[0] for row in lengths], 4, 0)
    found = np.asarray(mean_by_sample(tokens))
    for place, values in samples_in(tokens).items():
        expected = values.astype(np.float64).mean(axis=0) if len(values) else np.zeros(WIDTH)
        np.testing.assert_allclose(found[place], expected, rtol=1e-5, atol=1e-6)


def test_dropped_samples_have_no_tokens_and_others_all():
    tokens = tokens_of([[2, 3], [4, 0]], 4, 0)
    dropped = tokens.without(jnp.asarray([[True, False], [False, True]]))
    found, before = samples_in(dropped), samples_in(tokens)
    assert len(found[0, 0]) == len(found[1, 1]) == 0
    for place in ((0, 1), (1, 0)):
        np.testing.assert_array_equal(found[place], before[place])
    ids = np.asarray(dropped.segments.ids)
    assert set(ids[0]) == {1, PADDING}
    assert set(ids[1]) == {0, PADDING}


def packed_case():
    """Two rows of samples with room for their conditions, and those conditions."""
    condition = side_by_side([tokens_of([[1, 0, 3], [1, 2, 0]], 4, 1)])
    table = np.array([[[0, 5, 7], [1, 5, 0]], [[3, 1, 2], [3, 4, 0]]], np.int32)
    metadata = PackedMetadata(
        segments_of(table, 13), condition.segments, None, (1, 1, 1), ((0, 3), (13, 0)), 4
    )
    return metadata, condition


def test_packed_rows_hold_each_condition_behind_its_sample():
    metadata, condition = packed_case()
    rows = packed_joint_rows(metadata, condition.segments)
    tokens = np.arange(2 * 13 * WIDTH, dtype=np.float32).reshape(2, 13, WIDTH)
    joined = rows.join(tokens, condition.values)
    offset, length, ids = metadata.tokens
    for (row, slot), own in samples_in(condition).items():
        begin, end = offset[row, slot], offset[row, slot] + length[row, slot]
        np.testing.assert_array_equal(joined[row, begin:end], tokens[row, begin:end])
        np.testing.assert_array_equal(joined[row, end : end + len(own)], own)
        both = np.asarray(rows.segments.query.ids)[row]
        assert (both == slot).sum() == length[row, slot] + len(own)
    back, of_condition = rows.separate(joined, 13)
    np.testing.assert_array_equal(of_condition, condition.values)
    np.testing.assert_array_equal(np.asarray(back)[ids != PADDING], tokens[ids != PADDING])


def test_joining_passes_each_gradient_to_the_token_it_belongs_to():
    metadata, condition = packed_case()
    rows = packed_joint_rows(metadata, condition.segments)
    rng = np.random.default_rng(0)
    cotangent = rng.normal(size=(2, 13, WIDTH)).astype(np.float32)
    tokens = jnp.zeros((2, 13, WIDTH))
    _, pull = jax.vjp(rows.join, tokens, condition.values)
    to_tokens, to_condition = map(np.asarray, pull(cotangent))
    place = np.asarray(rows.place)
    for row, index in np.ndindex(*place.shape):
        inside = place[row, index] < 13
        expected = cotangent[row, place[row, index]] if inside else np.zeros(WIDTH)
        np.testing.assert_array_equal(to_condition[row, index], expected)
        if inside:
            cotangent[row, place[row, index]] = 0
    np.testing.assert_array_equal(to_tokens, cotangent)


def test_bucketed_rows_end_with_the_condition():
    condition = tokens_of([[2], [0]], 4, 0)
    rows = bucketed_joint_rows(5, condition.segments)
    assert rows.segments.query.length.tolist() == [[7], [5]]
    tokens = np.ones((2, 5, WIDTH), np.float32)
    joined = rows.join(tokens, jnp.nan_to_num(condition.values))
    assert joined.shape == (2, 9, WIDTH)
    back, of_condition = rows.separate(joined, 5)
    np.testing.assert_array_equal(back, tokens)
    assert of_condition.shape == (2, 4, WIDTH)
    assert bucketed_joint_rows(5, None).segments is None


def test_split_samples_need_a_sharding():
    metadata, condition = packed_case()
    split = PackedMetadata(
        *(metadata.tokens, metadata.condition, object(), metadata.grid, metadata.lengths, 4)
    )
    with pytest.raises(ValueError, match="give their sharding"):
        packed_joint_rows(split, condition.segments)
