"""Attention of long rows to few keys, in blocks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common.attention import attention, in_query_blocks, query_blocks

SHAPES = st.tuples(st.integers(1, 60), st.integers(2, 40_000), st.integers(1, 1200))


def shape(rows, tokens, heads=12):
    return jax.ShapeDtypeStruct((rows, tokens, heads, 128), jnp.bfloat16)


@given(SHAPES, st.sampled_from([1, 2, 8]))
def test_blocks_are_equal_and_even_and_longer_than_the_keys(sizes, shards):
    rows, queries, keys = sizes
    blocks = query_blocks(shape(rows, queries), shape(rows, keys), shards)
    assert queries % blocks == 0
    if blocks > 1:
        assert queries // blocks % 2 == 0
        assert queries // blocks >= keys
        assert queries >= 8 * keys


@pytest.mark.parametrize(
    ("rows", "queries", "keys", "expected"),
    [
        (1, 32_760, 512, 12),  # 4 blocks of keys and 12 heads
        (2, 32_760, 512, 6),
        (42, 1560, 512, 1),  # rows enough
        (1, 1560, 512, 1),  # too short
        (1, 75_600, 512, 12),
        (1, 32_760, 257, 1),  # odd
        (1, 32_762, 512, 1),  # twice a prime
    ],
)
def test_wans_cross_attention_is_split_where_it_has_few_rows(rows, queries, keys, expected):
    assert query_blocks(shape(rows, queries), shape(rows, keys)) == expected


def test_devices_that_share_the_rows_have_fewer_each():
    assert query_blocks(shape(8, 32_760), shape(8, 512), 8) == 12
    assert query_blocks(shape(8, 32_760), shape(8, 512)) == 2


def values_and_gradients(run, *parts):
    out, pull = jax.vjp(run, *parts)
    return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(0, 9))
def test_blocks_change_no_value_and_no_gradient(rows, blocks, keys, seed):
    rng = np.random.default_rng(seed)
    parts = [
        jnp.asarray(rng.normal(size=(rows, tokens, 2, 8)), jnp.float32)
        for tokens in (12, keys, keys)
    ]

    def split(*parts):
        return attention(*in_query_blocks(*parts, blocks)).reshape(parts[0].shape)

    whole = values_and_gradients(attention, *parts)
    for found, expected in zip(values_and_gradients(split, *parts), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "queries"), [(1, 32_760), (2, 8190)])
def test_cudnn_in_blocks_equals_cudnn_without(rows, queries):
    rng = np.random.default_rng(0)
    parts = [
        jnp.asarray(rng.normal(size=(rows, tokens, 12, 128)), jnp.bfloat16)
        for tokens in (queries, 512, 512)
    ]
    assert query_blocks(*parts[:2]) > 1

    def whole(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")

    expected = jax.jit(lambda *parts: values_and_gradients(whole, *parts))(*parts)
    found = jax.jit(lambda *parts: values_and_gradients(attention, *parts))(*parts)
    for one, other in zip(found, expected, strict=True):
        error = np.linalg.norm(np.float32(one) - np.float32(other))
        assert error < 0.01 * np.linalg.norm(np.float32(other))
