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
from pallas_kernels.bias_gelu.api import GeluKernels, GeluOperands, measured_as_faster
from pallas_kernels.op import Call, Plain
from pallas_kernels.triton_tiles import Blocks


def arrays(shape, dtype=F32, spread=2.0):
    """x, bias and the output's cotangent."""
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    return spread * x, jnp.asarray(rng.normal(size=shape[-1:]), F32), cotangent


def run(x, bias, cotangent, **options):
    """The output and the gradients of x and bias; jitted."""

    @jax.jit
    def both(x, bias, cotangent):
        out, pull = jax.vjp(lambda x, bias: bias_gelu(x, bias, **options), x, bias)
        return out, *pull(cotangent)

    return both(x, bias, cotangent)


def oracle(x, bias, cotangent):
    """The same in float64, by tanh, with the derivative worked out by hand."""
    x, bias, cotangent = numpy64(x), numpy64(bias), numpy64(cotangent)
    z, c = x + bias, np.sqrt(2 / np.pi)
    t = np.tanh(c * (z + 0.044715 * z**3))
    slope = (1 + t) / 2 + z * (1 - t**2) / 2 * c * (1 + 3 * 0.044715 * z**2)
    dx = cotangent * slope
    return z * (1 + t) / 2, dx, dx.reshape(-1, bias.size).sum(axis=0)


def check(found, expected, dtype):
    rows = expected[1].size // expected[2].size
    limits = (
        tolerance(dtype, expected[0], 1, condition=4.0),
        tolerance(dtype, expected[1], 1, condition=8.0),
        tolerance(F32, expected[2], 1, rows=rows, condition=16.0),
    )
    check_within(found, expected, limits)


def linear(hidden, parameters):
    kernel, bias = (parameters[name].astype(hidden.dtype) for name in ("kernel", "bias"))
    # In TF32 the last bit of a hidden value may decide how it is rounded.
    return jnp.matmul(hidden, kernel, precision="highest") + bias


def arrays_then(shape, out, dtype=F32):
    """x, bias, parameters of `linear` and the cotangent of its result."""
    x, bias, _ = arrays(shape, dtype)
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(shape[-1], out)) / np.sqrt(shape[-1])
    parameters = {"kernel": kernel, "bias": rng.normal(size=out)}
    parameters = {name: jnp.asarray(each, F32) for name, each in parameters.items()}
    return x, bias, parameters, jnp.asarray(rng.normal(size=(*shape[:-1], out)), dtype)


def run_then(x, bias, parameters, cotangent, function=linear, compute=bias_gelu_then, **options):
    """The result and the gradients of x, bias and parameters; jitted."""

    def all_of(x, bias, parameters):
        return compute(x, bias, function, parameters, **options)

    @jax.jit
    def both(x, bias, parameters, cotangent):
        out, pull = jax.vjp(all_of, x, bias, parameters)
        return out, *pull(cotangent)

    return both(x, bias, parameters, cotangent)


def apart(x, bias, function, parameters):
    """As two functions that JAX differentiates one after the other."""
    return function(bias_gelu(x, bias, implementation="xla"), parameters)


