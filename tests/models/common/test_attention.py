"""Attention of whole and of packed rows, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_near, graded, heads, laid_out, masked, packed_of, same_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.models.common.attention import attention, in_query_blocks, query_blocks
from alload_jax.models.common.segments import PADDING, SplitRows
from alload_jax.sharding.mesh import BATCH_AXES, MeshConfig, batch_sharding, make_mesh

needs_devices = pytest.mark.skipif(
    len(jax.devices()) < 8 or jax.default_backend() != "cpu", reason="needs 8 CPU devices"
)


def parts_of(rows, total_q, total_k):
    return [heads((rows, n, 2, 8), i) for i, n in enumerate((total_q, total_k, total_k))]


ROWS, SLOTS, TOKENS = 2, 4, 44
"""Of random rows: SLOTS segments of 9 tokens with gaps of 2 fit just so."""


@st.composite
def packings(draw):
    """Rows of query segments and of key segments: odd, short, with gaps, in shapes of one size."""
    used = [draw(st.integers(0, SLOTS)) for _ in range(ROWS)]
    sides = []
    for _ in range(2):
        laid = []
        for count in used:
            at, parts = 0, []
            for _ in range(count):
                at += draw(st.integers(0, 2))
                length = draw(st.integers(1, 9))
                parts.append((at, length))
                at += length
            laid.append(parts)
        sides.append(laid)
    return sides


@given(packings())
@settings(max_examples=10, deadline=None)
def test_segments_attend_to_themselves_alone(case):
    queries, _ = case
    ids = np.full((ROWS, TOKENS), PADDING)
    for row, spans in enumerate(queries):
        for slot, (offset, length) in enumerate(spans):
            ids[row, offset : offset + length] = slot
    np.testing.assert_array_equal(laid_out(queries, SLOTS, TOKENS).ids, ids)
    parts, packed = parts_of(ROWS, TOKENS, TOKENS), packed_of(*case, TOKENS, TOKENS, SLOTS)
    expected = masked(*parts, same_sample(ids, packed.key.ids))
    found = attention(*parts, segments=packed)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


LAID = [[(0, 7), (8, 1), (12, 20)], [(0, 3)]]
LAID_KEYS = [[(0, 5), (5, 5), (10, 5)], [(0, 5)]]
FIRST = [[(0, 7)], [(0, 1)], [], [(0, 4)]]
"""Rows of one slot, which are computed as whole ones."""
CASES = {"many": (LAID, LAID_KEYS, 40, 20, 4), "one": (FIRST, FIRST, 7, 7, 1)}


@pytest.mark.parametrize("name", CASES)
def test_nothing_passes_between_segments_nor_from_tokens_of_none(name):
    packed, parts = packed_of(*CASES[name]), parts_of(len(CASES[name][0]), *CASES[name][2:4])
    ids = [np.asarray(side.ids) for side in (packed.query, packed.key, packed.key)]

    def run(parts):
        return [np.asarray(x) for x in graded(lambda *p: attention(*p, segments=packed), parts)]

    clean = run(parts)
    expected = graded(lambda *p: masked(*p, same_sample(*ids[:2])), parts)
    for found, exact in zip(clean, expected, strict=True):
        np.testing.assert_allclose(found, exact, rtol=2e-4, atol=2e-5)
    outside = [(each == PADDING)[..., None, None] for each in ids]
    spoilt = run([jnp.where(gone, jnp.nan, x) for gone, x in zip(outside, parts, strict=True)])
    np.testing.assert_array_equal(spoilt[0], clean[0])
    for before, gone in zip(clean, (outside[0], *outside), strict=True):
        assert not np.where(gone, before, 0).any()
    if name == "one":
        for found, before in zip(spoilt, clean, strict=True):
            np.testing.assert_array_equal(found, before)
        return
    for place in range(3):
        spoilt = list(parts)
        spoilt[place] = jnp.where((ids[place] == 2)[..., None, None], jnp.nan, parts[place])
        found = np.array(attention(*spoilt, segments=packed))
        assert np.isnan(found[0, 12:32]).all()
        found[0, 12:32] = clean[0][0, 12:32]
        np.testing.assert_array_equal(found, clean[0])
    changed = attention(*(part.at[0, 0:5].set(7.0) for part in parts), segments=packed)
    np.testing.assert_array_equal(changed[0, 8:], clean[0][0, 8:])


def test_what_cannot_run_is_refused_with_the_reason():
    parts = [part.astype(jnp.bfloat16) for part in parts_of(2, 40, 20)]
    packed = packed_of(*CASES["many"])
    with pytest.raises(ValueError, match="'flash9'"):
        attention(*parts, implementation="flash9")
    if jax.default_backend() == "gpu":
        return
    with pytest.raises(NotImplementedError, match=r"the backend is 'cpu', .*use 'xla'"):
        attention(*parts, implementation="cudnn")
    with pytest.raises(NotImplementedError, match=r"backend is 'cpu'.*dual_constraint"):
        attention(*parts, segments=packed, implementation="cudnn")


@needs_devices
@pytest.mark.parametrize("name", ["whole", *CASES])
def test_each_device_computes_its_own_rows_and_heads(name):
    case = CASES["one" if name == "whole" else name]
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[: 8 if name != "many" else 4])
    sharding, parts = batch_sharding(mesh), parts_of(len(case[0]), *case[2:4])
    packed = None if name == "whole" else packed_of(*case)
    placed = jax.device_put(parts, NamedSharding(mesh, jax.P(sharding.spec[0], None, "tensor")))
    laid = jax.device_put(packed, sharding)
    run = jax.jit(lambda p, laid: attention(*p, laid, sharding=sharding)).lower(placed, laid)
    run = run.compile()
    assert not any(word in run.as_text() for word in ("all-gather", "all-reduce", "all-to-all"))
    expected = attention(*parts, packed)
    np.testing.assert_allclose(run(placed, laid), expected, rtol=1e-5, atol=1e-6)


REGION = 24


def check_split(context, region, head_dim, dtype, tolerance, axes):
    """Split samples of odd lengths, and of one token, with borders of ranks inside of them."""
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    sharding = NamedSharding(make_mesh(MeshConfig(**axes), devices), PartitionSpec(BATCH_AXES))
    long, behind = context * region, 64 - region
    joint = [(0, 31), (31, 1), (32, long - 39), (long - 7, 7)]
    whole = [[(0, 17), (17, behind - 17)] if rank % 2 else [(0, behind)] for rank in range(context)]
    whole = whole if behind else [[]] * context
    rows = SplitRows(
        laid_out(whole, 5, behind),
        laid_out([joint] * context, 5, long),
        region,
        (((0, 2), (max(1, behind), 0)), ((0, len(joint)), (long, 0))),
    )
    ids = np.concatenate([rows.split.ids[0].reshape(context, region), rows.whole.ids], axis=1)
    ids[:, region:] += 10 * (1 + np.arange(context))[:, None]
    parts = [heads((context, 64, 4, head_dim), n, dtype) for n in range(3)]
    placed = [jax.device_put(x, sharding) for x in parts]
    found = graded(lambda *p: attention(*p, segments=rows, sharding=sharding), placed)
    together = [jnp.asarray(x, jnp.float32).reshape(1, -1, *x.shape[2:]) for x in parts]
    allowed = same_sample(ids.reshape(1, -1), ids.reshape(1, -1))
    expected = graded(lambda *p: masked(*p, allowed), together)
    assert_near([np.reshape(x, (1, -1, *x.shape[2:])) for x in found], expected, tolerance)


@needs_devices
@pytest.mark.parametrize(
    ("context", "region", "axes"),
    [
        (4, REGION, {"context": 4}),
        (2, 64, {"context": 2}),
        (2, REGION, {"context": 2, "tensor": 2}),
        (8, REGION, {"context": 8}),  # more ranks than heads: four exchange them
        (6, REGION, {"context": 6}),  # two exchange heads
        (4, 64, {"context": 4, "tensor": 2}),
        (3, REGION, {"context": 3}),
    ],
)
def test_split_samples_attend_as_whole_ones(context, region, axes):
    check_split(context, region, 6, jnp.float32, 1e-5, axes)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(2, 5),
    st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_each_part_asks_with_its_own_tokens_of_every_segment(lengths, gap, parts, together):
    ranks = parts * together
    region = -(-(sum(lengths) + gap) // ranks)
    offsets = gap + np.cumsum([0, *lengths[:-1]])
    packed = packed_of(
        *[[[*zip(offsets.tolist(), lengths, strict=True)]]] * 2, *[ranks * region] * 2, 6
    )
    none = laid_out([[]], 6, 1)
    rows = SplitRows(none, packed.query, region, (((0, 0), (1, 0)), packed.lengths))
    seen = []
    for part in range(parts):
        found = rows.from_part(jnp.int32(part), together)
        offset, length, ids = (np.asarray(each)[0] for each in found.query)
        seen += ids.tolist()
        for slot in range(6):
            places = np.flatnonzero(ids == slot)
            assert length[slot] == len(places)
            assert not len(places) or offset[slot] == places[0]
        assert all((length > above).sum() <= most for above, most in found.lengths)
        assert found.lengths[-1] == (min(max(lengths), together * region), 0)
        assert sorted(set(above := [each[0] for each in found.lengths])) == above
        assert found.longest_key == max(lengths)
    assert seen == np.asarray(packed.query.ids)[0].tolist()


@pytest.mark.gpu
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
@pytest.mark.parametrize("region", [REGION, 64])
def test_split_samples_attend_as_whole_ones_on_two_gpus(region):
    check_split(2, region, 64, jnp.bfloat16, 2e-2, {"context": 2})


def shape(rows, tokens):
    return jax.ShapeDtypeStruct((rows, tokens, 12, 128), jnp.bfloat16)


@given(st.integers(1, 60), st.integers(2, 40_000), st.integers(1, 1200), st.sampled_from([1, 2, 8]))
@settings(max_examples=50)
def test_blocks_are_equal_and_even_and_longer_than_the_keys(rows, queries, keys, shards):
    blocks = query_blocks(shape(rows, queries), shape(rows, keys), shards)
    assert queries % blocks == 0
    if blocks > 1:
        assert queries // blocks % 2 == 0
        assert queries // blocks >= keys
        assert queries >= 8 * keys


def test_cross_attention_is_split_where_a_device_has_few_rows():
    for rows, queries, keys, shards, expected in (
        (1, 32_760, 512, 1, 12),  # 4 blocks of keys and 12 heads
        (2, 32_760, 512, 1, 6),
        (1, 4096, 512, 1, 8),  # blocks as long as the keys
        (1, 4094, 512, 1, 1),  # too short
        (42, 32_760, 512, 1, 1),  # rows enough
        (1, 32_760, 257, 1, 1),  # odd
        (1, 32_762, 512, 1, 1),  # twice a prime
        (8, 32_760, 512, 8, 12),
        (8, 32_760, 512, 1, 2),
    ):
        assert query_blocks(shape(rows, queries), shape(rows, keys), shards) == expected


@pytest.mark.parametrize("blocks", [1, 4])
def test_blocks_change_no_value_and_no_gradient(blocks):
    parts = parts_of(2, 12, 3)

    def split(*parts):
        return attention(*in_query_blocks(*parts, blocks)).reshape(parts[0].shape)

    for found, expected in zip(graded(split, parts), graded(attention, parts), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
