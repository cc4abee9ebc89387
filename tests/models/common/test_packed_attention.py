import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.models.common.attention import attention
from alload_jax.models.common.cudnn import cudnn_packed, length_classes
from alload_jax.models.common.segments import PADDING, AttentionSegments, segments_of

HEADS, HEAD_DIM = 2, 8
ROWS, SLOTS, TOKENS = 2, 4, 44
"""Of random rows: SLOTS segments of 9 tokens with gaps of 2 fit just so."""


def laid_out(rows, slots, tokens):
    """Segments from lists of (offset, length), one list a row."""
    table = np.zeros((2, len(rows), slots), np.int32)
    for row, parts in enumerate(rows):
        for slot, part in enumerate(parts):
            table[:, row, slot] = part
    return segments_of(table, tokens)


def packed_of(queries, keys, slots, total_q, total_k):
    sides = laid_out(queries, slots, total_q), laid_out(keys, slots, total_k)
    lengths, longest_key = lengths_of(sides[0]), int(sides[1].length.max())
    packed = AttentionSegments(*sides, lengths, None if queries == keys else longest_key)
    return jax.tree.map(jnp.asarray, packed)


def lengths_of(segments):
    """The tightest bounds of these segments' lengths."""
    above = [0, *np.unique(segments.length[segments.length > 0]).tolist()]
    most = [int((segments.length > each).sum(axis=1).max()) for each in above]
    return tuple(zip(above, most, strict=True))


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


