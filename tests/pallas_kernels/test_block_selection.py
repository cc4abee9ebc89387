"""Selection of blocks, and the order of tokens in tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_sparse_attention import (
    BlockSegments,
    PooledScores,
    pool_blocks,
    tile_order,
    top_k_blocks,
)
from pallas_kernels.block_sparse_attention.block_lists import BlockLists, invert
from pallas_kernels.block_sparse_attention.selection_triton import rank_of

IDS, TOKENS = jnp.zeros((1, 4), jnp.int32), jnp.full((1, 4), 64, jnp.int32)
SEGMENTS = BlockSegments(IDS, IDS)
"""Of one row of four whole blocks."""


def test_blocks_are_pooled_over_their_valid_tokens():
    x = np.random.default_rng(0).normal(size=(2, 150, 3, 8))
    x = jnp.asarray(x, jnp.bfloat16)
    tokens = np.asarray([[90, 10, 22], [0, 64, 1]])  # a block has 64
    found = pool_blocks(x, jnp.asarray(tokens), block=64)
    assert found.dtype == jnp.float32
    for row, block in np.ndindex(2, 3):
        part = np.asarray(x, np.float64)[row, block * 64 :][: min(tokens[row, block], 64)]
        expected = part.mean(axis=0) if len(part) else np.zeros((3, 8))
        np.testing.assert_allclose(found[row, block], expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"tokens is \(2, 3\); for x .* must be \(2, 2\)"):
        pool_blocks(jnp.zeros((2, 100, 1, 4)), jnp.asarray(tokens), block=64)


@pytest.mark.parametrize(
    ("rows", "heads", "blocks", "k_max", "lengths"),
    [(1, 1, 1, 1, 0), (2, 3, 9, 4, 1), (1, 2, 6, 10, 2), (2, 2, 20, 3, 3)],
)
def test_lists_hold_the_own_block_and_the_best_of_the_segment(rows, heads, blocks, k_max, lengths):
    """`lengths`: axes of k, which may differ by head, by row and by block of queries."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(-1, 3, (rows, blocks)), axis=1)[:, ::-1]
    tokens = np.where(rng.random((rows, blocks)) < 0.2, 0, rng.integers(1, 65, (rows, blocks)))
    k = rng.integers(0, k_max + 1, [(), (heads,), (rows, heads), (rows, heads, blocks)][lengths])
    by_query = np.broadcast_to(k if k.ndim == 3 else k[..., None], (rows, heads, blocks))
    scores = rng.permutation(rows * heads * blocks * blocks).reshape(rows, heads, blocks, blocks)
    ids, valid = jnp.asarray(segments, jnp.int32), jnp.asarray(tokens, jnp.int32)
    found = top_k_blocks(
        jnp.asarray(scores), jnp.asarray(k), BlockSegments(ids, ids), valid, valid, k_max=k_max
    )
    assert found.indices.shape == (rows, heads, blocks, k_max)
    for r, h, q in np.ndindex(rows, heads, blocks):
        usable = (segments[r] == segments[r, q]) & (tokens[r] > 0) & (segments[r] >= 0)
        usable = np.flatnonzero(usable & (tokens[r, q] > 0))
        expected = sorted(usable, key=lambda key: (key != q, -scores[r, h, q, key]))
        expected = expected[: by_query[r, h, q]]
        expected = [*expected[:1], *sorted(expected[1:])]
        count = int(found.counts[r, h, q])
        assert found.indices[r, h, q, :count].tolist() == expected
        assert count == len(expected)
        assert not np.asarray(found.indices[r, h, q, count:]).any()


ODD_SCORES = (-np.inf, np.inf, np.nan, -0.0, 0.0, 1e38)


@given(
    scores=st.lists(st.sampled_from(ODD_SCORES), min_size=64, max_size=64),
    k=st.integers(0, 3),
    own=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_odd_scores_name_blocks_of_the_segment_alone_and_its_own_first(scores, k, own):
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, -1, 1]], jnp.int32)
    tokens = jnp.asarray([[64, 64, 3, 64, 0, 64, 64, 64]], jnp.int32)
    scores = jnp.asarray(scores, jnp.float32).reshape(1, 1, 8, 8)
    found = top_k_blocks(scores, k, BlockSegments(ids, ids), tokens, tokens, k_max=3, own=own)
    usable = {0: [0, 1, 2], 1: [3, 5, 7], -1: []}
    for block, segment in enumerate(ids[0].tolist()):
        mine = usable[segment] if tokens[0, block] else []
        named = found.indices[0, 0, block, : int(found.counts[0, 0, block])].tolist()
        assert len(named) == min(k, len(mine))
        assert set(named) <= set(mine)
        assert not (own and named) or named[0] == block


