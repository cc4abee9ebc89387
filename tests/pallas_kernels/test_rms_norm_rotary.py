import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import BF16, F16, F32, numpy64, tolerance

from pallas_kernels import devices, rms_norm_rotary
from pallas_kernels.rms_norm_rotary import triton
from pallas_kernels.rms_norm_rotary.api import measured_as_faster

EPS = 1e-6


def arrays(shape, head_dim, *, per_head=False, table="shared", dtype=F32, seed=0):
    """x, weight, rotary and the output's cotangent."""
    batch, tokens, dim = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], shape, dtype)
    weight = 1 + 0.3 * jax.random.normal(keys[1], (head_dim if per_head else dim,))
    place = (tokens, head_dim // 2) if table == "shared" else (batch, tokens, head_dim // 2)
    angle = 3 * jax.random.normal(keys[2], place)
    rotary = (jnp.cos(angle), jnp.sin(angle)) if table else None
    cotangent = jax.random.normal(keys[3], (batch, tokens, dim // head_dim, head_dim), dtype)
    return x, weight, rotary, cotangent


def run(x, weight, rotary, cotangent, **options):
    """The output and the gradients of x and weight."""

    def function(x, weight):
        return rms_norm_rotary(x, weight, rotary, eps=EPS, **options)

    out, pull = jax.vjp(function, x, weight)
    return out, *pull(cotangent)


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


def check(found, expected, dtype):
    out, dx, dweight = (numpy64(value) for value in found)
    dim, rows = dx.shape[-1], dx.size // dweight.size
    limits = (
        tolerance(dtype, expected[0], dim, condition=4.0),
        tolerance(dtype, expected[1], dim, condition=8.0),
        tolerance(F32, expected[2], dim, rows=rows, condition=8.0),
    )
    for value, wanted, limit in zip((out, dx, dweight), expected, limits, strict=True):
        assert value.shape == wanted.shape
        assert np.all(np.abs(value - wanted) <= limit), np.max(np.abs(value - wanted) - limit)


def kernels(interpret):
    return {"interpret": True} if interpret else {"implementation": "triton"}


CASES = {
    "whole width, shared table": ((2, 7, 384), 128, False, "shared", F32),
    "whole width, own tables": ((2, 5, 192), 64, False, "own", F32),
    "no rotation": ((1, 9, 96), 32, False, None, F32),
    "each head": ((3, 3, 96), 32, True, "shared", F32),
    "each head, own tables, bfloat16": ((2, 6, 256), 128, True, "own", BF16),
    "one token": ((1, 1, 128), 128, False, "shared", F32),
    "float16": ((1, 4, 64), 8, True, "shared", F16),
    "one head of two channels": ((1, 3, 2), 2, False, "shared", F32),
}


@pytest.mark.parametrize("name", CASES)
def test_xla_equals_the_oracle(name):
    shape, head_dim, per_head, table, dtype = CASES[name]
    given_arrays = arrays(shape, head_dim, per_head=per_head, table=table, dtype=dtype)
    found = run(*given_arrays, head_dim=head_dim, implementation="xla")
    check(found, oracle(*given_arrays, head_dim), dtype)


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_oracle(name, interpret, monkeypatch):
    shape, head_dim, per_head, table, dtype = CASES[name]
    # Few programs, so that each has several tokens and the last one fewer.
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    given_arrays = arrays(shape, head_dim, per_head=per_head, table=table, dtype=dtype)
    found = run(*given_arrays, head_dim=head_dim, **kernels(interpret))
    check(found, oracle(*given_arrays, head_dim), dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("summed", [False, True, "xla"], ids=["by XLA", "by the kernel", "xla"])
def test_a_bias_in_x_gets_the_sum_of_its_gradient(name, summed, interpret, monkeypatch):
    shape, head_dim, per_head, table, dtype = CASES[name]
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    monkeypatch.setattr(triton, "sums_bias", lambda *_: summed)
    options = {"implementation": "xla"} if summed == "xla" else kernels(interpret)
    x, weight, rotary, cotangent = arrays(
        shape, head_dim, per_head=per_head, table=table, dtype=dtype
    )

    def function(x, weight, bias):
        options_of = {"head_dim": head_dim, "eps": EPS} | options
        return rms_norm_rotary(x, weight, rotary, bias=bias, **options_of)

    bias = jnp.full(shape[-1], jnp.nan)  # whose values do not matter
    out, pull = jax.vjp(function, x, weight, bias)
    dx, dweight, dbias = pull(cotangent)
    expected = oracle(x, weight, rotary, cotangent, head_dim)
    check((out, dx, dweight), expected, dtype)
    assert dbias.dtype == F32
    wanted = expected[1].sum(axis=(0, 1))
    rows = shape[0] * shape[1]
    limit = tolerance(F32, wanted, shape[-1], rows=rows, condition=16.0)
    if not summed:  # XLA sees gradients of x that are rounded already
        limit += tolerance(dtype, np.abs(expected[1]), shape[-1]).sum(axis=(0, 1))
    assert np.all(np.abs(numpy64(dbias) - wanted) <= limit)


def test_a_bias_is_summed_where_registers_are_left_for_it():
    assert triton.sums_bias(1536, False)
    assert not triton.sums_bias(2048, False)
    assert not triton.sums_bias(1024, True)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dim", [512, 1024, 1152, 1536, 2048, 2304, 3072, 5120, 6144, 8192])
@pytest.mark.parametrize("per_head", [False, True])
def test_kernels_equal_the_oracle_at_models_widths(dim, per_head):
    head_dim = 64 if dim % 128 else 128
    given_arrays = arrays((2, 1111, dim), head_dim, per_head=per_head, dtype=BF16)
    found = run(*given_arrays, head_dim=head_dim, implementation="triton")
    check(found, oracle(*given_arrays, head_dim), BF16)


def test_kernels_compute_with_checkpoints_in_a_scan(interpret):
    x, weight, rotary, cotangent = arrays((1, 4, 64), 32)
    square = jnp.stack([weight, weight + 0.5])

    def layers(implementation):
        @partial(jax.checkpoint, prevent_cse=False)
        def layer(x, weight):
            heads = rms_norm_rotary(x, weight, rotary, head_dim=32, eps=EPS, **implementation)
            return x + heads.reshape(x.shape), None

        return lambda x, square: jax.lax.scan(layer, x, square)[0]

    results = []
    for implementation in (kernels(interpret), {"implementation": "xla"}):
        out, pull = jax.vjp(jax.jit(layers(implementation)), x, square)
        results.append((out, *pull(cotangent.reshape(x.shape))))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


SPLITS = {
    "batch and tokens": (P("a", "b"), False),
    "batch": (P(("a", "b")), False),
    "batch and heads": (P("a", None, "b"), True),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("table", ["shared", "own"])
def test_kernels_gather_nothing_of_what_is_split(kind, split, table, interpret):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    spec, per_head = SPLITS[split]
    mesh = jax.make_mesh((2, 2), ("a", "b"), (kind, kind), devices=jax.devices()[:4])
    given_arrays = arrays((4, 6, 64), 16, per_head=per_head, table=table)
    expected = run(*given_arrays, head_dim=16, implementation="xla")
    x, weight, rotary, cotangent = given_arrays
    batch, tokens, width = (*spec, None, None)[:3]
    heads = P(batch, tokens, width, None)
    place = P(tokens) if table == "shared" else P(batch, tokens)
    split_arrays = jax.device_put(
        (x, weight, rotary, cotangent),
        jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            (P(*spec), P(), (place, place), heads),
            is_leaf=lambda leaf: isinstance(leaf, P),
        ),
    )
    sharding = NamedSharding(mesh, P(*spec)) if kind == AxisType.Auto else None
    options = {"head_dim": 16, "sharding": sharding, **kernels(interpret)}
    with jax.set_mesh(mesh):
        compiled = jax.jit(partial(run, **options)).lower(*split_arrays).compile()
        found = compiled(*split_arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    text = compiled.as_text()
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", text)
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1


@pytest.mark.parametrize(
    ("shape", "per_head", "table"),
    [
        ((1, 32760, 1536), False, "shared"),
        ((42, 1560, 1536), False, None),
        ((1, 75600, 5120), False, "own"),
        ((1, 111601, 2048), True, "shared"),
        ((1, 500_000, 8192), False, "shared"),
    ],
)
def test_kernels_lower_for_cuda(shape, per_head, table):
    head_dim = 128
    shapes = jax.eval_shape(
        partial(arrays, shape, head_dim, per_head=per_head, table=table, dtype=BF16)
    )
    step = partial(run, head_dim=head_dim, implementation="triton")
    with mock.patch.object(devices, "unsupported_triton_device", return_value=None):
        lowered = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",))
    names = re.findall(r"rms_norm_rotary_(\w+)", lowered.as_text())
    assert sorted(set(names)) == ["backward", "forward", "reduce"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((4, 8))}, r"x is float32\[4, 8\]"),
        ({"x": jnp.zeros((1, 4, 8), jnp.int32)}, r"x is int32"),
        ({"weight": jnp.zeros(3)}, r"weight is float32\[3\]; it must be floats \[8\], or \[4\]"),
        ({"weight": jnp.zeros(8, jnp.int32)}, r"weight is int32\[8\]"),
        ({"bias": jnp.zeros(4)}, r"bias is float32\[4\]; it must be floats \[8\]"),
        ({"bias": jnp.zeros(8, jnp.int32)}, r"bias is int32\[8\]"),
        ({"eps": 0.0}, r"eps=0\.0 is not above 0"),
        ({"eps": 1e-60}, r"eps=1e-60 is not above 0 in float32"),
        ({"head_dim": 3}, r"head_dim=3 does not divide D=8"),
        ({"rotary": (jnp.zeros((4, 2)),)}, r"rotary has the shapes \[\[4, 2\]\]"),
        ({"rotary": (jnp.zeros((5, 2)),) * 2}, r"it must be cos and sin of \[4, 2\], or"),
        ({"implementation": "cuda"}, r"implementation='cuda' is unknown"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    call = {"x": jnp.zeros((1, 4, 8)), "weight": jnp.zeros(8), "head_dim": 4} | change
    with pytest.raises(ValueError, match=message):
        rms_norm_rotary(**call)


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
        (("NVIDIA H200", 1 << 24, 1536, 128, 2), True),
        (("NVIDIA H100 80GB HBM3", 1 << 24, 1536, 128, 2), True),
        (("NVIDIA H200", 1 << 10, 1536, 128, 2), False),
        (("NVIDIA H200", 1 << 24, 65536, 128, 2), None),
        (("NVIDIA H200", 1 << 24, 1536, 32, 2), None),
        (("NVIDIA H200", 1 << 24, 1536, 128, 4), None),
        (("NVIDIA A100", 1 << 24, 1536, 128, 2), None),
    ],
)
def test_auto_knows_what_was_measured(call, faster):
    assert measured_as_faster(*call) is faster


@pytest.mark.parametrize("implementation", [{"implementation": "xla"}, {"interpret": True}])
def test_tables_get_no_gradient_from_any_implementation(implementation):
    x, weight, rotary, cotangent = arrays((1, 3, 32), 8)

    def total(rotary):
        out = rms_norm_rotary(x, weight, rotary, head_dim=8, **implementation)
        return jnp.sum(out * cotangent)

    assert not any(jnp.any(part) for part in jax.grad(total)(rotary))


def test_second_derivatives_of_kernels_are_refused_in_words(interpret):
    x, weight, rotary, _ = arrays((1, 3, 32), 8)

    def slope(x):
        options = {"head_dim": 8, **kernels(interpret)}
        return jnp.sum(jax.grad(lambda x: rms_norm_rotary(x, weight, rotary, **options).sum())(x))

    with pytest.raises(NotImplementedError, match="differentiate once, in reverse mode"):
        jax.grad(slope)(x)


@pytest.mark.parametrize("shape", [(0, 3, 32), (2, 0, 32)])
def test_nothing_gives_nothing(shape):
    x, weight, rotary, cotangent = arrays(shape, 8)
    found = run(x, weight, rotary, cotangent, head_dim=8, interpret=True)
    assert [part.shape for part in found] == [cotangent.shape, shape, (32,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 4.0}, r"head_dim is 4\.0"),
        ({"eps": jnp.float32(1e-6)}, "they must be an int and a float"),
    ],
)
def test_what_is_no_plain_number_is_named(change, message):
    call = {"x": jnp.zeros((1, 4, 8)), "weight": jnp.zeros(8), "head_dim": 4} | change
    with pytest.raises(TypeError, match=message):
        rms_norm_rotary(**call)