def heads(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def parts_of(rows, total_q, total_k, dtype=jnp.float32, num_heads=HEADS, head_dim=HEAD_DIM):
    sizes = (total_q, total_k, total_k)
    return [heads((rows, n, num_heads, head_dim), i, dtype) for i, n in enumerate(sizes)]


def oracle(query, key, value, queries, keys):
    """Each segment by itself, in float64."""
    query, key, value = (np.asarray(part, np.float64) for part in (query, key, value))
    output = np.zeros_like(query)
    for row, (of_query, of_key) in enumerate(zip(queries, keys, strict=True)):
        for (q0, qn), (k0, kn) in zip(of_query, of_key, strict=True):
            q, k, v = query[row, q0 : q0 + qn], key[row, k0 : k0 + kn], value[row, k0 : k0 + kn]
            logits = np.einsum("shd,thd->hst", q, k) / np.sqrt(query.shape[-1])
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            output[row, q0 : q0 + qn] = np.einsum("hst,thd->shd", weights, v)
    return output


@given(packings())
@settings(max_examples=20, deadline=None)
def test_segments_attend_to_themselves_alone(case):
    queries, keys = case
    parts = parts_of(ROWS, TOKENS, TOKENS)
    packed = packed_of(queries, keys, SLOTS, TOKENS, TOKENS)
    found = attention(*parts, segments=packed)
    np.testing.assert_allclose(found, oracle(*parts, queries, keys), rtol=2e-5, atol=2e-6)


@given(packings())
@settings(max_examples=15, deadline=None)
def test_every_token_knows_its_segment(case):
    queries, _ = case
    ids = laid_out(queries, SLOTS, TOKENS).ids
    expected = np.full((ROWS, TOKENS), PADDING)
    for row, parts in enumerate(queries):
        for slot, (offset, length) in enumerate(parts):
            expected[row, offset : offset + length] = slot
    assert (ids == expected).all()


LAID = [[(0, 7), (8, 1), (12, 20)], [(0, 3)]]
LAID_KEYS = [[(0, 5), (5, 5), (10, 5)], [(0, 5)]]


def packed_case(dtype=jnp.float32):
    parts = parts_of(2, 40, 20, dtype)
    return parts, packed_of(LAID, LAID_KEYS, 4, 40, 20)


def test_a_nan_stays_in_its_segment():
    (query, key, value), packed = packed_case()
    clean = attention(query, key, value, segments=packed)
    for place in range(3):
        spoilt = [query, key, value]
        inside = slice(12, 32) if place == 0 else slice(10, 15)
        spoilt[place] = spoilt[place].at[0, inside].set(jnp.nan)
        found = np.array(attention(*spoilt, segments=packed))
        assert np.isnan(found[0, 12:32]).all()
        found[0, 12:32] = np.asarray(clean)[0, 12:32]
        assert (found == np.asarray(clean)).all()


def test_neighbours_change_no_bit():
    (query, key, value), packed = packed_case()
    found = attention(query, key, value, segments=packed)
    others = [part.at[0, 0:5].set(7.0) for part in (query, key, value)]
    changed = attention(*others, segments=packed)
    assert (np.asarray(found)[0, 8:] == np.asarray(changed)[0, 8:]).all()
    assert (np.asarray(found)[1] == np.asarray(changed)[1]).all()


def total(parts, packed, implementation, **options):
    output = attention(*parts, segments=packed, implementation=implementation, **options)
    wave = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
    return jnp.sum(output.astype(jnp.float32) * wave)


def test_gradients_are_those_of_each_segment_by_itself():
    parts, packed = packed_case()
    found = jax.grad(total)(parts, packed, "xla")

    def alone(parts):
        query, key, value = parts
        output = jnp.zeros_like(query)
        for row, (of_query, of_key) in enumerate(zip(LAID, LAID_KEYS, strict=True)):
            for (q0, qn), (k0, kn) in zip(of_query, of_key, strict=True):
                piece = attention(
                    query[row : row + 1, q0 : q0 + qn],
                    key[row : row + 1, k0 : k0 + kn],
                    value[row : row + 1, k0 : k0 + kn],
                    implementation="xla",
                )
                output = output.at[row, q0 : q0 + qn].set(piece[0])
        wave = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        return jnp.sum(output * wave)

    for ours, theirs in zip(found, jax.grad(alone)(parts), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
        assert np.isfinite(ours).all()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
def test_cudnn_on_a_cpu_is_refused_with_another_layout():
    parts, packed = packed_case(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"backend is 'cpu'.*dual_constraint"):
        attention(*parts, segments=packed, implementation="cudnn")


def test_rows_over_devices_stay_where_they_are():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices[:2])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    parts, packed = packed_case()
    expected = attention(*parts, segments=packed)
    placed, laid = jax.device_put((parts, packed), sharding)
    run = jax.jit(lambda parts, packed: attention(*parts, segments=packed, sharding=sharding))
    assert "all-gather" not in run.lower(placed, laid).compile().as_text()
    np.testing.assert_allclose(run(placed, laid), expected, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------- on a GPU

GPU_CASES = {
    "odd lengths, one token, unused slots": (
        [[(0, 1000), (1000, 77), (1077, 3), (1080, 1)]],
        [[(0, 1000), (1000, 77), (1077, 3), (1080, 1)]],
        1081,
        1081,
        7,
    ),
    "queries and keys of other lengths, unused keys": (
        [[(0, 300), (300, 220)], [(0, 520)]],
        [[(0, 64), (64, 1)], [(0, 64)]],
        520,
        192,
        3,
    ),
    "tokens of no segment, and a row without any": (
        [[(8, 300), (400, 100)], []],
        [[(0, 64), (64, 64)], []],
        520,
        192,
        3,
    ),
    "one slot": ([[(0, 128)]], [[(0, 100)]], 128, 128, 1),
    "segments across windows": (
        [[(0, 500), (500, 12), (512, 300), (812, 212)], [(0, 512), (512, 500), (1012, 12)]],
        [[(0, 64), (64, 1), (65, 64), (129, 64)], [(0, 64), (64, 64), (128, 64)]],
        1024,
        256,
        5,
    ),
    "a long segment beside short ones, by classes": (
        [[(n * 16, 16) for n in range(40)] + [(640, 1000), (1640, 300), (1940, 108)]],
        [[(n * 16, 16) for n in range(40)] + [(640, 1000), (1640, 300), (1940, 108)]],
        2048,
        2048,
        300,
    ),
    "many short segments": (
        [[(n * 60, 60) for n in range(17)] + [(1020, 4)]],
        [[(n * 60, 60) for n in range(17)] + [(1020, 4)]],
        1024,
        1024,
        20,
    ),
}


@pytest.mark.parametrize("name", GPU_CASES)
def test_cudnn_is_called_forward_and_backward_for_each_class(name):
    """Lowered for a GPU on any machine: what JAX's primitives refuse is found without one."""
    queries, keys, total_q, total_k, slots = GPU_CASES[name]
    parts = parts_of(len(queries), total_q, total_k, jnp.bfloat16, 4, 64)
    packed = packed_of(queries, keys, slots, total_q, total_k)
    graded = jax.jit(jax.grad(lambda p: jnp.sum(cudnn_packed(*p, packed).astype(jnp.float32))))
    text = graded.trace(parts).lower(lowering_platforms=("cuda",)).as_text()
    rows = len(queries)
    shapes = (rows, total_q), (rows, total_k)
    classes = length_classes(*shapes, packed.lengths, packed.longest_key)
    assert text.count("custom_call @__cudnn") == 2 * len(classes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cudnn_equals_the_oracle_on_packed_rows(name, head_dim):
    queries, keys, total_q, total_k, slots = GPU_CASES[name]
    parts = parts_of(len(queries), total_q, total_k, jnp.bfloat16, 4, head_dim)
    packed = packed_of(queries, keys, slots, total_q, total_k)
    found = np.asarray(attention(*parts, segments=packed, implementation="cudnn"), np.float64)
    expected = oracle(*parts, queries, keys)
    assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)
    fused = jax.jit(jax.grad(lambda p: total(p, packed, "cudnn")))(parts)
    plain = jax.grad(lambda p: total(p, packed, "xla"))([p.astype(jnp.float32) for p in parts])
    for ours, theirs in zip(fused, plain, strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.isfinite(ours).all()
        assert np.linalg.norm(ours - theirs) < 2e-2 * np.linalg.norm(theirs)
