"""LayerNorm-Modulate, of packed rows too, against float64; its errors."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, LAYOUTS

from pallas_kernels import layernorm_modulate, residual_layernorm_modulate, segmentation
from pallas_kernels.layernorm_modulate import row_blocks, tuning
from pallas_kernels.layernorm_modulate.operands import NormOperands

WIDE = {"shape": (2, 7, 1152)}
GATED = WIDE | {"x_dtype": BF16, "y_dtype": BF16, "gate": True}
CASES = {
    "one element": ({"shape": (1, 1, 1)}, {}),
    "many rows": ({"shape": (1, 300, 31), "x_dtype": F16, "modulation": F16}, {}),
    "rows of many tiles": ({"shape": (3, 2, 3072), "x_dtype": BF16, "modulation": BF16}, {}),
    "eps": ({"shape": (1, 3, 40), "spread": 1e-3}, {"eps": 1e-2}),
    "nearly constant": (WIDE | {"mean": 1.0, "spread": 1e-4}, {}),
    "without variance": (WIDE | {"mean": 3.0, "spread": 0.0}, {}),
    "far from zero": (WIDE | {"mean": 1000.0}, {}),
    "tiny": (WIDE | {"spread": 1e-30}, {}),
    "large": (WIDE | {"spread": 1e4}, {}),
    "gated": (GATED, {"residual_dtype": F32}),
    "gated, far from zero": (GATED | {"mean": 1000.0}, {"residual_dtype": F32}),
    "flat, a gated sum": (LAYOUTS["flat"] | {"y_dtype": F32, "gate": True}, {}),
    "flat, a scale for each token": ({"shape": (7, 40), "table": (7, 40), "x_dtype": BF16}, {}),
    "a scale for each token, a ragged width": (
        {"shape": (2, 7, 1000), "table": (2, 7, 1000), "y_dtype": F16, "gate": True},
        {},
    ),
    "a plain sum": ({"shape": (2, 5, 40), "x_dtype": BF16, "y_dtype": BF16}, {}),
    "a plain sum of two dtypes": ({"shape": (2, 5, 40), "y_dtype": BF16}, {}),
    "three dtypes": (
        {"shape": (2, 5, 40), "x_dtype": BF16, "y_dtype": F16, "gate": True, "modulation": F16},
        {"residual_dtype": F32},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_float64_oracle_up_to_one_rounding(name, way):
    fields, static = CASES[name]
    operands = cases.make(**fields)
    outputs, _ = cases.run_and_check(operands, way, **static)
    assert outputs[1].dtype == fields.get("y_dtype", operands.x.dtype)
    assert outputs[0] is None or outputs[0].dtype == static.get("residual_dtype", operands.x.dtype)


def sweep():
    """Every two of width, length and batch size meet; dtypes take turns."""
    dtypes = ((BF16, F32), (F32, F32), (BF16, BF16), (F16, F32), (F16, F16))
    for i, dim in enumerate((1, 31, 64, 96, 128, 256, 1152, 1536, 3072, 5120, 8192)):
        for j, seq_len in enumerate((1, 37, 1000)):
            yield ((1, 2, 5)[(i + j) % 3], seq_len, dim), *dtypes[(i * 3 + j) % 5]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("shape", "x_dtype", "modulation"), list(sweep()), ids=str)
def test_widths_lengths_and_batches_and_equal_bits(shape, x_dtype, modulation):
    operands = cases.make(shape, x_dtype=x_dtype, modulation=modulation)
    found = cases.run_and_check(operands, False)
    cases.assert_same_bits(found, cases.run_and_check(operands, False))


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "y"), list(itertools.product((BF16, F16, F32), repeat=2)), ids=str)
def test_every_mix_of_dtypes_with_a_residual(x, y, on_gpu):
    for h, modulation in {(x, F32), (F32, x), (F32, y)}:
        operands = cases.make((2, 5, 40), x_dtype=x, y_dtype=y, modulation=modulation, gate=x == h)
        cases.run_and_check(operands, False, residual_dtype=h)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("seq_len", "dim"), [(131_072, 1536), (2**31 // 8192 + 1000, 8192)], ids=["long", "over 2**31"]
)
def test_on_sampled_rows_of_a_large_tensor(seq_len, dim, on_gpu):
    shape = (1, seq_len, dim)
    x = jax.random.normal(jax.random.key(0), shape, BF16)
    operands = NormOperands(x, *(jax.random.normal(jax.random.key(n), (1, dim)) for n in (1, 2)))
    cotangents = (None, jax.random.normal(jax.random.key(3), shape, BF16))
    outputs, gradients = cases.gradients_of(False)(operands, cotangents)
    rows = np.r_[0:3, np.random.default_rng(0).integers(0, seq_len, 50), seq_len - 3 : seq_len]

    def some(tree):
        return jax.tree.map(lambda v: v if v.ndim == 2 else v[:, rows], tree)

    cases.check(some(operands), some(outputs))
    dx = cases.gradients_of("xla")(some(operands), some(cotangents))[1][0]
    actual = np.asarray(gradients[0][:, rows], np.float32)
    np.testing.assert_allclose(actual, np.asarray(dx, np.float32), rtol=2**-7, atol=1e-3)
    summed = jax.jit(lambda d: d.astype(F32).sum(1))(cotangents[1])
    np.testing.assert_allclose(gradients[2], summed, rtol=1e-4, atol=1e-5 * np.sqrt(seq_len) * 50)


@pytest.mark.parametrize(
    "change", [{"prefetch": False, "max_tile": 64}, {"keep_in_registers": False, "per_core": 3}]
)
@pytest.mark.usefixtures("few_programs")
def test_blocks_do_not_change_the_result(change, interpret, monkeypatch):
    table = tuning.blocks_for

    def changed(kernel, dim):
        return dataclasses.replace(table(kernel, dim), **change)

    monkeypatch.setattr(tuning, "blocks_for", changed)
    cases.run_and_check(cases.make((2, 13, 200), y_dtype=BF16, gate=True), interpret)


@pytest.mark.parametrize(("layout", "dtype"), [("row", BF16), ("token", F16), ("segment", F32)])
def test_without_a_branch_h_is_x_whose_two_gradients_are_added_up(layout, dtype, way):
    operands = cases.make(**LAYOUTS[layout], x_dtype=dtype)
    given = tuple(cases.cotangents_for(operands, seed=seed)[1] for seed in (1, 2))
    both = cases.gradients_of(way, returns_x=True)
    (h, out), gradients = both(operands, given)
    cases.assert_same_bits(h, operands.x)
    assert out.dtype == dtype
    cases.check(operands, (None, out), gradients, given)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_a_bad_value_in_one_row_leaves_the_others_untouched(poison, way):
    """Nor the gradients of other segments' rows of the tables."""
    ids = np.tile(np.repeat([0, 1, 2], 3), (2, 1))
    operands = cases.make((2, 9, 128), (2, 3, 128), ids=ids, y_dtype=F32, gate=True)
    dirty = operands._replace(x=operands.x.at[1, 4, 3].set(poison))
    results = [
        cases.gradients_of(way)(each, cases.cotangents_for(each)) for each in (operands, dirty)
    ]
    token, row = np.ones((2, 9), bool), np.ones((2, 3), bool)
    token[1, 4] = row[1, 1] = False
    kept = [
        [np.asarray(v)[token] for v in (*outputs, dx, dy)]
        + [np.asarray(v)[row] for v in (dscale, dshift, dgate)]
        for outputs, (dx, dscale, dshift, dy, dgate) in results
    ]
    cases.assert_same_bits(*kept)
    (_, out), (_, dscale, *_) = results[1]
    assert np.isnan(np.asarray(out)[1, 4]).all()
    assert np.isnan(np.asarray(dscale)[1, 1]).any()


