"""Block-sparse attention against float64, as the reference and as kernels."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import BF16, F16, ROUNDING, assert_same_bits
from lowering import lowered_for_cuda

from pallas_kernels import devices
from pallas_kernels.block_sparse_attention import (
    BlockLists,
    BlockSegments,
    PooledScores,
    block_sparse_attention,
    full_lists,
    pool_blocks,
    top_k_blocks,
    triton,
)
from pallas_kernels.block_sparse_attention import mosaic as mosaic_calls
from pallas_kernels.block_sparse_attention.block_lists import invert, longest_first
from pallas_kernels.block_sparse_attention.mosaic import MosaicTiles
from pallas_kernels.block_sparse_attention.triton import TritonTiles

KINDS = ("random", "full", "empty", "one", "ragged", "popular")
KERNELS = ("triton", "mosaic")
WAYS = (
    pytest.param(("triton", True), id="triton-interpreted"),
    pytest.param(("triton", False), id="triton", marks=pytest.mark.gpu),
    pytest.param(("mosaic", False), id="mosaic", marks=pytest.mark.gpu),
)


def options(way):
    return dict(zip(("implementation", "interpret"), way, strict=True))


def run_here(way):
    implementation, interpret = way
    on_gpu = jax.default_backend() == "gpu"
    if implementation != "xla" and interpret == on_gpu:
        pytest.skip("runs in the interpreter" if interpret else "needs a GPU")
    if implementation == "mosaic" and (reason := devices.unsupported_mosaic_device()):
        pytest.skip(str(reason))
    return way


@pytest.fixture(params=WAYS)
def way(request):
    """Kernels: (implementation, interpret)."""
    return run_here(request.param)


@pytest.fixture(params=[pytest.param(("xla", False), id="xla"), *WAYS])
def any_way(request):
    """Likewise, the reference too."""
    return run_here(request.param)


def lists_of(kind, rng, rows, heads, n_query, n_key, query_block=64, key_block=64):
    """Lists of a kind; every row and head has its own."""
    if kind == "full":
        tokens = (
            jnp.full((rows, n), size) for n, size in ((n_query, query_block), (n_key, key_block))
        )
        return full_lists(*tokens, heads, query_block, key_block)
    most = 1 if kind == "one" else max(1, n_key - 1)
    weight = 1.0 / np.arange(1, n_key + 1) ** (2 if kind == "popular" else 0)
    chosen = [
        rng.choice(n_key, most, replace=False, p=weight / weight.sum())
        for _ in range(rows * heads * n_query)
    ]
    counts = rng.integers(0, most + 1, (rows, heads, n_query))
    if kind == "one":
        counts[:] = most
    if kind == "empty":
        counts[:] = 0
    tokens = [np.full((rows, n_query), query_block), np.full((rows, n_key), key_block)]
    if kind == "ragged":
        tokens = [rng.integers(0, each.max() + 1, each.shape) for each in tokens]
    return BlockLists(
        jnp.asarray(np.reshape(chosen, (rows, heads, n_query, most)), jnp.int32),
        jnp.asarray(counts, jnp.int32),
        *(jnp.asarray(each, jnp.int32) for each in tokens),
        query_block,
        key_block,
    )


def seen_by(blocks, queries, keys):
    """[R, H, S, T] bool: which keys a query attends to, from the lists one by one."""
    rows, heads, n_query, _ = blocks.indices.shape
    seen = np.zeros((rows, heads, n_query * blocks.query_block, keys), bool)
    parts = [np.asarray(x) for x in (blocks.indices, blocks.counts)]
    for r, h, b in np.ndindex(rows, heads, n_query):
        for listed in parts[0][r, h, b, : parts[1][r, h, b]]:
            q, k = b * blocks.query_block, listed * blocks.key_block
            q_end = q + int(blocks.query_tokens[r, b])
            seen[r, h, q:q_end, k : k + int(blocks.key_tokens[r, listed])] = True
    return seen[:, :, :queries]


def oracle(q, k, v, dout, blocks, scale=None, dlse=None):
    """Output, statistics and gradients in float64, by the formulas of attention."""
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = seen_by(blocks, q.shape[2], k.shape[2])
    scores = np.where(seen, q @ k.swapaxes(2, 3) * scale, -np.inf)
    some = seen.any(axis=-1)
    top = np.where(some, scores.max(axis=-1, initial=-np.inf), 0.0)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    lse = np.where(some, top + np.log(np.where(some, total, 1.0)), -np.inf)
    share = weights / np.where(some, total, 1.0)[..., None]
    out = share @ v
    dshare = dout @ v.swapaxes(2, 3)
    inner = (dshare * share).sum(axis=-1, keepdims=True)
    dscores = share * (dshare - inner)
    if dlse is not None:
        dscores += share * np.where(some, dlse, 0.0)[..., None]
    grads = (dscores @ k * scale, dscores.swapaxes(2, 3) @ q * scale, share.swapaxes(2, 3) @ dout)
    return [x.swapaxes(1, 2) for x in (out, *grads)], lse


@partial(jax.jit, static_argnames=("way", "scale"))
def compute(q, k, v, dout, blocks, way, scale=None, dlse=None):
    """Output and gradients, and the statistics. `way` is (implementation, interpret)."""

    def attend(q, k, v):
        given = options(way) | {"scale": scale, "return_lse": True}
        return block_sparse_attention(q, k, v, blocks, **given)

    (out, lse), pull = jax.vjp(attend, q, k, v)
    return (out, *pull((dout, jnp.zeros_like(lse) if dlse is None else dlse))), lse


def close(found, expected, dtype):
    """Whether outputs and gradients are within a few roundings of their size."""
    for each, exact in zip(found, expected, strict=True):
        size = max(np.abs(exact).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(
            np.asarray(each, np.float64), exact, atol=4 * ROUNDING[jnp.dtype(dtype)] * size
        )


def case(kind, rows=1, heads=2, queries=192, keys=256, width=64, dtype=BF16, blocks=(64, 64)):
    """q, k, v and a cotangent of the output, and lists."""
    rng = np.random.default_rng(KINDS.index(kind))
    n_query, n_key = -(-queries // blocks[0]), -(-keys // blocks[1])
    lists = lists_of(kind, rng, rows, heads, n_query, n_key, *blocks)
    # The last blocks may be cut short by the end of the arrays.
    lists = dataclasses.replace(
        lists,
        query_tokens=jnp.minimum(lists.query_tokens, queries - jnp.arange(n_query) * blocks[0]),
        key_tokens=jnp.minimum(lists.key_tokens, keys - jnp.arange(n_key) * blocks[1]),
    )
    sizes = (queries, keys, keys, queries)
    return [jnp.asarray(rng.normal(size=(rows, n, heads, width)), dtype) for n in sizes], lists


def check(inputs, lists, way, *, meant=None, **options):
    """`meant`: lists for the oracle, where they are not the same."""
    found, lse = compute(*inputs, lists, way, **options)
    expected, exact = oracle(*inputs, meant or lists, **options)
    close(found, expected, inputs[0].dtype)
    np.testing.assert_allclose(lse, exact, rtol=1e-5, atol=2e-3)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact))


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("ragged", 0.3), ("one", -8.0), ("empty", None), ("popular", None), ("full", None)],
)
def test_it_equals_the_oracle(kind, scale, any_way):
    inputs, lists = case(kind)
    dlse = np.random.default_rng(5).normal(size=(1, 2, 192)).astype(np.float32)
    check(inputs, lists, any_way, scale=scale, dlse=dlse)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (64, 128), (128, 128)])
@pytest.mark.parametrize(("width", "dtype"), [(64, F16), (128, BF16)])
def test_blocks_widths_and_dtypes(blocks, width, dtype, way):
    inputs, lists = case("ragged", 2, 1, 300, 397, width, dtype, blocks)
    check(inputs, lists, way)


@pytest.mark.parametrize(
    ("own", "listed"),
    [(64, 128), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((64, 32), (128, 256)))],
)
def test_triton_tiles_of_parts_of_blocks_and_of_several_blocks(own, listed, interpret, monkeypatch):
    block, way = 128 if listed == 256 else 64, ("triton", interpret)
    inputs, lists = case("ragged", 1, 2, 450, 650, 64, blocks=(block, block))
    used = set()

    def tiles(kernel, *_):
        used.add(kernel)
        query, key = (listed, own) if kernel == "dkv" else (own, listed)
        return TritonTiles(query, key, 4, 2)

    monkeypatch.setattr(triton, "tiles_for", tiles)
    compute.clear_cache()
    check(inputs, lists, way)
    assert used == {"forward", "dq", "dkv"}


@pytest.mark.gpu
@pytest.mark.parametrize(("own", "listed"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("slots", [(1, 1), (2, 1), (1, 3)])
def test_mosaic_tiles_and_slots(own, listed, slots, monkeypatch):
    way = run_here(("mosaic", False))
    inputs, lists = case("ragged", 1, 2, 450, 650, 64, blocks=(128, 128))
    monkeypatch.setattr(mosaic_calls, "tiles_for", lambda *_: MosaicTiles(own, listed, slots))
    compute.clear_cache()
    check(inputs, lists, way)


def test_the_reference_takes_float32_and_any_width():
    inputs, lists = case("ragged", heads=1, queries=70, keys=130, width=24, dtype=jnp.float32)
    found, _ = compute(*inputs, lists, ("xla", False))
    for each, exact in zip(found, oracle(*inputs, lists)[0], strict=True):
        assert each.dtype == jnp.float32
        np.testing.assert_allclose(each, exact, atol=1e-5)


@pytest.mark.gpu
def test_equal_inputs_give_equal_bits(way):
    inputs, lists = case("popular")
    assert_same_bits(*(compute(*inputs, lists, way) for _ in range(2)))


def test_what_no_list_names_changes_nothing(any_way):
    """NaN in tokens that are not valid, and in blocks that no list names."""
    (q, k, v, dout), lists = case("ragged", heads=1)
    seen = seen_by(lists, 192, 256)
    unused = jnp.asarray(~seen.any(axis=(1, 2)))[:, :, None, None]
    idle = jnp.asarray(~seen.any(axis=(1, 3)))[:, :, None, None]
    spoilt = [jnp.where(idle, jnp.nan, q), *(jnp.where(unused, jnp.nan, x) for x in (k, v))]
    dout = jnp.where(idle, 0, dout)
    expected, _ = compute(q, k, v, dout, lists, any_way)
    found, _ = compute(*(x.astype(BF16) for x in spoilt), dout, lists, any_way)
    assert_same_bits(found, expected)
    assert np.isfinite(np.asarray(expected[0], np.float32)).all()


def test_transformations(way):
    (q, k, v, _), lists = case("random", rows=2, heads=1, queries=128, keys=128)

    def attend(q, k, v, lists):
        return block_sparse_attention(q, k, v, lists, **options(way))

    @jax.jit
    def transformed(*given):
        stacked = jax.tree.map(lambda x: x[:, None], given)
        _, scanned = jax.lax.scan(lambda c, x: (c, attend(*x)), 0, stacked)
        return jax.vmap(attend)(*stacked)[:, 0], scanned[:, 0]

    given = (q, k, v, lists)
    assert_same_bits(transformed(*given), [jax.jit(attend)(*given)] * 2)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_rows_and_heads_are_split_over_a_mesh_without_communication(kind, any_way):
    """But for the best blocks of a selection, which XLA gathers."""
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    types = (AxisType.Auto if kind == "auto" else AxisType.Explicit,) * 2
    rows = min(2, len(jax.devices()) // 2)
    mesh = jax.make_mesh((rows, 2), ("rows", "heads"), axis_types=types)
    inputs, _ = case("random", rows=2, queries=256)
    tokens, ids = jnp.full((2, 4), 64, jnp.int32), jnp.zeros((2, 4), jnp.int32)

    def attend(q, k, v, dout, sharding=None):
        pooled = PooledScores(*(pool_blocks(each, tokens, block=64) for each in (q, k)))
        lists = top_k_blocks(pooled, 2, BlockSegments(ids, ids), tokens, tokens, k_max=2)
        run = partial(block_sparse_attention, **options(any_way), sharding=sharding)
        out, pull = jax.vjp(lambda *given: run(*given, lists), q, k, v)
        return out, *pull(dout)

    split = NamedSharding(mesh, P("rows", None, "heads", None))
    with jax.set_mesh(mesh):
        arguments = [jax.device_put(x, split) for x in inputs]
        told = split if kind == "auto" else None
        compiled = jax.jit(partial(attend, sharding=told)).lower(*arguments).compile()
        found = compiled(*arguments)
    for one, other in zip(found, jax.jit(attend)(*inputs), strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, atol=0.02 if any_way[0] == "xla" else 0)
    moved = [each for each in compiled.as_text().splitlines() if "all-" in each]
    assert any_way[0] == "xla" or all("top_k" in each for each in moved)


# ---------------------------------------------------------------- lists


def listed(*given):
    """Lists of one row."""
    return BlockLists(*(jnp.asarray([each], jnp.int32) for each in given))


def test_numbers_out_of_range_are_the_nearest_that_exist(any_way):
    inputs, _ = case("random", heads=1, queries=130, keys=200)
    lists = listed([[[0, 9], [3, -4], [1, 2]]], [[2, 2, 7]], [64, 900, 64], [64, -5, 300, 64])
    meant = listed([[[0, 3], [3, 0], [1, 2]]], [[2, 2, 2]], [64, 64, 2], [64, 0, 64, 8])
    check(inputs, lists, any_way, meant=meant)


@pytest.mark.parametrize(
    ("field", "place", "value", "words"),
    [
        ("indices", (0, 1, 2, 1), 3, r"blocks\.indices\[0, 1, 2\] names block 3 twice"),
        ("indices", (0, 0, 1, 0), 4, r"blocks\.indices\[0, 0, 1, 0\] is 4; it must be from 0 to 3"),
        ("indices", (0, 0, 1, 0), -1, r"blocks\.indices\[0, 0, 1, 0\] is -1"),
        ("counts", (0, 1, 0), 5, r"blocks\.counts\[0, 1, 0\] is 5; it must be from 0 to 4"),
        ("query_tokens", (0, 2), -1, r"blocks\.query_tokens\[0, 2\] is -1"),
        ("key_tokens", (0, 3), 65, r"blocks\.key_tokens\[0, 3\] is 65; it must be from 0 to 64"),
    ],
)
def test_debug_finds_what_lists_must_not_hold(field, place, value, words):
    (q, k, v, _), lists = case("full")
    # Block 3 stands first in the list where the second entry becomes 3 as well. What is beyond a
    # list's count is ignored.
    indices = lists.indices.at[0, 1, 2].set(jnp.arange(4)[::-1]).at[0, 1, 1, 2:].set(99)
    lists = dataclasses.replace(lists, indices=indices, counts=lists.counts.at[0, 1, 1].set(2))
    wrong = getattr(lists, field).at[place].set(value)
    wrong = dataclasses.replace(lists, **{field: wrong})

    def checked(lists):
        attended(q, k, v, lists)
        jax.effects_barrier()

    checked(lists)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=words):
        checked(wrong)
    if field == "counts":
        with (
            pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=words),
            jax.disable_jit(),
        ):
            checked(wrong)


@jax.jit
def attended(q, k, v, lists):
    return block_sparse_attention(q, k, v, lists, implementation="xla", debug=True)


def test_nan_among_the_scores_reaches_statistics_and_gradients(any_way):
    inputs, lists = case("full")
    q = inputs[0].at[0, 0, 0, 0].set(jnp.nan)
    (out, dq, *_), lse = compute(q, *inputs[1:], lists, any_way)
    for value in (out[0, 0, 0], dq[0, 0, 0], lse[0, 0, :1]):
        assert np.isnan(np.asarray(value, np.float32)).all()


@pytest.mark.parametrize("kind", ["popular", "full", "empty"])
def test_inverted_lists_hold_every_pair_once_and_longest_come_first(kind):
    assert longest_first(jnp.asarray([[3, 0, 5, 3]])).tolist() == [[2, 0, 3, 1]]
    lists = lists_of(kind, np.random.default_rng(0), 2, 3, 7, 5)
    found, expected = jax.jit(invert)(lists), [[] for _ in range(2 * 3 * 5)]
    for r, h, q in np.ndindex(2, 3, 7):
        for key in lists.indices[r, h, q, : int(lists.counts[r, h, q])].tolist():
            expected[(r * 3 + h) * 5 + key].append(q)
    for r, h, key in np.ndindex(2, 3, 5):
        first, last = found.offsets[r, h, key : key + 2].tolist()
        assert found.queries[r, h, first:last].tolist() == expected[(r * 3 + h) * 5 + key]


# ---------------------------------------------------------------- refusals


KERNEL = {"implementation": "triton", "interpret": True}


@pytest.mark.parametrize(
    ("words", "name", "change", "options"),
    [
        ("q is (192, 2, 64)", "q", lambda x: x[0], {}),
        ("k is float16 and q is bfloat16", "k", lambda x: x.astype(F16), {}),
        ("both must be [1, T, 2, 64]", "v", lambda x: x[:, :5], {}),
        ("scale is nan", "", None, {"scale": float("nan")}),
        ("scale is 0.0", "", None, {"scale": 0.0}),
        ("scale is bool; give a Python number", "", None, {"scale": True}),
        ("choose one of auto, triton, mosaic, xla", "", None, {"implementation": "cuda"}),
        ("D is 32; give 64 or 128", "qkv", lambda x: x[..., :32], KERNEL),
        ("q is float32; give bfloat16", "qkv", lambda x: x.astype(jnp.float32), KERNEL),
        ("give BlockLists", "blocks", lambda x: x.indices, {}),
        ("query_block is 32; it must be 64 or 128", "query_block", lambda _: 32, {}),
        ("key_block is 32; it must be 64 or 128", "key_block", lambda _: 32, {}),
        ("blocks.indices is (1, 2, 3); it must have 4", "indices", lambda x: x[..., 0], {}),
        ("blocks.counts is (1, 2, 2)", "counts", lambda x: x[..., :2], {}),
        ("key_tokens is float32", "key_tokens", lambda x: x.astype(jnp.float32), {}),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(words, name, change, options):
    (q, k, v, _), lists = case("random")
    given = {"q": q, "k": k, "v": v, "blocks": lists}
    if hasattr(lists, name):
        given["blocks"] = dataclasses.replace(lists, **{name: change(getattr(lists, name))})
    else:
        given |= {each: change(given[each]) for each in ([name] if name in given else name)}
    with pytest.raises((TypeError, ValueError)) as found:
        block_sparse_attention(**given, **options)
    assert re.match(f"block_sparse_attention: .*{re.escape(words)}.*$", str(found.value))


@pytest.mark.parametrize(
    ("rows", "queries", "heads", "most"),
    [(0, 192, 2, 3), (1, 0, 2, 3), (1, 192, 0, 3), (1, 192, 2, 0)],
)
def test_of_nothing_nothing_is_computed(rows, queries, heads, most):
    q = jnp.zeros((rows, queries, heads, 64), BF16)
    k = jnp.zeros((rows, 256, heads, 64), BF16)
    shapes = ((heads, queries // 64, most), (heads, queries // 64), (queries // 64,), (4,))
    lists = BlockLists(*(jnp.ones((rows, *shape), jnp.int32) for shape in shapes))
    (out, *grads), lse = compute(q, k, k, q, lists, ("auto", False))
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, k.shape]
    assert lse.shape == (rows, heads, queries)
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()


# ---------------------------------------------------------------- lowering


def calls_of(module, kernel):
    """How often a lowered module runs a kernel; functions that are alike stand in it once."""
    functions = {part.split("(")[0]: part for part in re.split(r"func\.func \w+ @", module)[1:]}

    def count(name):
        own = sum(kernel in line for line in functions[name].splitlines() if "custom_call" in line)
        return own + sum(map(count, re.findall(r"[^_]call @(\w+)\(", functions[name])))

    return count("main")


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(
    ("blocks", "width", "forwards"),
    [((64, 64), 64, 1), ((128, 64), 128, 2), ((128, 128), 64, 1)],
    ids=str,
)
@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_lower_for_cuda_once_where_a_checkpoint_keeps_the_output(
    implementation, blocks, width, forwards
):
    x = jax.ShapeDtypeStruct((2, 4096, 12, width), BF16)
    n_query, n_key = (4096 // size for size in blocks)
    shapes = ((2, 12, n_query, 9), (2, 12, n_query), (2, n_query), (2, n_key))
    lists = BlockLists(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes), *blocks)
    names = ("attention_output",) if forwards == 1 else ()

    def loss(q, k, v, lists):
        out = block_sparse_attention(q, k, v, lists, implementation=implementation)
        return out.astype(jnp.float32).sum()

    kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(*names))
    module = lowered_for_cuda(jax.value_and_grad(kept, (0, 1, 2)), x, x, x, lists)
    for name, count in (("forward", forwards), ("dq", 1), ("dkv", 1)):
        assert calls_of(module, f"block_sparse_attention_{name}") == count