def check_then(found, expected, dtype):
    digits = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}[dtype]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        size = 1 + np.max(np.abs(numpy64(other)), initial=0)
        np.testing.assert_allclose(numpy64(one), numpy64(other), atol=digits * size)


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
def test_with_a_linear_layer_it_is_what_both_are_apart(shape, dtype, interpret):
    given = arrays_then(shape, 24, dtype)
    expected = run_then(*given, compute=apart)
    for way in (kernels(interpret), {"implementation": "xla"}):
        check_then(run_then(*given, **way), expected, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dim", [512, 1024, 1152, 4608, 5000, 8192, 8960, 13824])
@pytest.mark.parametrize("tokens", [1, 1111, 9000])
def test_kernels_are_right_at_models_widths_and_give_equal_bits(dim, tokens):
    given = arrays((2, tokens, dim), BF16)
    found = run(*given, implementation="triton")
    check(found, oracle(*given), BF16)
    for one, other in zip(found, run(*given, implementation="triton"), strict=True):
        np.testing.assert_array_equal(one, other)
    given = arrays_then((2, min(tokens, 1111), dim), 64, BF16)
    found = run_then(*given, implementation="triton")
    check_then(found, run_then(*given, compute=apart), BF16)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_far_from_zero_it_is_the_identity_or_zero(dtype, interpret):
    x = jnp.asarray([[[-3e4, -200.0, -20.0, 20.0, 200.0, 3e4]]], dtype)
    out, dx, dbias = run(x, jnp.zeros(6), jnp.ones_like(x), **kernels(interpret))
    np.testing.assert_array_equal(out, jnp.maximum(x, 0))
    np.testing.assert_array_equal(dx, (x > 0).astype(dtype))
    np.testing.assert_array_equal(dbias, (x > 0).astype(F32)[0, 0])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_output_again_has_the_bits_of_the_first(dtype, interpret):
    x, bias, _ = arrays((2, 30, 300), dtype)
    call, operands = Call(Plain(interpret), None), GeluOperands(x, bias)
    first = jax.jit(GeluKernels().run, static_argnums=1)(operands, call)
    again = jax.jit(GeluKernels().backward_with_output, static_argnums=2)(operands, x, call)
    # In the interpreter XLA may fuse float32 otherwise in each program.
    digits = 2e-6 if dtype == F32 and interpret else 0
    np.testing.assert_allclose(numpy64(again.out), numpy64(first), atol=digits, rtol=digits)


def test_nothing_as_large_as_x_is_kept_but_x():
    x, bias, parameters, _ = arrays_then((1, 8, 96), 16, BF16)

    def then(x, bias, parameters):
        return bias_gelu_then(x, bias, linear, parameters, interpret=True)

    alone = partial(bias_gelu, implementation="xla")
    for pull in (jax.vjp(alone, x, bias)[1], jax.vjp(then, x, bias, parameters)[1]):
        kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "size", 0) >= x.size]
        kept = [leaf for leaf in kept if leaf.shape != parameters["kernel"].shape]
        assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, x.dtype)]


def test_integers_among_the_parameters_have_no_gradient(interpret):
    """As the key of an adapter's dropout."""
    x, bias, parameters, cotangent = arrays_then((1, 8, 96), 16)
    parameters["key"] = jax.random.key_data(jax.random.key(3))

    def dropped(hidden, parameters):
        key = jax.random.wrap_key_data(parameters["key"])
        kept = jax.random.bernoulli(key, 0.5, hidden.shape)
        return linear(jnp.where(kept, hidden, 0), parameters)

    def loss(compute, floats):
        out = compute(floats["x"], floats["b"], dropped, parameters | floats["p"])
        return jnp.vdot(out, cotangent)

    floats = {"x": x, "b": bias, "p": {"kernel": parameters["kernel"]}}
    ours = partial(bias_gelu_then, **kernels(interpret))
    found, expected = (jax.jit(jax.grad(partial(loss, each)))(floats) for each in (ours, apart))
    check_then(found, expected, F32)


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
    expected = oracle(x, bias, cotangent)
    sharding = NamedSharding(mesh, spec)
    put = [jax.device_put(each, sharding) for each in (x, cotangent, jnp.full_like(x, 0.5))]
    bias = jax.device_put(bias, NamedSharding(mesh, P((*spec, None, None)[2])))
    options = kernels(interpret) | {"sharding": sharding if kind == "auto" else None}

    def step(x, cotangent, half, bias):
        if not then:
            return run(x, bias, cotangent, **options)
        out, dx, dbias, _ = run_then(x, bias, half, cotangent, jnp.multiply, **options)
        return 2 * out, 2 * dx, 2 * dbias

    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(*put, bias).compile()
        check(compiled(*put, bias), expected, F32)
    assert collectives(compiled) == (0, 1)


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize("then", [False, True])
def test_forward_and_backward_are_a_kernel_each_and_a_sum(then):
    x, bias = jax.ShapeDtypeStruct((1, 300_000, 13824), BF16), jax.ShapeDtypeStruct((13824,), F32)
    step, given = run, (x, bias, x)
    if then:
        step, given = partial(run_then, function=jnp.multiply), (x, bias, x, x)
    text = lowered_for_cuda(partial(step, implementation="triton"), *given)
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


def test_a_width_that_shards_do_not_divide_is_named():
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P(None, None, "a"))
    with pytest.raises(ValueError, match="2 shards over a do not divide 31"):
        bias_gelu(jnp.zeros((1, 4, 31)), jnp.zeros(31), interpret=True, sharding=sharding)


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
    given = arrays_then(shape, 4)
    check_then(run_then(*given, interpret=True), run_then(*given, compute=apart), F32)
