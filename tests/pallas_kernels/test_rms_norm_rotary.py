"""RMS norm with rotary embedding, as the reference and as kernels, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import (
    BF16,
    F16,
    F32,
    check_within,
    collectives,
    kernels,
    kernels_launched,
    lowered_for_cuda,
    mesh_of_four,
    numpy64,
    tolerance,
)

from pallas_kernels import devices, rms_norm_rotary
from pallas_kernels.rms_norm_rotary import triton
from pallas_kernels.rms_norm_rotary.api import measured_as_faster

EPS = 1e-6


def arrays(shape, head_dim, *, per_head=False, table="shared", dtype=F32):
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


def run(x, weight, rotary, cotangent, bias=None, **options):
    """The output and the gradients of x, weight and, where there is one, bias; jitted."""

    @jax.jit
    def both(vectors, rotary, cotangent):
        def function(x, weight, bias=None):
            return rms_norm_rotary(x, weight, rotary, bias=bias, eps=EPS, **options)

        out, pull = jax.vjp(function, *vectors)
        return out, *pull(cotangent)

    return both((x, weight) if bias is None else (x, weight, bias), rotary, cotangent)


def oracle(x, weight, rotary, cotangent, head_dim):
    """The same in float64, with the derivative worked out by hand."""
    x, weight, cotangent = numpy64(x), numpy64(weight), numpy64(cotangent)
    per_head = weight.shape != x.shape[-1:]
    shape = cotangent.shape if per_head else x.shape
    x = x.reshape(shape)
    rstd = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
    unit = x * rstd
    turn = 1.0
    if rotary is not None:
        cos, sin = (numpy64(part)[..., None, :] for part in rotary)
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


def check(found, expected, dtype, *, of_bias=F32):
    """`of_bias`: dtype of the gradients of x that are added up to that of a bias."""
    dim, rows = expected[1].shape[-1], expected[1].size // expected[2].size
    limits = [
        tolerance(dtype, expected[0], dim, condition=4.0),
        tolerance(dtype, expected[1], dim, condition=8.0),
        tolerance(F32, expected[2], dim, rows=rows, condition=8.0),
    ]
    if len(found) == 4:
        dx = expected[1]
        expected = (*expected, dx.sum(axis=(0, 1)))
        limit = tolerance(F32, expected[3], dim, rows=dx.shape[0] * dx.shape[1], condition=16.0)
        if of_bias is not None:
            limit = limit + tolerance(of_bias, np.abs(dx), dim).sum(axis=(0, 1))
        limits.append(limit)
    check_within(found, expected, limits)


CASES = {
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


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_oracle(name, interpret, monkeypatch):
    shape, head_dim, per_head, table, dtype, summed = CASES[name]
    # Few programs, so that each has several tokens and the last one fewer.
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    monkeypatch.setattr(triton, "sums_bias", lambda *_: summed)
    given = arrays(shape, head_dim, per_head=per_head, table=table, dtype=dtype)
    expected = oracle(*given, head_dim)
    # A bias's values do not matter.
    bias = None if summed is None else jnp.full(shape[-1], jnp.nan)
    for way in (kernels(interpret), {"implementation": "xla"}):
        found = run(*given, bias, head_dim=head_dim, **way)
        assert [each.dtype for each in found[:3]] == [dtype, dtype, F32]
        # XLA sees gradients of x that are rounded already.
        exact = summed or way == {"implementation": "xla"}
        check(found, expected, dtype, of_bias=None if exact else dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dim", [512, 1024, 1152, 1536, 2048, 2304, 3072, 5120, 6144, 8192])
@pytest.mark.parametrize("per_head", [False, True])
def test_kernels_equal_the_oracle_at_models_widths(dim, per_head):
    head_dim = 64 if dim % 128 else 128
    given = arrays((2, 1111, dim), head_dim, per_head=per_head, dtype=BF16)
    found = run(*given, head_dim=head_dim, implementation="triton")
    check(found, oracle(*given, head_dim), BF16)


def test_kernels_compute_with_checkpoints_in_a_scan_and_tables_get_no_gradient(interpret):
    x, weight, rotary, cotangent = arrays((1, 4, 64), 32)
    square = jnp.stack([weight, weight + 0.5])

    def layers(x, square, rotary, way):
        @partial(jax.checkpoint, prevent_cse=False)
        def layer(x, weight):
            heads = rms_norm_rotary(x, weight, rotary, head_dim=32, eps=EPS, **way)
            return x + heads.reshape(x.shape), None

        return jnp.vdot(jax.lax.scan(layer, x, square)[0], cotangent.reshape(x.shape))

    ours, xla = (
        jax.jit(jax.value_and_grad(partial(layers, way=way), (0, 1, 2)))(x, square, rotary)
        for way in (kernels(interpret), {"implementation": "xla"})
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, xla)
    assert not any(table.any() for table in (*ours[1][2], *xla[1][2]))


@pytest.mark.parametrize(
    ("kind", "spec", "per_head", "table"),
    [
        ("auto", P("a", "b"), False, "shared"),
        ("explicit", P("a", "b"), False, "own"),
        ("explicit", P(("a", "b")), False, "shared"),
        ("auto", P("a", None, "b"), True, "own"),
        ("explicit", P("a", None, "b"), True, "shared"),
    ],
    ids=str,
)
def test_kernels_gather_nothing_of_what_is_split(kind, spec, per_head, table, interpret):
    mesh = mesh_of_four(kind, "a", "b")
    given = arrays((4, 6, 64), 16, per_head=per_head, table=table)
    expected = oracle(*given, 16)
    batch, tokens, width = (*spec, None, None)[:3]
    place = P(tokens) if table == "shared" else P(batch, tokens)
    places = (spec, P(), (place, place), P(batch, tokens, width, None))
    split = jax.tree.map(lambda place: NamedSharding(mesh, place), places)
    sharding = NamedSharding(mesh, spec) if kind == "auto" else None
    options = {"head_dim": 16, "sharding": sharding, **kernels(interpret)}
    with jax.set_mesh(mesh):
        arguments = jax.device_put(given, split)
        compiled = jax.jit(partial(run, **options)).lower(*arguments).compile()
        check(compiled(*arguments), expected, F32)
    assert collectives(compiled) == (0, 1)


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(
    ("shape", "per_head", "table"),
    [
        ((42, 1560, 1536), False, None),
        ((1, 111601, 2048), True, "shared"),
        ((1, 500_000, 8192), False, "own"),
    ],
)
def test_kernels_lower_for_cuda(shape, per_head, table):
    batch, tokens, dim = shape
    x = jax.ShapeDtypeStruct(shape, BF16)
    weight = jax.ShapeDtypeStruct((128 if per_head else dim,), F32)
    angles = jax.ShapeDtypeStruct((tokens, 64) if table == "shared" else (batch, tokens, 64), F32)
    cotangent = jax.ShapeDtypeStruct((batch, tokens, dim // 128, 128), BF16)
    step = partial(run, head_dim=128, implementation="triton")
    text = lowered_for_cuda(step, x, weight, (angles, angles) if table else None, cotangent)
    assert sorted(kernels_launched(text, "rms_norm_rotary")) == ["backward", "forward", "reduce"]


X, WEIGHT = jnp.zeros((1, 4, 8)), jnp.zeros(8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": jnp.zeros((4, 8))}, ValueError, r"x is float32\[4, 8\]"),
        ({"weight": jnp.zeros(3)}, ValueError, r"weight is float32\[3\]; it must .* or \[4\]"),
        ({"weight": WEIGHT.astype(int)}, ValueError, r"weight is int32\[8\]"),
        ({"bias": jnp.zeros(4)}, ValueError, r"bias is float32\[4\]; it must be floats \[8\]"),
        ({"eps": 0.0}, ValueError, r"eps=0\.0 is not above 0"),
        ({"eps": 1e-60}, ValueError, r"eps=1e-60 is not above 0 in float32"),
        ({"eps": jnp.float32(1e-6)}, TypeError, "they must be an int and a float"),
        ({"head_dim": 3}, ValueError, r"head_dim=3 does not divide D=8"),
        ({"head_dim": 0}, ValueError, r"head_dim=0 does not divide D=8"),
        ({"head_dim": 1, "rotary": ()}, ValueError, r"head_dim=1 is odd"),
        ({"head_dim": 4.0}, TypeError, r"head_dim is 4\.0"),
        ({"rotary": (jnp.zeros((4, 2)),)}, ValueError, r"rotary has the shapes \[\[4, 2\]\]"),
        ({"rotary": (jnp.zeros((5, 2)),) * 2}, ValueError, r"must be cos and sin of \[4, 2\], or"),
    ],
)
def test_what_does_not_fit_is_named(change, error, words):
    with pytest.raises(error, match=f"^rms_norm_rotary: .*{words}"):
        rms_norm_rotary(**({"x": X, "weight": WEIGHT, "head_dim": 4} | change))


def test_heads_that_kernels_cannot_take_run_in_xla():
    x, weight, rotary, _ = arrays((1, 2, 36), 12)
    with pytest.raises(NotImplementedError, match="head_dim=12 is not a power of two"):
        rms_norm_rotary(x, weight, rotary, head_dim=12, implementation="triton")
    assert rms_norm_rotary(x, weight, rotary, head_dim=12).shape == (1, 2, 3, 12)


def test_a_split_width_needs_statistics_of_each_head():
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    x, weight, rotary, _ = arrays((1, 2, 32), 8)
    sharding = NamedSharding(mesh, P(None, None, "a"))
    with pytest.raises(NotImplementedError, match="a token's statistics need all of it"):
        rms_norm_rotary(x, weight, rotary, head_dim=8, interpret=True, sharding=sharding)


@pytest.mark.parametrize(
    ("call", "faster"),
    [
        (("NVIDIA H100 80GB HBM3", 256 * 1536, 1024, 128, 2), True),
        (("NVIDIA H200", 1 << 24, 8192, 64, 2), True),
        (("NVIDIA H200", 256 * 1536 - 1, 1536, 128, 2), False),
        (("NVIDIA H200", 1 << 24, 8193, 128, 2), None),
        (("NVIDIA H200", 1 << 24, 1023, 128, 2), None),
        (("NVIDIA H200", 1 << 24, 1536, 32, 2), None),
        (("NVIDIA H200", 1 << 24, 1536, 128, 4), None),
        (("NVIDIA A100", 1 << 24, 1536, 128, 2), None),
    ],
)
def test_auto_knows_what_was_measured(call, faster):
    assert measured_as_faster(*call) is faster
    # A bias is summed where registers are left for it.
    assert triton.sums_bias(1536, False)
    assert not triton.sums_bias(1537, False)
    assert not triton.sums_bias(1024, True)


def test_nothing_gives_nothing():
    found = run(*arrays((2, 0, 32), 8), head_dim=8, interpret=True)
    assert [part.shape for part in found] == [(2, 0, 4, 8), (2, 0, 32), (32,)]