def test_scores_rank_by_value_whatever_their_form():
    equal = jnp.asarray([0.0, -0.0, 0.0, -0.0]) * jnp.ones((1, 1, 4, 1))
    found = top_k_blocks(equal, 2, SEGMENTS, TOKENS, TOKENS, k_max=2, own=False)
    assert found.indices[0, 0].tolist() == [[0, 1]] * 4
    low = jnp.asarray([jnp.nan, -1e38, 2.0, jnp.inf]) * jnp.ones((1, 1, 4, 1))
    found = top_k_blocks(low, 3, SEGMENTS, TOKENS, TOKENS, k_max=3, own=False)
    assert found.indices[0, 0].tolist() == [[1, 2, 3]] * 4
    # Of blocks of 128 queries and of 64 keys, the own is that of the first query.
    halves = BlockSegments(IDS[:, :2], IDS)
    sizes = {"k_max": 1, "query_block": 128, "key_block": 64}
    found = top_k_blocks(equal[:, :, :2], 1, halves, 2 * TOKENS[:, :2], TOKENS, **sizes)
    assert found.indices[0, 0].tolist() == [[0], [2]]
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.normal(size=(1, 12, 2, 16)), jnp.float32) for _ in range(2))
    ids, tokens = jnp.zeros((1, 12), jnp.int32), jnp.full((1, 12), 64, jnp.int32)
    scores, segments = jnp.einsum("rqhd,rkhd->rhqk", q, k), BlockSegments(ids, ids)
    pooled = top_k_blocks(PooledScores(q, k), 3, segments, tokens, tokens, k_max=3)
    whole = top_k_blocks(scores, 3, segments, tokens, tokens, k_max=3)
    np.testing.assert_array_equal(pooled.indices, whole.indices)
    other = top_k_blocks(scores, 3, segments, tokens, tokens, k_max=3, own=False)
    np.testing.assert_array_equal(other.indices, np.sort(jax.lax.top_k(scores, 3)[1]))


def selected(scores, sizes, implementation, seed=0, own=True, blocks=(64, 64)):
    """Lists for segments, valid tokens and k that differ by block; of sizes (nQ, nK, k_max)."""
    rng = np.random.default_rng(seed)
    n_query, n_key, k_max = sizes
    rows, _, heads, _ = scores.queries.shape

    def of_blocks(count):
        ids = np.sort(rng.integers(-1, 3, (rows, count)), axis=1)[:, ::-1]
        tokens = rng.integers(0, 5, (rows, count)) * 16
        return jnp.asarray(ids, jnp.int32), jnp.asarray(tokens, jnp.int32)

    (query_ids, query_tokens), (key_ids, key_tokens) = of_blocks(n_query), of_blocks(n_key)
    if n_query == n_key:
        query_ids, query_tokens = key_ids, key_tokens
    k = jnp.asarray(rng.integers(0, k_max + 1, (rows, heads, n_query)))
    segments, (query_block, key_block) = BlockSegments(query_ids, key_ids), blocks
    found = top_k_blocks(
        scores,
        k,
        segments,
        query_tokens,
        key_tokens,
        k_max=k_max,
        query_block=query_block,
        key_block=key_block,
        own=own,
        implementation=implementation,
        interpret=implementation == "triton" and jax.default_backend() == "cpu",
    )
    return np.asarray(found.indices), np.asarray(found.counts)


KERNEL_CASES = [
    # rows, heads, (nQ, nK, k_max), width, own, tokens of blocks
    (1, 2, (20, 20, 5), 16, True, (64, 64)),
    (2, 2, (40, 300, 33), 16, False, (64, 64)),
    (1, 1, (20, 40, 9), 32, True, (128, 64)),
    (1, 2, (7, 7, 9), 64, True, (128, 128)),
    (1, 1, (70, 2100, 200), 16, True, (64, 64)),  # scores are computed for each bit
]


def equal_scores(case):
    """Few different integers, which every way of adding up gives exactly."""
    rows, heads, (n_query, n_key, _), width, *_ = case
    rng = np.random.default_rng(1)
    return PooledScores(
        *(
            jnp.asarray(rng.integers(-2, 3, (rows, count, heads, width)), jnp.float32)
            for count in (n_query, n_key)
        )
    )


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_kernel_chooses_what_a_sort_chooses(case):
    *_, own, blocks = case
    sorted_, counted = (
        selected(equal_scores(case), case[2], name, own=own, blocks=blocks)
        for name in ("xla", "triton")
    )
    np.testing.assert_array_equal(counted[1], sorted_[1])
    np.testing.assert_array_equal(counted[0], sorted_[0])
    assert sorted_[1].max() > 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*KERNEL_CASES, (1, 12, (1182, 1182, 118), 128, True, (64, 64))])
