"""A bias with GELU, alone and before the linear layer whose backward computes it again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from kernel_cases import (
    BF16,
    F16,
    F32,
    assert_same_bits,
    check_within,
    collectives,
    kernels,
    kernels_launched,
    lowered_for_cuda,
    mesh_of_four,
    numpy64,
    tolerance,
)

from pallas_kernels import bias_gelu, bias_gelu_then, devices
from pallas_kernels.bias_gelu import triton
from pallas_kernels.bias_gelu.api import measured_as_faster
from pallas_kernels.triton_tiles import Blocks


def arrays(shape, dtype=F32, spread=2.0):
    """x, bias and the output's cotangent."""
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    return spread * x, jnp.asarray(rng.normal(size=shape[-1:]), F32), cotangent


def scaled(hidden, parameters):
    return hidden * parameters["factor"] * (1 - 2 * parameters["flips"])


def parameters_like(x):
    """Of `scaled`: exact in any dtype, and some integers, which have no gradient."""
    rng = np.random.default_rng(1)
    factor = jnp.asarray(2.0 ** rng.integers(-1, 2, x.shape), x.dtype)
    return {"factor": factor, "flips": jnp.asarray(rng.integers(0, 2, x.shape), jnp.int8)}


def run(x, bias, cotangent, parameters=None, **options):
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


def oracle(x, bias, cotangent, parameters=None):
    """The same in float64, by tanh, with the derivative worked out by hand."""
    x, bias, cotangent = numpy64(x), numpy64(bias), numpy64(cotangent)
    scale, sign = 1.0, 1.0
    if parameters:
        sign = 1.0 - 2 * numpy64(parameters["flips"])
        scale = numpy64(parameters["factor"]) * sign
    z, c = x + bias, np.sqrt(2 / np.pi)
    t = np.tanh(c * (z + 0.044715 * z**3))
    slope = (1 + t) / 2 + z * (1 - t**2) / 2 * c * (1 + 3 * 0.044715 * z**2)
    out, dx = z * (1 + t) / 2, cotangent * scale * slope
    found = out * scale, dx, dx.reshape(-1, bias.size).sum(axis=0)
    return (*found, cotangent * out * sign) if parameters else found


def check(found, expected, dtype):
    rows = expected[1].size // expected[2].size
    limits = (
        tolerance(dtype, expected[0], 1, condition=4.0),
        tolerance(dtype, expected[1], 1, condition=8.0),
        tolerance(F32, expected[2], 1, rows=rows, condition=16.0),
        *(2 * tolerance(dtype, each, 1, condition=8.0) for each in expected[3:]),
    )
    check_within(found, expected, limits)


@pytest.fixture
def small_blocks(monkeypatch):
    """Few programs, so that each has several steps and the last one fewer."""
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    monkeypatch.setattr(triton, "BACKWARD_BLOCKS", Blocks(128, 4, 4, 4))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("shape", "dtype", "spread"),
    [
        ((2, 7, 384), F32, 2.0),
        ((3, 21, 100), BF16, 2.0),
        ((1, 70, 640), F16, 2.0),
        ((2, 2, 1), F32, 30.0),
    ],
    ids=str,
)
def test_it_equals_the_oracle(shape, dtype, spread, interpret):
    given = arrays(shape, dtype, spread)
    for way in (kernels(interpret), {"implementation": "xla"}):
        found = run(*given, **way)
        assert [each.dtype for each in found] == [dtype, dtype, F32]
        check(found, oracle(*given), dtype)


def test_it_equals_the_oracle_in_blocks_of_its_own(interpret):
    given = arrays((3, 13, 700), spread=0.01)
    check(run(*given, **kernels(interpret)), oracle(*given), F32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 21, 100), F32), ((2, 7, 384), BF16), ((1, 1, 128), F16)], ids=str
)
def test_before_an_affine_function_it_equals_the_oracle(shape, dtype, interpret):
    given = arrays(shape, dtype)
    given = *given, parameters_like(given[0])
    for way in (kernels(interpret), {"implementation": "xla"}):
        check(run(*given, **way), oracle(*given), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dim", [512, 1024, 1152, 4608, 5000, 8192, 8960, 13824])
@pytest.mark.parametrize("tokens", [1, 1111, 9000])
def test_kernels_are_right_at_models_widths_and_give_equal_bits(dim, tokens):
    given = arrays((2, tokens, dim), BF16)
    for parameters in (None, parameters_like(given[0])):
        found, again = (run(*given, parameters, implementation="triton") for _ in range(2))
        check(found, oracle(*given, parameters), BF16)
        assert_same_bits(found, again)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_far_from_zero_it_is_the_identity_or_zero(dtype, interpret):
    x = jnp.asarray([[[-3e4, -200.0, -20.0, 20.0, 200.0, 3e4]]], dtype)
    out, dx, dbias = run(x, jnp.zeros(6), jnp.ones_like(x), **kernels(interpret))
    np.testing.assert_array_equal(out, jnp.maximum(x, 0))
    np.testing.assert_array_equal(dx, (x > 0).astype(dtype))
    np.testing.assert_array_equal(dbias, (x > 0).astype(F32)[0, 0])


def test_nothing_as_large_as_x_is_kept_but_x():
    x, bias, _ = arrays((1, 8, 96), BF16)

    def then(x, bias):
        return bias_gelu_then(x, bias, lambda hidden, half: hidden * half, 0.5, interpret=True)

    for function in (partial(bias_gelu, implementation="xla"), then):
        leaves = jax.tree.leaves(jax.vjp(function, x, bias)[1])
        kept = [leaf for leaf in leaves if getattr(leaf, "size", 0) >= x.size]
        assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, x.dtype)]


