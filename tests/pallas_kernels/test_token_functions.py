"""Bias with GELU, and RMS norm with rotary embedding: references and kernels against float64."""

from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from kernel_cases import BF16, F16, F32
from lowering import lowered_for_cuda

from pallas_kernels import bias_gelu, bias_gelu_then, devices, rms_norm_rotary
from pallas_kernels.bias_gelu import api as gelu_api
from pallas_kernels.bias_gelu import triton as gelu_triton
from pallas_kernels.op import Call
from pallas_kernels.rms_norm_rotary import api as norm_api
from pallas_kernels.rms_norm_rotary import triton as norm_triton
from pallas_kernels.triton_tiles import Blocks

EPS = 1e-6
XLA = {"implementation": "xla"}

# ---------------------------------------------------------------- bias and GELU


def gelu_arrays(shape, dtype=F32, spread=2.0, *, then=False):
    """x, bias and the output's cotangent, and the parameters of `scaled` behind it.

    Those are exact in any dtype, and some are integers, which have no gradient.
    """
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    given = spread * x, jnp.asarray(rng.normal(size=shape[-1:]), F32), cotangent
    factor = jnp.asarray(2.0 ** rng.integers(-1, 2, shape), dtype)
    flips = jnp.asarray(rng.integers(0, 2, shape), jnp.int8)
    return (*given, {"factor": factor, "flips": flips}) if then else given


def scaled(hidden, parameters):
    return hidden * parameters["factor"] * (1 - 2 * parameters["flips"])


def run_gelu(x, bias, cotangent, parameters=None, **options):
    """The output and the gradients of x and bias, and of `scaled`'s factor behind it; jitted."""

    @jax.jit
    def both(x, bias, cotangent, parameters):
        def function(x, bias, factor):
            if factor is None:
                return bias_gelu(x, bias, **options)
            given = parameters | {"factor": factor}
            return bias_gelu_then(x, bias, scaled, given, **options)

        factor = parameters and parameters["factor"]
        out, pull = jax.vjp(function, x, bias, factor)
        return [out, *(each for each in pull(cotangent) if each is not None)]

    return both(x, bias, cotangent, parameters)


def gelu_oracle(x, bias, cotangent, parameters=None):
    """The same in float64, by tanh, with the derivative worked out by hand."""
    x, bias, cotangent = cases.numpy64(x), cases.numpy64(bias), cases.numpy64(cotangent)
    scale, sign = 1.0, 1.0
    if parameters:
        sign = 1.0 - 2 * cases.numpy64(parameters["flips"])
        scale = cases.numpy64(parameters["factor"]) * sign
    z, c = x + bias, np.sqrt(2 / np.pi)
    t = np.tanh(c * (z + 0.044715 * z**3))
    slope = (1 + t) / 2 + z * (1 - t**2) / 2 * c * (1 + 3 * 0.044715 * z**2)
    out, dx = z * (1 + t) / 2, cotangent * scale * slope
    found = out * scale, dx, dx.reshape(-1, bias.size).sum(axis=0)
    return (*found, cotangent * out * sign) if parameters else found


def check_gelu(found, expected, dtype):
    rows = expected[1].size // expected[2].size
    limits = (
        cases.tolerance(dtype, expected[0], 1, condition=4.0),
        cases.tolerance(dtype, expected[1], 1, condition=8.0),
        cases.tolerance(F32, expected[2], 1, rows=rows, condition=16.0),
        *(2 * cases.tolerance(dtype, each, 1, condition=8.0) for each in expected[3:]),
    )
    cases.check_within(found, expected, limits)