def test_tiny_bfloat16_scales_survive_the_addition_of_one(way):
    tiny = cases.make((1, 5, 64), x_dtype=BF16, modulation=BF16)
    # Seen in float32, which h's dtype and y's make the output's.
    tiny = tiny._replace(y=jnp.zeros((1, 5, 64), F32), shift=tiny.shift * 0)
    run = jax.jit(cases.implementation(way))
    scale = jnp.full((1, 64), 2.0**-10, BF16)
    found = (run(tiny._replace(scale=each))[1] for each in (scale, -scale, scale * 0))
    more, less, plain = (np.asarray(each, np.float64) for each in found)
    np.testing.assert_allclose(more / plain, 1 + 2.0**-10, rtol=1e-6)
    np.testing.assert_allclose(less / plain, 1 - 2.0**-10, rtol=1e-6)


def test_nothing_in_nothing_out():
    for fields, how in (
        ({"shape": (2, 0, 8)}, "xla"),
        ({"shape": (0, 7, 8), "y_dtype": F32, "gate": True}, True),
        ({"shape": (0, 8), "table": (3, 8), "ids": np.zeros(0)}, True),
    ):
        operands = cases.make(**fields)
        (h, out), gradients = cases.gradients_of(how)(operands, cases.cotangents_for(operands))
        assert out.shape == operands.x.shape
        assert h is None or h.shape == operands.x.shape
        given = [each for each in operands[:5] if each is not None]
        assert [g.shape for g in gradients if g is not None] == [each.shape for each in given]
        assert not np.asarray(gradients[1]).any()


