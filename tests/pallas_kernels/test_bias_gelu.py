import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from kernel_cases import BF16, F16, F32, numpy64, tolerance

from pallas_kernels import bias_gelu, devices
from pallas_kernels.bias_gelu import triton
from pallas_kernels.bias_gelu.api import measured_as_faster
from pallas_kernels.triton_tiles import Blocks

SMALL = Blocks(128, 4, 4, 4)


def arrays(shape, dtype=F32, seed=0, spread=2.0):
    """x, bias and the output's cotangent."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = spread * jax.random.normal(keys[0], shape, dtype)
    return x, jax.random.normal(keys[1], shape[-1:]), jax.random.normal(keys[2], shape, dtype)


def run(x, bias, cotangent, **options):
    """The output and the gradients of x and bias."""
    out, pull = jax.vjp(lambda x, bias: bias_gelu(x, bias, **options), x, bias)
    return out, *pull(cotangent)


def oracle(x, bias, cotangent):
    """The same in float64, by tanh, with the derivative worked out by hand."""
    x, bias, cotangent = numpy64(x), numpy64(bias), numpy64(cotangent)
    z, c = x + bias, np.sqrt(2 / np.pi)
    t = np.tanh(c * (z + 0.044715 * z**3))
    slope = (1 + t) / 2 + z * (1 - t**2) / 2 * c * (1 + 3 * 0.044715 * z**2)
    dx = cotangent * slope
    return z * (1 + t) / 2, dx, dx.reshape(-1, bias.size).sum(axis=0)


def check(found, expected, dtype):
    out, dx, dbias = (numpy64(value) for value in found)
    rows = dx.size // dbias.size
    limits = (
        tolerance(dtype, expected[0], 1, condition=4.0),
        tolerance(dtype, expected[1], 1, condition=8.0),
        tolerance(F32, expected[2], 1, rows=rows, condition=16.0),
    )
    for value, wanted, limit in zip((out, dx, dbias), expected, limits, strict=True):
        assert value.shape == wanted.shape
        assert np.all(np.abs(value - wanted) <= limit), np.max(np.abs(value - wanted) - limit)


def kernels(interpret):
    return {"interpret": True} if interpret else {"implementation": "triton"}


@pytest.fixture
def small_blocks(monkeypatch):
    """Few programs, so that each has several steps and the last one fewer."""
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    monkeypatch.setattr(triton, "BACKWARD_BLOCKS", SMALL)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "shape", [(2, 7, 384), (1, 1, 128), (3, 21, 100), (1, 70, 640), (2, 2, 1)], ids=str
)
def test_kernels_equal_the_oracle(shape, dtype, interpret):
    given_arrays = arrays(shape, dtype)
    check(run(*given_arrays, **kernels(interpret)), oracle(*given_arrays), dtype)


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 700)),
    st.integers(0, 99),
    st.sampled_from([0.01, 1.0, 30.0]),
)
def test_kernels_equal_the_oracle_at_any_size(shape, seed, spread):
    given_arrays = arrays(shape, seed=seed, spread=spread)
    check(run(*given_arrays, interpret=True), oracle(*given_arrays), F32)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(2, 7, 384), (1, 1, 3), (2, 512, 96)], ids=str)
def test_xla_equals_the_oracle(shape, dtype, jitted):
    given_arrays = arrays(shape, dtype)
    step = partial(run, implementation="xla")
    check((jax.jit(step) if jitted else step)(*given_arrays), oracle(*given_arrays), dtype)


def test_xla_keeps_nothing_but_its_operands():
    x, bias, _ = arrays((1, 8, 96), BF16)
    _, pull = jax.vjp(partial(bias_gelu, implementation="xla"), x, bias)
    kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "size", 0) >= x.size]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, x.dtype)]


def test_xla_differentiates_in_any_mode_and_twice():
    x, bias, _ = arrays((1, 2, 3))
    function = partial(bias_gelu, bias=bias, implementation="xla")
    check_grads(function, (x,), order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dim", [512, 1024, 1152, 4608, 5000, 8192, 8960, 13824])
@pytest.mark.parametrize("tokens", [1, 1111, 9000])
def test_kernels_equal_the_oracle_at_models_widths(dim, tokens):
    given_arrays = arrays((2, tokens, dim), BF16)
    check(run(*given_arrays, implementation="triton"), oracle(*given_arrays), BF16)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_far_from_zero_it_is_the_identity_or_zero(dtype, interpret):
    x = jnp.asarray([[[-3e4, -200.0, -20.0, 20.0, 200.0, 3e4]]], dtype)
    bias = jnp.zeros(6)
    out, dx, dbias = run(x, bias, jnp.ones_like(x), **kernels(interpret))
    np.testing.assert_array_equal(out, jnp.maximum(x, 0))
    np.testing.assert_array_equal(dx, (x > 0).astype(dtype))
    np.testing.assert_array_equal(dbias, (x > 0).astype(F32)[0, 0])


def test_equal_inputs_give_equal_bits(interpret):
    given_arrays = arrays((2, 30, 300), BF16)
    one, other = (run(*given_arrays, **kernels(interpret)) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


SPLITS = {
    "batch and tokens": P("a", "b"),
    "batch": P(("a", "b")),
    "batch and width": P("a", None, "b"),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", SPLITS)
def test_kernels_gather_nothing_of_what_is_split(kind, split, interpret):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    spec = SPLITS[split]
    mesh = jax.make_mesh((2, 2), ("a", "b"), (kind, kind), devices=jax.devices()[:4])
    given_arrays = arrays((4, 6, 64))
    width = (*spec, None, None)[2]
    placed = [
        jax.device_put(value, NamedSharding(mesh, place))
        for value, place in zip(given_arrays, (spec, P(width), spec), strict=True)
    ]
    sharding = NamedSharding(mesh, spec) if kind == AxisType.Auto else None
    with jax.set_mesh(mesh):
        step = jax.jit(partial(run, sharding=sharding, **kernels(interpret)))
        compiled = step.lower(*placed).compile()
        found = compiled(*placed)
    check(found, oracle(*given_arrays), F32)
    text = compiled.as_text()
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", text)
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1


@pytest.mark.parametrize("shape", [(1, 32760, 8960), (42, 1560, 8960), (1, 300_000, 13824)])
def test_kernels_lower_for_cuda(shape):
    shapes = jax.eval_shape(partial(arrays, shape, BF16))
    with mock.patch.object(devices, "unsupported_triton_device", return_value=None):
        step = jax.jit(partial(run, implementation="triton"))
        lowered = step.trace(*shapes).lower(lowering_platforms=("cuda",))
    names = re.findall(r"bias_gelu_(\w+)", lowered.as_text())
    assert sorted(set(names)) == ["backward", "forward", "reduce"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((4, 8))}, r"x is float32\[4, 8\]"),
        ({"x": jnp.zeros((1, 4, 8), jnp.int32)}, r"x is int32"),
        ({"bias": jnp.zeros(3)}, r"bias is float32\[3\]; it must be floats \[8\]"),
        ({"bias": jnp.zeros(8, jnp.int32)}, r"bias is int32\[8\]"),
        ({"implementation": "cuda"}, r"implementation='cuda' is unknown"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        bias_gelu(**({"x": jnp.zeros((1, 4, 8)), "bias": jnp.zeros(8)} | change))


def test_a_width_that_shards_do_not_divide_is_named():
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P(None, None, "a"))
    with pytest.raises(ValueError, match="2 shards over a do not divide 31"):
        bias_gelu(jnp.zeros((1, 4, 31)), jnp.zeros(31), interpret=True, sharding=sharding)


@pytest.mark.parametrize(
    ("call", "faster"),
    [
        (("NVIDIA H200", 1 << 24, 8960, 2), True),
        (("NVIDIA H100 80GB HBM3", 1 << 24, 8960, 2), True),
        (("NVIDIA H200", 1 << 10, 8960, 2), False),
        (("NVIDIA H200", 1 << 24, 512, 2), None),
        (("NVIDIA H200", 1 << 24, 8960, 4), None),
        (("NVIDIA A100", 1 << 24, 8960, 2), None),
    ],
)
def test_auto_knows_what_was_measured(call, faster):
    assert measured_as_faster(*call) is faster


def test_second_derivatives_of_kernels_are_refused_in_words(interpret):
    x, bias, _ = arrays((1, 3, 32))

    def slope(x):
        return jnp.sum(jax.grad(lambda x: bias_gelu(x, bias, **kernels(interpret)).sum())(x))

    with pytest.raises(NotImplementedError, match="bias_gelu: the kernels differentiate once"):
        jax.grad(slope)(x)


@pytest.mark.parametrize("shape", [(0, 3, 32), (2, 0, 32)])
def test_nothing_gives_nothing(shape):
    found = run(*arrays(shape), interpret=True)
    assert [part.shape for part in found] == [shape, shape, (32,)]