@pytest.mark.parametrize(
    ("shape", "dtype", "spread", "then"),
    [
        ((2, 7, 384), F32, 2.0, False),
        ((3, 21, 100), BF16, 2.0, False),
        ((1, 70, 640), F16, 2.0, False),
        ((2, 2, 1), F32, 30.0, False),
        ((3, 21, 100), F32, 2.0, True),
        ((2, 7, 384), BF16, 2.0, True),
        ((1, 1, 128), F16, 2.0, True),
    ],
    ids=str,
)
def test_gelu_equals_the_oracle(shape, dtype, spread, then, interpret, monkeypatch):
    # Few programs, so that each has several steps and the last one fewer.
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    monkeypatch.setattr(gelu_triton, "BACKWARD_BLOCKS", Blocks(128, 4, 4, 4))
    given = gelu_arrays(shape, dtype, spread, then=then)
    for way in (cases.kernels(interpret), XLA):
        found = run_gelu(*given, **way)
        assert [each.dtype for each in found[:3]] == [dtype, dtype, F32]
        check_gelu(found, gelu_oracle(*given), dtype)


def test_gelu_equals_the_oracle_in_blocks_of_its_own(interpret):
    given = gelu_arrays((3, 13, 700), spread=0.01)
    check_gelu(run_gelu(*given, **cases.kernels(interpret)), gelu_oracle(*given), F32)


@pytest.fixture(params=["triton", "mosaic"])
def kernels_of(request, on_gpu):
    """The name of kernels that this GPU can run."""
    if request.param == "mosaic" and (reason := devices.unsupported_mosaic_device()):
        pytest.skip(str(reason))
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 512, 1024, 1152, 4608, 5000, 8192, 8960, 13824])
@pytest.mark.parametrize("tokens", [1, 1111, 9000])
@pytest.mark.parametrize("then", [False, True])
def test_gelu_is_right_at_models_widths_and_gives_equal_bits(dim, tokens, then, kernels_of):
    if kernels_of == "mosaic" and dim % 128:
        pytest.skip("multiples of 128 alone")
    given = gelu_arrays((2, tokens, dim), BF16, then=then)
    found, again = (run_gelu(*given, implementation=kernels_of) for _ in range(2))
    check_gelu(found, gelu_oracle(*given), BF16)
    cases.assert_same_bits(found, again)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("dtype", "spread"), [(F32, 30.0), (F32, 0.01), (F16, 2.0)])
def test_mosaic_gelu_equals_the_oracle(dtype, spread):
    if reason := devices.unsupported_mosaic_device():
        pytest.skip(str(reason))
    for then in (False, True):
        given = gelu_arrays((2, 70, 640), dtype, spread, then=then)
        found = run_gelu(*given, implementation="mosaic")
        check_gelu(found, gelu_oracle(*given), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_far_from_zero_gelu_is_the_identity_or_zero(dtype, interpret):
    x = jnp.asarray([[[-3e4, -200.0, -20.0, 20.0, 200.0, 3e4]]], dtype)
    out, dx, dbias = run_gelu(x, jnp.zeros(6), jnp.ones_like(x), **cases.kernels(interpret))
    np.testing.assert_array_equal(out, jnp.maximum(x, 0))
    np.testing.assert_array_equal(dx, (x > 0).astype(dtype))
    np.testing.assert_array_equal(dbias, (x > 0).astype(F32)[0, 0])


def test_nothing_as_large_as_x_is_kept_but_x():
    x, bias, _ = gelu_arrays((1, 8, 96), BF16)

    def then(x, bias):
        return bias_gelu_then(x, bias, lambda hidden, half: hidden * half, 0.5, interpret=True)

    for function in (partial(bias_gelu, **XLA), then):
        leaves = jax.tree.leaves(jax.vjp(function, x, bias)[1])
        kept = [leaf for leaf in leaves if getattr(leaf, "size", 0) >= x.size]
        assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, x.dtype)]


def test_xla_differentiates_in_any_mode_and_twice_but_kernels_once(interpret):
    x, bias, _ = gelu_arrays((1, 2, 3))
    function = partial(bias_gelu, bias=bias, **XLA)
    check_grads(function, (x,), order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)
    for each in (bias_gelu, lambda *given, **way: bias_gelu_then(*given, jnp.multiply, 2.0, **way)):
        slope = jax.grad(lambda x, each=each: each(x, bias, **cases.kernels(interpret)).sum())
        with pytest.raises(NotImplementedError, match="bias_gelu: the kernels differentiate once"):
            jax.grad(lambda x, slope=slope: slope(x).sum())(x)