def test_numpy_arrays_are_arrays_and_need_no_jit(interpret):
    x, scale = np.ones((2, 3, 8), np.float32), np.ones((1, 8), np.float32)
    ids = np.zeros((2, 3), np.int32)
    np.testing.assert_allclose(layernorm_modulate(x, scale, scale, segment_ids=ids), 1.0)
    given = (x + np.arange(8), 0 * scale, 0 * scale)
    out = layernorm_modulate(*given, segment_ids=ids, eps=0, implementation="xla")
    np.testing.assert_allclose(out.std(-1), 1.0, rtol=1e-6)
    operands = cases.make((2, 3, 8))
    slope = jax.grad(lambda x, how: cases.implementation(how)(operands._replace(x=x))[1].sum())
    expected = jax.jit(slope, static_argnums=1)(operands.x, "xla")
    np.testing.assert_allclose(slope(operands.x, interpret), expected, atol=2e-5)


@pytest.fixture
def dim(way):
    """A width that the implementation takes; a ragged one where it takes any."""
    return 384 if way == "mosaic" else 40


def runs(*pairs):
    """Ids of a row from (segment, length) pairs."""
    return np.concatenate([np.full(length, segment) for segment, length in pairs])


ROWS = np.stack(
    [
        runs((0, 1), (1, 1), (2, 21), (3, 1)),
        runs((0, 24)),
        runs((0, 5), (-1, 2), (1, 6), (-1, 3), (2, 7), (-1, 1)),
        runs((-1, 4), (0, 20)),
        runs((-1, 24)),
        runs((3, 6), (0, 7), (2, 11)),
        runs((0, 8), (1, 8), (0, 8)),
    ]
)
"""Lengths of one, padding between and first and alone, segments not sorted, few not contiguous."""


AT_8 = np.stack([runs((0, 7), (-1, 1), (1, 8), (4, 1), (-1, 7)), runs((2, 24))])
AT_3 = np.stack([runs((0, 2), (-1, 1), (1, 3), (4, 1), (-1, 17)), runs((2, 24))])
AT_64 = np.stack([runs((1, 6), (-1, 18)), runs((2, 24))])
GATED = {"y_dtype": F32, "gate": True}


@pytest.mark.parametrize(
    ("ids", "table", "fields", "static"),
    [
        (ROWS, (5,), {"x_dtype": BF16}, {}),
        (ROWS, (7, 5), GATED, {}),
        (ROWS, (5,), {"x_dtype": BF16, "y_dtype": BF16}, {"residual_dtype": F32}),
        (AT_3, (2, 5), {}, {}),
        (AT_8, (2, 5), GATED, {}),
        (AT_64, (2, 5), {}, {}),
    ],
)
def test_rows_of_segments(ids, table, fields, static, way, dim):
    operands = cases.make((*ids.shape, dim), (*table, dim), ids=ids, **fields)
    (h, out), gradients = cases.run_and_check(operands, way, **static)
    for value in (h, out, gradients[0], gradients[3]):
        assert value is None or not np.asarray(value)[ids < 0].any()


@pytest.mark.parametrize("residual", [True, False])
def test_nothing_leaks_from_padding(residual, way, dim):
    ids = runs((0, 6), (-1, 2), (1, 8), (-1, 8))
    operands = cases.make((24, dim), (2, dim), ids=ids, **GATED if residual else {})

    def spoiled(value):
        return None if value is None else jnp.where(jnp.asarray(ids < 0)[:, None], jnp.nan, value)

    dirty = operands._replace(x=spoiled(operands.x), y=spoiled(operands.y))
    cotangents = cases.cotangents_for(operands)
    both = cases.gradients_of(way)
    clean = both(operands, cotangents)
    cases.assert_same_bits(clean, both(dirty, tuple(spoiled(value) for value in cotangents)))
    assert all(np.isfinite(np.asarray(value)).all() for value in jax.tree.leaves(clean))


def test_segments_beyond_the_table_are_nan(way, dim):
    ids = runs((0, 8), (3, 8), (1, 8))
    operands = cases.make((24, dim), (3, dim), ids=ids, **GATED)
    for result in jax.jit(cases.implementation(way))(operands):
        np.testing.assert_array_equal(np.isnan(np.asarray(result)).all(-1), ids == 3)


@pytest.mark.usefixtures("few_programs")
def test_more_runs_than_row_blocks_are_nan(interpret):
    operands = cases.make((24, 40), (2, 40), ids=np.tile([0, 1], 12))
    if not interpret:
        # A GPU runs a program for each of so few rows, which serves any order of segments.
        cases.run_and_check(operands, interpret)
        return
    (_, out), gradients = cases.gradients_of(interpret)(operands, cases.cotangents_for(operands))
    assert np.isnan(out).all()
    assert np.isnan(gradients[0]).all()


