"""Block-sparse attention against float64, as the reference and as kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_sparse_cases import KINDS, arrays, close, compute, lists_of, oracle, seen_by
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import lowered_for_cuda

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
from pallas_kernels.block_sparse_attention.mosaic_tiles import MosaicTiles
from pallas_kernels.block_sparse_attention.triton import TritonTiles

BF16, F16 = jnp.bfloat16, jnp.float16
KERNELS = ("triton", "mosaic")
WAYS = (
    pytest.param(("triton", True), id="triton-interpreted"),
    pytest.param(("triton", False), id="triton", marks=pytest.mark.gpu),
    pytest.param(("mosaic", False), id="mosaic", marks=pytest.mark.gpu),
)


def run_here(way):
    implementation, interpret = way
    on_gpu = jax.default_backend() == "gpu"
    if implementation != "xla" and interpret == on_gpu:
        pytest.skip("runs in the interpreter" if interpret else "needs a GPU")
    if implementation == "mosaic" and (reason := devices.unsupported_mosaic_device()):
        pytest.skip(str(reason))
    return way


def allow(implementation, monkeypatch):
    """Lets kernels be lowered on a host without their device."""
    monkeypatch.setattr(devices, f"unsupported_{implementation}_device", lambda: None)


@pytest.fixture(params=WAYS)
def way(request):
    """Kernels: (implementation, interpret)."""
    return run_here(request.param)


@pytest.fixture(params=[pytest.param(("xla", False), id="xla"), *WAYS])
def any_way(request):
    """Likewise, the reference too."""
    return run_here(request.param)


def case(kind, rows=1, heads=2, queries=192, keys=256, width=64, dtype=BF16, blocks=(64, 64)):
    rng = np.random.default_rng(KINDS.index(kind))
    n_query, n_key = -(-queries // blocks[0]), -(-keys // blocks[1])
    lists = lists_of(kind, rng, rows, heads, n_query, n_key, *blocks)
    # The last blocks may be cut short by the end of the arrays.
    lists = dataclasses.replace(
        lists,
        query_tokens=jnp.minimum(lists.query_tokens, queries - jnp.arange(n_query) * blocks[0]),
        key_tokens=jnp.minimum(lists.key_tokens, keys - jnp.arange(n_key) * blocks[1]),
    )
    return arrays(rng, rows, queries, keys, heads, width, dtype), lists


def check(inputs, lists, way, **options):
    found, lse = compute(*inputs, lists, way, **options)
    expected, exact = oracle(*inputs, lists, **options)
    close(found, expected, inputs[0].dtype)
    np.testing.assert_allclose(lse, exact, rtol=1e-5, atol=2e-3)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact))


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_all_kinds(kind, any_way):
    inputs, lists = case(kind)
    check(inputs, lists, any_way)


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
    check(inputs, lists, way)
    assert used == {"forward", "dq", "dkv"}


@pytest.mark.parametrize("own", [64, 128])
@pytest.mark.parametrize("listed", [64, 128])
@pytest.mark.parametrize("slots", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.gpu
def test_mosaic_tiles_and_slots(own, listed, slots, monkeypatch):
    way = run_here(("mosaic", False))
    inputs, lists = case("ragged", 1, 2, 450, 650, 64, blocks=(128, 128))
    monkeypatch.setattr(mosaic_calls, "tiles_for", lambda *_: MosaicTiles(own, listed, slots))
    check(inputs, lists, way)


@pytest.mark.parametrize("scale", [0.3, -0.1])
def test_a_scale_and_a_gradient_of_the_statistics(scale, any_way):
    inputs, lists = case("ragged", heads=1)
    dlse = np.random.default_rng(5).normal(size=(1, 1, 192)).astype(np.float32)
    check(inputs, lists, any_way, scale=scale, dlse=dlse)


def test_full_lists_are_dense_attention(any_way):
    q, k, v, dout = arrays(np.random.default_rng(0), 1, 128, 128, 2, 64)
    lists = full_lists(jnp.full((1, 2), 64), jnp.full((1, 2), 64), 2)
    (out, *grads), _ = compute(q, k, v, dout, lists, any_way)
    dense, pull = jax.vjp(jax.nn.dot_product_attention, q, k, v)
    close([out, *grads], [np.asarray(x, np.float64) for x in (dense, *pull(dout))], BF16)


def test_gradients_are_those_of_finite_differences():
    """Of the reference in float32, whose gradients are JAX's own: the oracle's check."""
    inputs, lists = case("ragged", heads=1, queries=70, keys=130)
    inputs = [jnp.asarray(x, jnp.float32) for x in inputs]
    expected, _ = oracle(*inputs, lists)
    weights, rng = np.asarray(inputs[3], np.float64), np.random.default_rng(1)
    for position in range(3):
        direction = rng.normal(size=inputs[position].shape)
        moved = []
        for sign in (1, -1):
            changed = [np.asarray(x, np.float64) for x in inputs]
            changed[position] = changed[position] + sign * 1e-5 * direction
            moved.append((oracle(*changed, lists)[0][0] * weights).sum())
        slope = (moved[0] - moved[1]) / 2e-5
        assert slope == pytest.approx((expected[1 + position] * direction).sum(), rel=1e-5)
    found, _ = compute(*inputs, lists, ("xla", False))
    for each, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, exact, atol=1e-5)


def test_equal_inputs_give_equal_bits(way):
    inputs, lists = case("popular")
    first, second = (compute(*inputs, lists, way) for _ in range(2))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_what_no_list_names_changes_nothing(any_way):
    """NaN in tokens that are not valid, and in blocks that no list names."""
    (q, k, v, dout), lists = case("ragged", heads=1)
    seen = seen_by(lists, 192, 256)
    unused = jnp.asarray(~seen.any(axis=(1, 2)))[:, :, None, None]
    idle = jnp.asarray(~seen.any(axis=(1, 3)))[:, :, None, None]
    clean, _ = compute(q, k, v, dout, lists, any_way)
    spoilt = [jnp.where(idle, jnp.nan, q), *(jnp.where(unused, jnp.nan, x) for x in (k, v))]
    spoilt = [x.astype(BF16) for x in spoilt]
    found, _ = compute(*spoilt, jnp.where(idle, 0, dout), lists, any_way)
    expected, _ = compute(q, k, v, jnp.where(idle, 0, dout), lists, any_way)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert np.isfinite(np.asarray(clean[0], np.float32)).all()


def test_transformations(way):
    (q, k, v, _), lists = case("random", rows=2, heads=1, queries=128, keys=128)

    def attend(q, k, v, lists):
        run = dict(zip(("implementation", "interpret"), way, strict=True))
        return block_sparse_attention(q, k, v, lists, **run)

    plain = attend(q, k, v, lists)
    stacked = jax.tree.map(lambda x: x[:, None], (q, k, v, lists))
    mapped = jax.vmap(attend)(*stacked)[:, 0]
    _, scanned = jax.lax.scan(lambda c, x: (c, attend(*x)), 0, stacked)
    for each in (mapped, scanned[:, 0], jax.jit(attend)(q, k, v, lists)):
        np.testing.assert_array_equal(np.asarray(each), np.asarray(plain))


@pytest.mark.parametrize("implementation", KERNELS)
def test_checkpoint_keeps_output_and_statistics_by_name(implementation, monkeypatch):
    allow(implementation, monkeypatch)
    (q, k, v, _), lists = case("random", heads=1)

    def loss(q):
        out = block_sparse_attention(q, k, v, lists, implementation=implementation)
        return out.astype(jnp.float32).sum()

    def forwards(gradient):
        return calls_named("block_sparse_attention_forward", jax.make_jaxpr(gradient)(q).jaxpr)

    policy = jax.checkpoint_policies.save_only_these_names("attention_output")
    assert forwards(jax.grad(jax.checkpoint(loss, policy=policy))) == 1
    assert forwards(jax.grad(jax.checkpoint(loss))) == 2


def calls_named(name, jaxpr):
    """How often a jaxpr calls what has a name."""
    found = 0
    for equation in jaxpr.eqns:
        if str(equation.params.get("name")) == name:
            found += 1
            continue
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            found += calls_named(name, inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_rows_and_heads_are_split_over_a_mesh_without_communication(kind, way):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    types = (AxisType.Auto if kind == "auto" else AxisType.Explicit,) * 2
    rows = min(2, len(jax.devices()) // 2)
    mesh = jax.make_mesh((rows, 2), ("rows", "heads"), axis_types=types)
    inputs, lists = case("ragged", rows=2, heads=2, queries=128, keys=128)
    expected, _ = compute(*inputs, lists, way)
    split = NamedSharding(mesh, P("rows", None, "heads", None))
    specs = BlockLists(P("rows", "heads"), P("rows", "heads"), P("rows"), P("rows"), 64, 64)
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), lists, specs)

    def run(q, k, v, dout, lists):
        def attend(q, k, v):
            options = dict(zip(("implementation", "interpret"), way, strict=True))
            sharding = split if kind == "auto" else None
            return block_sparse_attention(q, k, v, lists, sharding=sharding, **options)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    with jax.set_mesh(mesh):
        arguments = [jax.device_put(x, split) for x in inputs]
        compiled = jax.jit(run).lower(*arguments, placed).compile()
        found = compiled(*arguments, placed)
    assert "all-" not in compiled.as_text()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_reference_and_a_selection_run_on_a_mesh(kind):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    explicit = AxisType.Auto if kind == "auto" else AxisType.Explicit
    mesh = jax.make_mesh((1, 2), ("rows", "heads"), axis_types=(explicit,) * 2)
    (q, k, v, _), _ = case("random", rows=2, queries=256)
    tokens, ids = jnp.full((2, 4), 64, jnp.int32), jnp.zeros((2, 4), jnp.int32)

    def attend(q, k, v):
        pooled = PooledScores(pool_blocks(q, tokens, block=64), pool_blocks(k, tokens, block=64))
        lists = top_k_blocks(pooled, 2, BlockSegments(ids, ids), tokens, tokens, k_max=2)
        options = {"implementation": "xla"}
        if kind == "auto" and q is not plain[0]:
            options["sharding"] = split
        out, pull = jax.vjp(lambda *a: block_sparse_attention(*a, lists, **options), q, k, v)
        return out, *pull(out)

    plain = (q, k, v)
    split = NamedSharding(mesh, P("rows", None, "heads", None))
    expected = attend(*plain)
    with jax.set_mesh(mesh):
        found = jax.jit(attend)(*(jax.device_put(x, split) for x in plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.02
        )


# ---------------------------------------------------------------- lists


def test_numbers_out_of_range_are_the_nearest_that_exist(any_way):
    inputs, _ = case("random", heads=1, queries=130, keys=200)
    lists = BlockLists(
        jnp.asarray([[[[0, 9], [3, -4], [1, 2]]]], jnp.int32),
        jnp.asarray([[[2, 2, 7]]], jnp.int32),
        jnp.asarray([[64, 900, 64]], jnp.int32),
        jnp.asarray([[64, -5, 300, 64]], jnp.int32),
    )
    meant = BlockLists(
        jnp.asarray([[[[0, 3], [3, 0], [1, 2]]]], jnp.int32),
        jnp.asarray([[[2, 2, 2]]], jnp.int32),
        jnp.asarray([[64, 64, 2]], jnp.int32),
        jnp.asarray([[64, 0, 64, 8]], jnp.int32),
    )
    found, lse = compute(*inputs, lists, any_way)
    expected, exact = oracle(*inputs, meant)
    close(found, expected, BF16)
    np.testing.assert_allclose(lse, exact, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("jitted", [False, True])
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
def test_debug_finds_what_lists_must_not_hold(field, place, value, words, jitted):
    (q, k, v, _), lists = case("full")
    # Block 3 stands first in the list where the second entry becomes 3 as well.
    lists = dataclasses.replace(lists, indices=lists.indices.at[0, 1, 2].set(jnp.arange(4)[::-1]))
    wrong = getattr(lists, field).at[place].set(value)
    wrong = dataclasses.replace(lists, **{field: wrong})

    def run(lists, debug):
        return block_sparse_attention(q, k, v, lists, implementation="xla", debug=debug)

    def run_checked(lists):
        out = (jax.jit(run, static_argnums=1) if jitted else run)(lists, True)
        jax.effects_barrier()
        return out

    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=words):
        run_checked(wrong)
    np.testing.assert_array_equal(run_checked(lists), run(lists, False))


def test_debug_ignores_what_is_beyond_a_lists_count():
    (q, k, v, _), lists = case("full")
    lists = dataclasses.replace(
        lists, indices=lists.indices.at[..., 1:].set(99), counts=jnp.ones_like(lists.counts)
    )
    block_sparse_attention(q, k, v, lists, implementation="xla", debug=True)
    jax.effects_barrier()


def test_nan_among_the_scores_reaches_statistics_and_gradients(any_way):
    inputs, lists = case("full")
    q = inputs[0].at[0, 0, 0, 0].set(jnp.nan)
    (out, dq, *_), lse = compute(q, *inputs[1:], lists, any_way)
    for value in (out[0, 0, 0], dq[0, 0, 0], lse[0, 0, :1]):
        assert np.isnan(np.asarray(value, np.float32)).all()


def test_second_derivatives_of_kernels_are_refused_in_words(way):
    (q, k, v, _), lists = case("full")
    implementation, interpret = way

    def slope(q):
        def total(q):
            options = {"implementation": implementation, "interpret": interpret}
            return block_sparse_attention(q, k, v, lists, **options).sum()

        return jax.grad(total)(q).sum()

    with pytest.raises(NotImplementedError, match="block_sparse_attention: the kernels different"):
        jax.grad(slope)(q)


@pytest.mark.parametrize("kind", KINDS)
def test_inverted_lists_hold_every_pair_once(kind):
    lists = lists_of(kind, np.random.default_rng(0), 2, 3, 7, 5)
    found, expected = invert(lists), [[] for _ in range(2 * 3 * 5)]
    for r, h, q in np.ndindex(2, 3, 7):
        for key in lists.indices[r, h, q, : int(lists.counts[r, h, q])].tolist():
            expected[(r * 3 + h) * 5 + key].append(q)
    for r, h, key in np.ndindex(2, 3, 5):
        first, last = found.offsets[r, h, key : key + 2].tolist()
        assert found.queries[r, h, first:last].tolist() == expected[(r * 3 + h) * 5 + key]


def test_longest_lists_come_first():
    order = longest_first(jnp.asarray([[3, 0, 5, 3]]))
    assert order.tolist() == [[2, 0, 3, 1]]


# ---------------------------------------------------------------- refusals


def test_what_does_not_fit_is_refused_in_one_line():
    (q, k, v, _), lists = case("random")

    def refused(error=ValueError, q=q, k=k, v=v, lists=lists, **options):
        with pytest.raises(error) as found:
            block_sparse_attention(q, k, v, lists, **options)
        message = str(found.value)
        assert message.startswith("block_sparse_attention: ")
        assert "\n" not in message
        return message

    replace = dataclasses.replace
    assert "q is (192, 2, 64)" in refused(q=q[0])
    assert "k is float16 and q is bfloat16" in refused(k=k.astype(F16))
    assert "both must be [1, T, 2, 64]" in refused(v=v[:, :5])
    assert "give BlockLists" in refused(TypeError, lists=lists.indices)
    assert "query_block is 32; it must be 64 or 128" in refused(
        lists=replace(lists, query_block=32)
    )
    assert "blocks.counts is (1, 2, 2)" in refused(
        lists=replace(lists, counts=lists.counts[..., :2])
    )
    assert "key_tokens is float32" in refused(
        lists=replace(lists, key_tokens=lists.key_tokens.astype(jnp.float32))
    )
    assert "scale is nan" in refused(scale=float("nan"))
    assert "choose one of auto, triton, mosaic, xla" in refused(implementation="cuda")
    assert "D is 32; give 64 or 128" in refused(
        q=q[..., :32], k=k[..., :32], v=v[..., :32], implementation="triton", interpret=True
    )
    assert "q is float32; give bfloat16" in refused(
        *(ValueError,),
        **{name: x.astype(jnp.float32) for name, x in (("q", q), ("k", k), ("v", v))},
        implementation="triton",
        interpret=True,
    )
    if jax.default_backend() == "cpu":
        assert "use 'xla' or 'auto'" in refused(NotImplementedError, implementation="triton")


@pytest.mark.parametrize("empty", ["rows", "queries", "heads"])
def test_empty_arrays_have_empty_results(empty):
    (q, k, v, _), lists = case("random")
    sizes = {"rows": (0, 192, 2), "queries": (1, 0, 2), "heads": (1, 192, 0)}[empty]
    rows, queries, heads = sizes
    q = jnp.zeros((rows, queries, heads, 64), BF16)
    k = v = jnp.zeros((rows, 256, heads, 64), BF16)
    n_query = queries // 64
    lists = BlockLists(
        jnp.zeros((rows, heads, n_query, 3), jnp.int32),
        jnp.zeros((rows, heads, n_query), jnp.int32),
        jnp.zeros((rows, n_query), jnp.int32),
        jnp.zeros((rows, 4), jnp.int32),
    )
    out, pull = jax.vjp(lambda *a: block_sparse_attention(*a, lists), q, k, v)
    assert out.shape == q.shape
    assert [x.shape for x in pull(out)] == [q.shape, k.shape, v.shape]


def test_nothing_is_computed_of_nothing():
    (q, k, v, _), lists = case("random")
    none = dataclasses.replace(lists, indices=lists.indices[..., :0])
    out, lse = block_sparse_attention(q, k, v, none, return_lse=True)
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()


# ---------------------------------------------------------------- lowering


@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_lower_for_cuda(implementation, blocks, width, monkeypatch):
    allow(implementation, monkeypatch)
    x = jax.ShapeDtypeStruct((2, 4096, 12, width), BF16)
    n_query, n_key = (4096 // size for size in blocks)
    shapes = ((2, 12, n_query, 9), (2, 12, n_query), (2, n_query), (2, n_key))
    lists = BlockLists(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes), *blocks)

    def both(q, k, v, dout, lists):
        out, pull = jax.vjp(
            lambda *a: block_sparse_attention(*a, lists, implementation=implementation), q, k, v
        )
        return out, pull(dout)

    module = lowered_for_cuda(both, x, x, x, x, lists)
    for name in ("forward", "dq", "dkv"):
        assert f"block_sparse_attention_{name}" in module