def test_the_compiled_kernel_chooses_what_a_sort_chooses(case):
    test_the_kernel_chooses_what_a_sort_chooses(case)


@pytest.mark.parametrize(("blocks", "kernels"), [(2048, 1), (2049, 0)])
def test_auto_takes_the_kernel_where_it_keeps_the_scores(blocks, kernels, monkeypatch):
    monkeypatch.setattr("pallas_kernels.devices.unsupported_triton_device", lambda: None)
    ids, tokens = jnp.zeros((1, blocks), jnp.int32), jnp.full((1, blocks), 64, jnp.int32)
    scores = PooledScores(*(jnp.zeros((1, blocks, 1, 16)),) * 2)

    def chosen(scores):
        return top_k_blocks(scores, 2, BlockSegments(ids, ids), tokens, tokens, k_max=2).indices

    assert str(jax.make_jaxpr(chosen)(scores)).count("pallas_call[") == kernels


@pytest.mark.gpu
def test_the_compiled_kernel_chooses_the_best_of_any_scores():
    """Against float64: what is chosen is as good, but for the rounding of TF32."""
    rng = np.random.default_rng(2)
    size = (600, 600, 60)
    q, k = (rng.normal(size=(1, 600, 4, 128)).astype(np.float32) for _ in range(2))
    scores = PooledScores(jnp.asarray(q), jnp.asarray(k))
    exact = np.einsum("rqhd,rkhd->rhqk", q.astype(np.float64), k)
    totals = []
    for name in ("xla", "triton"):
        index, count = selected(scores, size, name, own=False)
        named = np.arange(size[2]) < count[..., None]
        totals.append(np.where(named, np.take_along_axis(exact, index, -1), 0).sum(-1))
    np.testing.assert_allclose(totals[1], totals[0], rtol=1e-3, atol=0.1)


@given(st.lists(st.floats(width=32), min_size=2, max_size=2))
@settings(max_examples=50, deadline=None)
def test_ranks_are_in_the_order_of_scores(pair):
    low, high = np.nan_to_num(np.asarray(pair, np.float32), nan=-np.inf)
    first, second = (int(each) for each in rank_of(jnp.asarray(pair, jnp.float32)))
    limit = np.finfo(np.float32).max
    low, high = (np.clip(each, -limit, limit) for each in (low, high))
    tiny = np.finfo(np.float32).tiny  # which XLA takes as 0 on CPUs
    if max(abs(low), abs(high)) >= tiny or low == high == 0:
        assert (first < second, first == second) == (low < high, low == high)
    assert min(first, second) > np.iinfo(np.int32).min


@pytest.mark.parametrize(("rows", "blocks", "k_max"), [(0, 4, 2), (1, 0, 2), (1, 4, 0)])
def test_empty_selections_are_empty_lists(rows, blocks, k_max):
    ids = jnp.zeros((rows, blocks), jnp.int32)
    scores = jnp.zeros((rows, 2, blocks, blocks))
    found = top_k_blocks(scores, k_max, BlockSegments(ids, ids), ids, ids, k_max=k_max)
    assert found.indices.shape == (rows, 2, blocks, k_max)
    assert not np.asarray(found.counts).any()
    assert pool_blocks(jnp.zeros((rows, 64 * blocks, 1, 8)), ids, block=64).shape[0] == rows


POOLED = PooledScores(jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 1, 8)))


def test_selections_that_do_not_fit_are_refused():
    for change, message in (
        ({"scores": jnp.zeros((1, 2, 3, 4))}, r"scores is \(1, 2, 3, 4\); it must be \(1, 2, 4, 4"),
        ({"query_tokens": TOKENS * 1.0}, "query_tokens is float32; it must be int32"),
        ({"k": 2.5}, "k is float32"),
        ({"k": jnp.zeros(3, jnp.int32)}, r"k is int32 \(3,\)"),
        ({"segments": BlockSegments(IDS[:, :2], IDS)}, "segments.queries is"),
        ({"scores": POOLED}, "scores.keys is"),
        ({"implementation": "triton", "interpret": True}, "'triton' cannot run, scores are an arr"),
        ({"scores": PooledScores(*(jnp.ones((1, 4, 2, 16), jnp.int8),) * 2)}, "queries is int8"),
        ({"k_max": -1}, "k_max is -1; it must be 0 or more"),
        ({"key_block": 0}, "key_block is 0; it must be 1 or more"),
    ):
        given = {"scores": jnp.zeros((1, 2, 4, 4)), "k": 2, "segments": SEGMENTS}
        given |= {"query_tokens": TOKENS, "key_tokens": TOKENS, "k_max": 2}
        with pytest.raises(ValueError, match=message):
            top_k_blocks(**given | change)


