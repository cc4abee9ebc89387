"""A bias with GELU and the linear layer behind it, whose backward computes GELU again."""

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
from kernel_cases import BF16, F16, F32, numpy64

from pallas_kernels import bias_gelu, bias_gelu_then, devices
from pallas_kernels.bias_gelu import triton
from pallas_kernels.bias_gelu.api import GeluKernels, GeluOperands
from pallas_kernels.op import Call, Plain
from pallas_kernels.triton_tiles import Blocks


def linear(hidden, parameters):
    kernel, bias = (parameters[name].astype(hidden.dtype) for name in ("kernel", "bias"))
    # In TF32 the last bit of a hidden value may decide how it is rounded.
    return jnp.matmul(hidden, kernel, precision="highest") + bias


def arrays(shape, out, dtype=F32, seed=0):
    """x, bias, parameters and the cotangent of the result."""
    keys = jax.random.split(jax.random.key(seed), 5)
    parameters = {
        "kernel": jax.random.normal(keys[0], (shape[-1], out)) / np.sqrt(shape[-1]),
        "bias": jax.random.normal(keys[1], (out,)),
    }
    x = 2 * jax.random.normal(keys[2], shape, dtype)
    bias = jax.random.normal(keys[3], shape[-1:])
    return x, bias, parameters, jax.random.normal(keys[4], (*shape[:-1], out), dtype)


def apart(x, bias, function, parameters):
    """As two functions that JAX differentiates one after the other."""
    return function(bias_gelu(x, bias, implementation="xla"), parameters)


def run(compute, x, bias, parameters, cotangent, function=linear):
    """The result and the gradients of x, bias and parameters."""
    out, pull = jax.vjp(lambda *given: compute(*given[:2], function, given[2]), x, bias, parameters)
    return out, *pull(cotangent)


def close(found, expected, dtype):
    digits = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}[dtype]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        size = 1 + np.max(np.abs(numpy64(other)), initial=0)
        np.testing.assert_allclose(numpy64(one), numpy64(other), atol=digits * size)


def kernels(interpret):
    return {"interpret": True} if interpret else {"implementation": "triton"}


@pytest.fixture
def small_blocks(monkeypatch):
    """Few programs, so that each has several steps and the last one fewer."""
    monkeypatch.setattr(devices, "core_count", lambda: 1)
    monkeypatch.setattr(triton, "BACKWARD_BLOCKS", Blocks(128, 4, 4, 4))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(2, 7, 384), (1, 1, 128), (3, 21, 100), (1, 70, 640)], ids=str)
def test_it_is_what_both_are_one_after_the_other(shape, dtype, interpret):
    given_arrays = arrays(shape, 24, dtype)
    expected = run(apart, *given_arrays)
    for how in (kernels(interpret), {"implementation": "xla"}):
        close(run(partial(bias_gelu_then, **how), *given_arrays), expected, dtype)


@settings(max_examples=15, deadline=None)
@given(st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 700)), st.integers(0, 99))
def test_it_is_so_at_any_size(shape, seed):
    given_arrays = arrays(shape, 5, seed=seed)
    found = run(partial(bias_gelu_then, interpret=True), *given_arrays)
    close(found, run(apart, *given_arrays), F32)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dim", [512, 1152, 5000, 8960, 13824])
@pytest.mark.parametrize("tokens", [1, 1111])
def test_kernels_are_so_at_models_widths(dim, tokens):
    given_arrays = arrays((2, tokens, dim), 64, BF16)
    found = run(partial(bias_gelu_then, implementation="triton"), *given_arrays)
    close(found, run(apart, *given_arrays), BF16)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_output_again_has_the_bits_of_the_first(dtype, interpret):
    x, bias, _, _ = arrays((2, 30, 300), 8, dtype)
    config, operands = Call(Plain(interpret), None), GeluOperands(x, bias)
    kernels = GeluKernels()
    first = jax.jit(kernels.run, static_argnums=1)(operands, config)
    again = jax.jit(kernels.backward_with_output, static_argnums=2)(operands, x, config)
    # In the interpreter XLA may fuse float32 otherwise in each program.
    digits = 2e-6 if dtype == F32 and interpret else 0
    np.testing.assert_allclose(numpy64(again.out), numpy64(first), atol=digits, rtol=digits)


def test_nothing_of_the_hidden_width_but_x_is_kept():
    x, bias, parameters, _ = arrays((1, 8, 96), 16)

    def compute(x, bias, parameters):
        return bias_gelu_then(x, bias, linear, parameters, interpret=True)

    _, pull = jax.vjp(compute, x, bias, parameters)
    kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "shape", None) == x.shape]
    assert len(kept) == 1


def test_integers_among_the_parameters_have_no_gradient(interpret):
    """As the key of an adapter's dropout."""
    x, bias, parameters, cotangent = arrays((1, 8, 96), 16)
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
    close(found, expected, F32)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b")), P("a", None, "b")], ids=str)
def test_kernels_gather_nothing_of_what_is_split(kind, spec, interpret):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("a", "b"), (kind, kind), devices=jax.devices()[:4])
    x, bias, _, _ = given_arrays = arrays((4, 6, 64), 8)
    width = (*spec, None, None)[2]
    places = (spec, P(width), P())
    put = [
        jax.device_put(v, NamedSharding(mesh, p)) for v, p in zip((x, bias), places, strict=False)
    ]
    scale = jax.random.normal(jax.random.key(9), x.shape)

    def scaled(hidden, parameters):
        return hidden * parameters

    scale = jax.device_put(scale, NamedSharding(mesh, spec))
    cotangent = jax.device_put(x, NamedSharding(mesh, spec))
    sharding = NamedSharding(mesh, spec) if kind == AxisType.Auto else None
    ours = partial(bias_gelu_then, sharding=sharding, **kernels(interpret))
    with jax.set_mesh(mesh):
        step = jax.jit(lambda *given: run(ours, *given, function=scaled))
        compiled = step.lower(*put, scale, cotangent).compile()
        found = compiled(*put, scale, cotangent)
    close(found, run(apart, *given_arrays[:2], np.asarray(scale), x, function=scaled), F32)
    text = compiled.as_text()
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", text)


@pytest.mark.parametrize("shape", [(1, 32760, 8960), (42, 1560, 8960), (1, 300_000, 13824)])
def test_the_backward_launches_one_kernel_and_its_sum(shape):
    shapes = jax.eval_shape(partial(arrays, shape, 1536, BF16))
    with mock.patch.object(devices, "unsupported_triton_device", return_value=None):
        step = jax.jit(lambda *given: run(partial(bias_gelu_then, implementation="triton"), *given))
        lowered = step.trace(*shapes).lower(lowering_platforms=("cuda",))
    launches = re.findall(r'\bname = "bias_gelu_(\w+)"', lowered.as_text())
    assert sorted(launches) == ["backward", "forward", "reduce"]


def test_second_derivatives_of_kernels_are_refused_in_words(interpret):
    x, bias, parameters, _ = arrays((1, 3, 32), 4)

    def slope(x):
        def total(x):
            return bias_gelu_then(x, bias, linear, parameters, **kernels(interpret)).sum()

        return jax.grad(total)(x).sum()

    with pytest.raises(NotImplementedError, match="bias_gelu: the kernels differentiate once"):
        jax.grad(slope)(x)


@pytest.mark.parametrize("shape", [(0, 3, 32), (2, 0, 32)])
def test_nothing_gives_nothing(shape):
    given_arrays = arrays(shape, 4)
    found = run(partial(bias_gelu_then, interpret=True), *given_arrays)
    close(found, run(apart, *given_arrays), F32)