def test_prepared_segments_give_the_same_bits_and_are_not_prepared_again(way, dim, monkeypatch):
    ids = jnp.asarray(ROWS[[2, 5]], jnp.int32)
    operands = cases.make((2, 24, dim), (2, 5, dim), ids=ids, **GATED)
    ready = jax.jit(segmentation, static_argnums=(1, 2))(ids, 5, dim)
    cotangents = cases.cotangents_for(operands)
    expected = cases.gradients_of(way)(operands, cotangents)
    monkeypatch.delattr(row_blocks, "segment_row_blocks")
    found = cases.with_gradients(cases.implementation(way, segment_ids=ready))(operands, cotangents)
    cases.assert_same_bits(found, expected)
    x, table, shift = operands[:3]
    with pytest.raises(ValueError, match="prepared for tables of 5 rows, and scale has 4"):
        layernorm_modulate(x, table[:, :4], shift, segment_ids=ready)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_the_kernels_need_a_gpu_and_say_so(name):
    x, row = jnp.ones((2, 3, 4)), jnp.ones((2, 4))
    with pytest.raises(NotImplementedError, match=rf"'{name}' cannot run, the backend is 'cpu'"):
        residual_layernorm_modulate(x, x, row, row, row, implementation=name)
    auto, xla = (layernorm_modulate(x, row, row, implementation=each) for each in ("auto", "xla"))
    cases.assert_same_bits(auto, xla)


def test_second_derivatives_are_refused():
    x, scale = jnp.ones((1, 2, 8)), jnp.ones((1, 8))

    def loss(x):
        return jnp.sum(layernorm_modulate(x, scale, scale, interpret=True) ** 2)

    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(loss)(x)
    _, pull = jax.vjp(loss, x)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda cotangent: pull(cotangent)[0].sum())(1.0)


X, ROW, Y_IDS = jnp.ones((2, 3, 4)), jnp.ones((2, 4)), jnp.zeros((2, 3), int)
EMPTY = jnp.ones((0, 4))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (r"scale is None", {"scale": None}),
        (r"x must be .*\(4,\)", {"x": jnp.ones(4)}),
        (r"x must be .*\(1, 2, 3, 4\)", {"x": jnp.ones((1, 2, 3, 4))}),
        (r"no elements .*\(2, 3, 0\)", {"x": jnp.ones((2, 3, 0))}),
        (r"x is int32", {"x": X.astype(int)}),
        (r"scale must be .*\(2, 4\).*got \(1, 4\)", {"scale": jnp.ones((1, 4))}),
        (r"\[1, D\] = \(1, 4\)", {"x": jnp.ones((3, 4))}),
        (r"shift .*\(2, 4\), got \(2, 3, 4\)", {"shift": X}),
        (r"shift is float16; .*float32", {"shift": ROW.astype(F16)}),
        (r"segment_ids .*\(2, 3\).*\(2, 4\)", {"segment_ids": jnp.zeros((2, 4), int)}),
        (r"segment_ids are float32", {"segment_ids": jnp.zeros((2, 3))}),
        (r"segment_ids are uint32", {"segment_ids": jnp.zeros((2, 3), jnp.uint32)}),
        (r"at least 1.*\(0, 4\)", {"segment_ids": Y_IDS, "scale": EMPTY, "shift": EMPTY}),
        (r"scale must be \[M, D\].*got \(1, 2, 4\)", {"segment_ids": Y_IDS, "scale": X[:1, :2]}),
        (r"'magic' is.*auto, triton, mosaic, xla", {"implementation": "magic"}),
        (r"eps is -1.0; it must be a finite number", {"eps": -1.0}),
        (r"eps is inf", {"eps": np.inf}),
        (r"eps is True", {"eps": True}),
        (r"sharding is .*must be a jax.sharding.NamedSharding", {"sharding": "data"}),
        (r"y must have .*\(2, 3, 4\), got \(2, 3, 5\)", {"y": jnp.ones((2, 3, 5))}),
        (r"y is int8", {"y": X.astype(jnp.int8)}),
        (r"gate .*\(2, 4\), got \(1, 4\)", {"y": X, "gate": jnp.ones((1, 4))}),
        (r"gate is float16", {"y": X, "gate": ROW.astype(F16)}),
        (r"a gate is given, but y is None", {"y": None, "gate": ROW}),
        (r"residual_dtype is bfloat16.*float32", {"y": X, "residual_dtype": BF16}),
        (r"but without y h is x", {"x": X.astype(BF16), "y": None, "residual_dtype": F32}),
    ],
)
def test_wrong_arguments_are_named(words, change):
    given = {"x": X, "scale": ROW, "shift": ROW} | change
    function = layernorm_modulate
    if "y" in change:
        function, given = residual_layernorm_modulate, {"gate": None} | given
    with pytest.raises(ValueError, match=words):
        function(**given)