def test_the_kernel_says_how_it_runs_on_a_mesh():
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P(None, None, "heads"))
    scores = jax.device_put(PooledScores(*(jnp.ones((1, 4, 2, 16)),) * 2), split)
    with pytest.raises(ValueError, match=r"call it within jax\.shard_map, or use 'xla'"):
        top_k_blocks(
            scores, 2, SEGMENTS, TOKENS, TOKENS, k_max=2, implementation="triton", interpret=True
        )


@pytest.mark.parametrize("shape", [(0, 4, 2), (3, 0, 0), (3, 4, 0)])
def test_empty_lists_are_inverted(shape):
    """Of no blocks of queries, of no blocks of keys, and of no place."""
    n_query, n_key, most = shape
    counts = jnp.zeros((1, 2, n_query), jnp.int32)
    tokens = [jnp.full((1, number), 64, jnp.int32) for number in (n_query, n_key)]
    found = invert(BlockLists(jnp.zeros((1, 2, n_query, most), jnp.int32), counts, *tokens))
    assert found.queries.shape == (1, 2, n_query * most)
    assert found.offsets.tolist() == [[[0] * (n_key + 1)] * 2]


def test_a_selection_passes_no_gradient_and_holds_nothing_of_the_size_of_all_pairs():
    def loss(x):
        pooled = pool_blocks(x, TOKENS, block=64)
        scores = PooledScores(pooled, pooled)
        lists = top_k_blocks(scores, 2, SEGMENTS, TOKENS, TOKENS, k_max=2)
        return pooled.sum() + lists.indices.sum().astype(jnp.float32)

    assert not np.asarray(jax.grad(loss)(jnp.ones((1, 256, 1, 8)))).any()
    # Of 512 blocks, lists of 4: the largest array is a sixteenth of all pairs.
    tokens, ids = (jax.ShapeDtypeStruct((1, 512), jnp.int32),) * 2
    pooled = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)

    def run(q, k, ids, tokens):
        segments = BlockSegments(ids, ids)
        return top_k_blocks(PooledScores(q, k), 4, segments, tokens, tokens, k_max=4)

    memory = jax.jit(run).lower(pooled, pooled, ids, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 512 * 512 * 4 / 8


GRIDS = st.tuples(*(st.integers(1, 12),) * 3)


def blocks_of(grid, tile, block):
    """The (t, h, w) of the tokens of each block, [3, count] each."""
    found = tile_order(grid, tile, block)
    size = int(np.prod(grid))
    assert found.place.dtype == found.source.dtype == found.tokens.dtype == np.int32
    np.testing.assert_array_equal(found.source[found.place], np.arange(size))
    assert (found.source >= 0).sum() == found.tokens.sum() == size
    for number, count in enumerate(found.tokens):
        here = found.source[number * block : (number + 1) * block]
        assert 1 <= count <= block
        assert (here[:count] >= 0).all()
        assert (here[count:] == -1).all()
        yield np.stack(np.unravel_index(here[:count], grid))


@given(GRIDS, st.sampled_from([(4, 4, 4), (2, 8, 8), (1, 1, 1), (3, 5, 4)]))
@settings(max_examples=25, deadline=None)
def test_a_tile_order_is_a_bijection_of_tiles(grid, tile):
    for token in blocks_of(grid, tile, 128 if tile == (2, 8, 8) else 64):
        assert (np.ptp(token, axis=1) < tile).all()


@given(GRIDS, st.sampled_from([64, 128]))
@settings(max_examples=30, deadline=None)
def test_full_blocks_waste_no_place_and_hold_connected_tokens(grid, block):
    blocks = list(blocks_of(grid, None, block))
    assert len(blocks) == -(-int(np.prod(grid)) // block)
    for token in blocks:
        # From any token to any other by steps of at most one in each direction.
        near = np.abs(token[:, :, None] - token[:, None]).max(axis=0) <= 1
        reached = near[0]
        for _ in range(token.shape[1]):
            reached = near[reached].any(axis=0)
        assert reached.all()


@pytest.mark.parametrize("grid", [(21, 30, 52), (13, 60, 104)])
def test_blocks_of_long_videos_are_about_cubic(grid):
    """A cube of 64 tokens has a mean squared distance of 3.75 to its centre."""
    spread = [token.var(axis=1).sum() for token in blocks_of(grid, None, 64)]
    assert np.mean(spread) < 5
    assert len(spread) == -(-int(np.prod(grid)) // 64)


def test_tiles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"tile \(5, 5, 5\) holds 125 tokens, more than a block"):
        tile_order((8, 8, 8), (5, 5, 5))
    with pytest.raises(ValueError, match=r"grid is \(0, 8, 8\); it must be three numbers >= 1"):
        tile_order((0, 8, 8))