def test_xla_differentiates_in_any_mode_and_twice_but_kernels_once(interpret):
    x, bias, _ = arrays((1, 2, 3))
    function = partial(bias_gelu, bias=bias, implementation="xla")
    check_grads(function, (x,), order=2, modes=("fwd", "rev"), atol=0.02, rtol=0.02)
    for each in (bias_gelu, lambda *given, **way: bias_gelu_then(*given, jnp.multiply, 2.0, **way)):
        slope = jax.grad(lambda x, each=each: each(x, bias, **kernels(interpret)).sum())
        with pytest.raises(NotImplementedError, match="bias_gelu: the kernels differentiate once"):
            jax.grad(lambda x, slope=slope: slope(x).sum())(x)


@pytest.mark.parametrize(
    ("then", "kind", "spec"),
    [
        (False, "auto", P("a", "b")),
        (False, "explicit", P("a", None, "b")),
        (False, "auto", P(("a", "b"))),
        (True, "auto", P("a", None, "b")),
        (True, "explicit", P("a", "b")),
    ],
    ids=str,
)
def test_kernels_gather_nothing_of_what_is_split(then, kind, spec, interpret):
    mesh = mesh_of_four(kind, "a", "b")
    x, bias, cotangent = arrays((4, 6, 64))
    parameters = parameters_like(x) if then else None
    sharding = NamedSharding(mesh, spec)
    of_bias = NamedSharding(mesh, P((*spec, None, None)[2]))
    options = kernels(interpret) | {"sharding": sharding if kind == "auto" else None}
    with jax.set_mesh(mesh):
        streams = jax.device_put((cotangent, parameters), sharding)
        arguments = jax.device_put(x, sharding), jax.device_put(bias, of_bias), *streams
        compiled = jax.jit(partial(run, **options)).lower(*arguments).compile()
        check(compiled(*arguments), oracle(x, bias, cotangent, parameters), F32)
    assert collectives(compiled) == (0, 1)


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize("then", [False, True])
def test_forward_and_backward_are_a_kernel_each_and_a_sum(then):
    x, bias = jax.ShapeDtypeStruct((1, 300_000, 13824), BF16), jax.ShapeDtypeStruct((13824,), F32)
    parameters = {"factor": x, "flips": jax.ShapeDtypeStruct(x.shape, jnp.int8)} if then else None
    text = lowered_for_cuda(partial(run, implementation="triton"), x, bias, x, parameters)
    assert sorted(kernels_launched(text, "bias_gelu")) == ["backward", "forward", "reduce"]


X, BIAS = jnp.zeros((1, 4, 8)), jnp.zeros(8)


@pytest.mark.parametrize(
    ("x", "bias", "words"),
    [
        (jnp.zeros((4, 8)), BIAS, r"x is float32\[4, 8\]"),
        (X.astype(int), BIAS, r"x is int32"),
        (X, jnp.zeros(3), r"bias is float32\[3\]; it must be floats \[8\]"),
        (X, BIAS.astype(int), r"bias is int32\[8\]"),
    ],
)
def test_what_does_not_fit_is_named(x, bias, words):
    with pytest.raises(ValueError, match=f"^bias_gelu: {words}"):
        bias_gelu(x, bias)


@pytest.mark.parametrize(
    ("kind", "elements", "dim", "itemsize", "faster"),
    [
        ("NVIDIA H200", 1 << 22, 1024, 2, True),
        ("NVIDIA H100 80GB HBM3", 1 << 24, 8960, 2, True),
        ("NVIDIA H200", (1 << 22) - 1, 8960, 2, False),
        ("NVIDIA H200", 1 << 24, 1023, 2, None),
        ("NVIDIA H200", 1 << 24, 8960, 4, None),
        ("NVIDIA A100", 1 << 24, 8960, 2, None),
    ],
)
def test_auto_knows_what_was_measured(kind, elements, dim, itemsize, faster):
    assert measured_as_faster(kind, elements, dim, itemsize) is faster


def test_nothing_gives_nothing():
    shape = (2, 0, 32)
    found = run(*arrays(shape), interpret=True)
    assert [part.shape for part in found] == [shape, shape, (32,)]
    given = arrays(shape)
    given = *given, parameters_like(given[0])
    assert [part.shape for part in run(*given, interpret=True)] == [shape, shape, (32,), shape]