# ---------------------------------------------------------------- RMS norm and rotation


def norm_arrays(shape, head_dim, *, per_head=False, table="shared", dtype=F32):
    """x, weight, rotary and the output's cotangent."""
    batch, tokens, dim = shape
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), dtype)
    weight = jnp.asarray(1 + 0.3 * rng.normal(size=head_dim if per_head else dim), F32)
    place = (tokens, head_dim // 2) if table == "shared" else (batch, tokens, head_dim // 2)
    angle = 3 * rng.normal(size=place)
    rotary = (jnp.asarray(np.cos(angle), F32), jnp.asarray(np.sin(angle), F32)) if table else None
    cotangent = rng.normal(size=(batch, tokens, dim // head_dim, head_dim))
    return x, weight, rotary, jnp.asarray(cotangent, dtype)


def run_norm(x, weight, rotary, cotangent, bias=None, **options):
    """The output and the gradients of x, weight and, where there is one, bias; jitted."""

    @jax.jit
    def both(vectors, rotary, cotangent):
        def function(x, weight, bias=None):
            return rms_norm_rotary(x, weight, rotary, bias=bias, eps=EPS, **options)

        out, pull = jax.vjp(function, *vectors)
        return out, *pull(cotangent)

    return both((x, weight) if bias is None else (x, weight, bias), rotary, cotangent)


def norm_oracle(x, weight, rotary, cotangent):
    """The same in float64, with the derivative worked out by hand."""
    x, weight, cotangent = cases.numpy64(x), cases.numpy64(weight), cases.numpy64(cotangent)
    per_head = weight.shape != x.shape[-1:]
    shape = cotangent.shape if per_head else x.shape
    x = x.reshape(shape)
    rstd = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
    unit = x * rstd
    turn = 1.0
    if rotary is not None:
        cos, sin = (cases.numpy64(part)[..., None, :] for part in rotary)
        turn = cos + 1j * sin
    out = as_pairs((unit * weight).reshape(cotangent.shape)) * turn
    gained = from_pairs(as_pairs(cotangent) * np.conj(turn)).reshape(shape)
    pulled = gained * weight
    dx = rstd * (pulled - unit * np.mean(pulled * unit, axis=-1, keepdims=True))
    dweight = (gained * unit).reshape(-1, weight.size).sum(axis=0)
    return from_pairs(out), dx.reshape(*x.shape[:2], -1), dweight


def as_pairs(x):
    """Neighbouring channels as complex numbers."""
    return x[..., 0::2] + 1j * x[..., 1::2]


def from_pairs(pairs):
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(*pairs.shape[:-1], -1)


def check_norm(found, expected, dtype, *, of_bias=F32):
    """`of_bias`: dtype of the gradients of x that are added up to that of a bias."""
    dim, rows = expected[1].shape[-1], expected[1].size // expected[2].size
    limits = [
        cases.tolerance(dtype, expected[0], dim, condition=4.0),
        cases.tolerance(dtype, expected[1], dim, condition=8.0),
        cases.tolerance(F32, expected[2], dim, rows=rows, condition=8.0),
    ]
    if len(found) == 4:
        dx = expected[1]
        expected = (*expected, dx.sum(axis=(0, 1)))
        limit = cases.tolerance(
            F32, expected[3], dim, rows=dx.shape[0] * dx.shape[1], condition=16.0
        )
        if of_bias is not None:
            limit = limit + cases.tolerance(of_bias, np.abs(dx), dim).sum(axis=(0, 1))
        limits.append(limit)
    cases.check_within(found, expected, limits)


NORMS = {
    "whole width, shared table": ((2, 7, 384), 128, False, "shared", F32, True),
    "whole width, own tables": ((2, 5, 192), 64, False, "own", F32, None),
    "no rotation, float16": ((1, 9, 96), 32, False, None, F16, True),
    "each head": ((3, 3, 96), 32, True, "shared", F32, True),
    "each head, own tables, bfloat16": ((2, 6, 256), 128, True, "own", BF16, False),
    "one token": ((1, 1, 128), 8, False, "shared", F32, False),
    "one head of two channels": ((1, 3, 2), 2, False, "shared", F32, None),
}
"""Shape, head_dim, a weight for each head, tables, dtype; whether a kernel sums a bias's gradient,
or XLA, or None without a bias."""


@pytest.mark.parametrize("name", NORMS)
def test_rms_norm_equals_the_oracle(name, interpret, monkeypatch):
    shape, head_dim, per_head, table, dtype, summed = NORMS[name]
    # Few programs, so that each has several tokens and the last one fewer.
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    monkeypatch.setattr(norm_triton, "sums_bias", lambda *_: summed)
    given = norm_arrays(shape, head_dim, per_head=per_head, table=table, dtype=dtype)
    # A bias's values do not matter.
    bias = None if summed is None else jnp.full(shape[-1], jnp.nan)
    for way in (cases.kernels(interpret), XLA):
        found = run_norm(*given, bias, head_dim=head_dim, **way)
        assert [each.dtype for each in found[:3]] == [dtype, dtype, F32]
        # XLA sees gradients of x that are rounded already.
        exact = summed or way == XLA
        check_norm(found, norm_oracle(*given), dtype, of_bias=None if exact else dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [512, 1024, 1152, 1536, 2048, 2304, 3072, 5120, 6144, 8192])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "table", "dtype", "with_bias"),
    [(128, "shared", BF16, True), (64, "own", F32, False), (128, None, F16, True)],
)
def test_rms_norm_is_right_at_models_widths(
    dim, per_head, head_dim, table, dtype, with_bias, kernels_of
):
    arrays = partial(norm_arrays, (2, 1111, dim), head_dim, per_head=per_head)
    given = arrays(table=table, dtype=dtype)
    bias = jnp.zeros(dim) if with_bias else None
    if kernels_of == "mosaic":
        options = norm_api.RmsNormOptions(head_dim, per_head, EPS)
        if norm_api.way_for(dim, options, 8, norm_api.BACKWARD_PACE) is None:
            with pytest.raises(ValueError, match="cannot share"):
                run_norm(*given, bias, head_dim=head_dim, implementation="mosaic")
            return
    runs = [run_norm(*given, bias, head_dim=head_dim, implementation=kernels_of) for _ in range(2)]
    # Where XLA adds up a bias's gradient it sees gradients of x that are rounded already.
    check_norm(runs[0], norm_oracle(*given), dtype, of_bias=dtype)
    cases.assert_same_bits(*runs)


def test_kernels_compute_with_checkpoints_in_a_scan_and_tables_get_no_gradient(interpret):
    x, weight, rotary, cotangent = norm_arrays((1, 4, 64), 32)
    square = jnp.stack([weight, weight + 0.5])

    def layers(x, square, rotary, way):
        @partial(jax.checkpoint, prevent_cse=False)
        def layer(x, weight):
            heads = rms_norm_rotary(x, weight, rotary, head_dim=32, eps=EPS, **way)
            return x + heads.reshape(x.shape), None

        return jnp.vdot(jax.lax.scan(layer, x, square)[0], cotangent.reshape(x.shape))

    ours, xla = (
        jax.jit(jax.value_and_grad(partial(layers, way=way), (0, 1, 2)))(x, square, rotary)
        for way in (cases.kernels(interpret), XLA)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, xla)
    assert not any(table.any() for table in (*ours[1][2], *xla[1][2]))


def test_heads_and_splits_that_kernels_cannot_take_are_refused_or_run_in_xla():
    x, weight, rotary, _ = norm_arrays((1, 2, 36), 12)
    with pytest.raises(NotImplementedError, match="head_dim=12 is not a power of two"):
        rms_norm_rotary(x, weight, rotary, head_dim=12, implementation="triton")
    assert rms_norm_rotary(x, weight, rotary, head_dim=12).shape == (1, 2, 3, 12)
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    x, weight, rotary, _ = norm_arrays((1, 2, 32), 8)
    sharding = NamedSharding(mesh, P(None, None, "a"))
    split = partial(rms_norm_rotary, head_dim=8, interpret=True, sharding=sharding)
    with pytest.raises(NotImplementedError, match="a token's statistics need all of it"):
        split(x, weight, rotary)
    x, weight, rotary, _ = norm_arrays((1, 2, 24), 8, per_head=True)
    with pytest.raises(ValueError, match=r"2 shards over a do not divide 3 of x \(1, 2, 24\)"):
        split(x, weight, rotary)


# ---------------------------------------------------------------- both


def split_case(function, spec):
    """What runs a function, its arrays, their places where spec is x's, and what checks them."""
    batch, tokens, width = (*spec, None, None)[:3]
    if function in ("gelu", "gelu_then"):
        given = gelu_arrays((4, 6, 64), then=function == "gelu_then")
        places = (spec, P(width), spec, {"factor": spec, "flips": spec})[: len(given)]
        return run_gelu, given, places, partial(check_gelu, expected=gelu_oracle(*given))
    table = "own" if function == "norm, own tables" else "shared"
    given = norm_arrays((4, 6, 64), 16, per_head=width is not None, table=table)
    place = P(tokens) if table == "shared" else P(batch, tokens)
    places = (spec, P(), (place, place), P(batch, tokens, width, None))
    check = partial(check_norm, expected=norm_oracle(*given))
    return partial(run_norm, head_dim=16), given, places, check


@pytest.mark.parametrize(
    ("function", "kind", "spec"),
    [
        ("gelu", "auto", P("a", "b")),
        ("gelu", "explicit", P("a", None, "b")),
        ("gelu", "auto", P(("a", "b"))),
        ("gelu_then", "auto", P("a", None, "b")),
        ("gelu_then", "explicit", P("a", "b")),
        ("norm", "auto", P("a", "b")),
        ("norm, own tables", "explicit", P("a", "b")),
        ("norm", "explicit", P(("a", "b"))),
        ("norm, own tables", "auto", P("a", None, "b")),
        ("norm", "explicit", P("a", None, "b")),
    ],
    ids=str,
)
def test_kernels_gather_nothing_of_what_is_split(function, kind, spec, interpret):
    mesh = cases.mesh_of_four(kind, "a", "b")
    run, given, places, check = split_case(function, spec)
    split = jax.tree.map(lambda place: NamedSharding(mesh, place), places)
    sharding = NamedSharding(mesh, spec) if kind == "auto" else None
    with jax.set_mesh(mesh):
        arguments = jax.device_put(given, split)
        run = jax.jit(partial(run, sharding=sharding, **cases.kernels(interpret)))
        compiled = run.lower(*arguments).compile()
        check(compiled(*arguments), dtype=F32)
    assert cases.collectives(compiled) == (0, 1)


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def gelu_shapes(then):
    x = abstract((1, 300_000, 13824), BF16)
    given = x, abstract((13824,), F32), x
    return (*given, {"factor": x, "flips": abstract(x.shape, jnp.int8)}) if then else given


def norm_shapes(shape, per_head, table, dtype=BF16):
    batch, tokens, dim = shape
    angles = abstract((tokens, 64) if table == "shared" else (batch, tokens, 64), F32)
    weight, rotary = abstract((128 if per_head else dim,), F32), (angles, angles)
    cotangent = abstract((batch, tokens, dim // 128, 128), dtype)
    return abstract(shape, dtype), weight, rotary if table else None, cotangent


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *(("bias_gelu", gelu_shapes(then)) for then in (False, True)),
        ("rms_norm_rotary", norm_shapes((42, 1560, 1536), False, None)),
        ("rms_norm_rotary", norm_shapes((1, 111601, 2048), True, "shared")),
        ("rms_norm_rotary", norm_shapes((1, 500_000, 8192), False, "own")),
    ],
)
def test_forward_and_backward_are_a_kernel_each_and_a_sum(name, shapes):
    run = run_gelu if name == "bias_gelu" else partial(run_norm, head_dim=128)
    text = lowered_for_cuda(partial(run, implementation="triton"), *shapes)
    assert sorted(cases.kernels_launched(text, name)) == ["backward", "forward", "reduce"]


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(
    ("dim", "per_head", "table", "dtype"),
    [
        (1280, False, "own", BF16),
        (2560, True, "own", BF16),
        (3584, True, None, BF16),
        (12544, False, None, F32),
    ],
)
def test_mosaic_lowers_where_pieces_could_differ_and_where_groups_are_many(
    dim, per_head, table, dtype
):
    """Mosaic has 32 barriers for the slots of a program's groups."""
    run = partial(run_norm, head_dim=128, implementation="mosaic")
    text = lowered_for_cuda(run, *norm_shapes((1, 2048, dim), per_head, table, dtype))
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(
    ("dim", "head", "dtype"), [(18432, 128, BF16), (14336, 128, F32), (1024, 32, BF16)]
)
def test_rows_and_heads_that_groups_of_threads_cannot_share_are_refused(dim, head, dtype):
    run = partial(run_norm, head_dim=head, implementation="mosaic")
    with pytest.raises(ValueError, match=f"threads cannot share {dim} channels in heads of {head}"):
        lowered_for_cuda(run, *norm_shapes((1, 2048, dim), False, None, dtype))


GELU = {"x": jnp.zeros((1, 4, 8)), "bias": jnp.zeros(8)}
NORM = {"x": GELU["x"], "weight": jnp.zeros(8), "head_dim": 4}
INTERPRETED = {"implementation": "mosaic", "interpret": True}


def test_what_does_not_fit_is_named():
    for given, change, error, words in (
        (GELU, {"x": jnp.zeros((4, 8))}, ValueError, r"x is float32\[4, 8\]"),
        (GELU, {"x": jnp.zeros((1, 4, 8), int)}, ValueError, r"x is int32"),
        (GELU, {"bias": jnp.zeros(3)}, ValueError, r"bias is float32\[3\]; it must be floats \[8"),
        (GELU, {"bias": jnp.zeros(8, int)}, ValueError, r"bias is int32\[8\]"),
        (GELU, INTERPRETED, ValueError, "'mosaic' has nothing to interpret"),
        (NORM, {"x": jnp.zeros((4, 8))}, ValueError, r"x is float32\[4, 8\]"),
        (NORM, {"weight": jnp.zeros(3)}, ValueError, r"weight is float32\[3\]; .* or \[4\]"),
        (NORM, {"weight": jnp.zeros(8, int)}, ValueError, r"weight is int32\[8\]"),
        (NORM, {"bias": jnp.zeros(4)}, ValueError, r"bias is float32\[4\]; it must be floats \[8"),
        (NORM, {"eps": 0.0}, ValueError, r"eps=0\.0 is not above 0"),
        (NORM, {"eps": 1e-60}, ValueError, r"eps=1e-60 is not above 0 in float32"),
        (NORM, {"eps": jnp.float32(1e-6)}, TypeError, "they must be an int and a float"),
        (NORM, {"head_dim": 3}, ValueError, r"head_dim=3 does not divide D=8"),
        (NORM, {"head_dim": 0}, ValueError, r"head_dim=0 does not divide D=8"),
        (NORM, {"head_dim": 1, "rotary": ()}, ValueError, r"head_dim=1 is odd"),
        (NORM, {"head_dim": 4.0}, TypeError, r"head_dim is 4\.0"),
        (NORM, {"rotary": (jnp.zeros((4, 2)),)}, ValueError, r"rotary has the shapes \[\[4, 2\]\]"),
        (NORM, {"rotary": (jnp.zeros((5, 2)),) * 2}, ValueError, r"cos and sin of \[4, 2\], or"),
    ):
        function = bias_gelu if given is GELU else rms_norm_rotary
        with pytest.raises(error, match=f"^{function.__name__}: .*{words}"):
            function(**(given | change))


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def test_auto_knows_what_was_measured():
    for api, call, faster in (
        (gelu_api, (H200, 1 << 22, 1024, 2), True),
        (gelu_api, (H100, 1 << 24, 8960, 2), True),
        (gelu_api, (H200, (1 << 22) - 1, 8960, 2), False),
        (gelu_api, (H200, 1 << 24, 1023, 2), None),
        (gelu_api, (H200, 1 << 24, 8960, 4), None),
        (gelu_api, ("NVIDIA A100", 1 << 24, 8960, 2), None),
        (norm_api, (H100, 256 * 1536, 1024, 128, 2), True),
        (norm_api, (H200, 1 << 24, 8192, 64, 2), True),
        (norm_api, (H200, 256 * 1536 - 1, 1536, 128, 2), False),
        (norm_api, (H200, 1 << 24, 8193, 128, 2), None),
        (norm_api, (H200, 1 << 24, 1023, 128, 2), None),
        (norm_api, (H200, 1 << 24, 1536, 32, 2), None),
        (norm_api, (H200, 1 << 24, 1536, 128, 4), None),
        (norm_api, ("NVIDIA A100", 1 << 24, 1536, 128, 2), None),
    ):
        assert api.measured_as_faster(*call) is faster


@pytest.mark.usefixtures("for_cuda")
def test_auto_takes_the_mosaic_kernels_where_they_were_faster_than_triton(monkeypatch):
    monkeypatch.setattr(devices, "device_kind", lambda: H200)

    def chosen(dim, dtype=BF16, per_head=False, head_dim=128, table="shared"):
        x, weight, angles, _ = norm_shapes((1, 32_768, dim), per_head, table)
        tables = angles or (None, None)
        operands = norm_api.RmsNormOperands(abstract(x.shape, dtype), weight, None, *tables)
        call = Call(norm_api.RmsNormOptions(head_dim, per_head, EPS), None)
        return norm_api.REGISTRY.choose("test", "auto", operands, call).name

    others = ({"per_head": True}, {"head_dim": 64}, {"table": None})
    assert {chosen(1536, **other) for other in others} == {"triton"}
    faster = norm_api.MosaicRmsNorm().faster_than_triton
    for dim, known in ((896, False), (1024, True), (8192, True), (8320, False)):
        x, weight, angles, _ = norm_shapes((1, 8, dim), False, "shared")
        operands = norm_api.RmsNormOperands(abstract(x.shape, BF16), weight, None, *angles)
        assert faster(operands, Call(norm_api.RmsNormOptions(128, False, EPS), None)) is known
    for dim, per_head, groups in (
        (2048, False, 1),
        (2304, False, 3),
        (2560, True, 5),
        (16384, True, 8),
    ):
        options = norm_api.RmsNormOptions(128, per_head, EPS)
        assert norm_api.way_for(dim, options, 4, norm_api.BACKWARD_PACE).groups == groups
    assert norm_api.way_for(18432, options, 4, norm_api.BACKWARD_PACE) is None
    spent = defaultdict(float)
    for (kernel, _, width, name), each in cases.measured().items():
        if kernel == "rms_norm_rotary":
            spent[width, name] += each
    widths = {width for width, name in spent if name == "mosaic"}
    assert len(widths) >= 5
    for width in widths:
        name = chosen(width, per_head=width == 2048)  # as it was measured
        assert spent[width, name] == min(spent[width, "mosaic"], spent[width, "triton"])


def test_a_bias_is_summed_where_registers_are_left_for_it_and_nothing_gives_nothing():
    assert norm_triton.sums_bias(1536, False)
    assert not norm_triton.sums_bias(1537, False)
    assert not norm_triton.sums_bias(1024, True)
    shape = (2, 0, 32)
    for then in (False, True):
        found = run_gelu(*gelu_arrays(shape, then=then), interpret=True)
        assert [part.shape for part in found] == [shape, shape, (32,), shape][: 3 + then]
    found = run_norm(*norm_arrays(shape, 8), head_dim=8, interpret=True)
    assert [part.shape for part in found] == [(2, 0, 4, 8), shape, (32,)]
