"""Products in float8: by NumPy's rounding, over devices, in models, and where there are none."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.errors import InputError
from alload_jax.models.common import float8
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.families import abstract_model, build_model, float8_unused, training_graph
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.wan.transformer import WanConfig
from pallas_kernels import devices
from pallas_kernels.first_use import COMPARISONS

CONFIG = WanConfig(
    dim=32, ffn_dim=64, num_heads=2, num_layers=2, in_channels=2, freq_dim=16, dtype="bfloat16"
)
TOKENS = float8.LEAST_TOKENS


def drawn(seed, *shape, size=1.0):
    values = np.random.default_rng(seed).normal(size=shape) * size
    return jnp.asarray(values, jnp.bfloat16)


def rounded(x, dtype):
    """Float64 values of a tensor in float8, its largest number within float8's largest octave."""
    x = np.asarray(x, np.float64)
    largest, limit = np.abs(x).max(), float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** (np.floor(np.log2(largest / limit)) + 1) if largest else 1.0
    return (x / scale).astype(dtype).astype(np.float64) * scale


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.sampled_from([1e-20, 1e-3, 1.0, 3e4, 1e20]), st.booleans())
def test_products_are_those_of_rounded_tensors(seed, size, empty):
    x, kernel = drawn(seed, 3, 5, 16, size=0 if empty else size), drawn(seed + 1, 16, 8)
    gradient = drawn(seed + 2, 3, 5, 8, size=1e-6 / size)
    out, pull = jax.vjp(float8.product, x, kernel)
    dx, dkernel = pull(gradient)
    e4, e5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    rows, weight, back = rounded(x, e4), rounded(kernel, e4), rounded(gradient, e5)
    for found, expected in (
        (out, rows @ weight),
        (dx, back @ weight.T),
        (dkernel, np.einsum("bsi,bso->io", rows, back)),
    ):
        assert found.dtype == jnp.bfloat16
        error = np.abs(np.asarray(found, np.float64) - expected).max()
        assert error <= 2**-8 * max(np.abs(expected).max(), 1e-37)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(wrong):
    x = drawn(0, 4, 16).at[1, 2].set(wrong)
    assert not np.isfinite(np.asarray(float8.product(x, drawn(1, 16, 16)), np.float32)).any()


def test_large_numbers_stay_finite():
    large = jnp.full((1, 16), 6e32, jnp.bfloat16)
    found = float8.product(large, jnp.eye(16, dtype=jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(found, np.float32), 6e32, rtol=0.07)


def test_devices_share_one_scale():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, kernel = drawn(0, 8, 16, 32).at[3].multiply(100), drawn(1, 32, 16)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))

    def both(x, kernel):
        out, pull = jax.vjp(float8.product, x, kernel)
        return out, *pull(out)

    for one, many in zip(jax.jit(both)(x, kernel), jax.jit(both)(split, kernel), strict=True):
        one, many = np.asarray(one, np.float32), np.asarray(many, np.float32)
        np.testing.assert_allclose(many, one, atol=2**-7 * np.abs(one).max())


def float8_products(config, frames):
    """How many tensors a loss and its gradient round to float8, forward and backward."""
    model = nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0)))
    latents, timestep = jnp.zeros((1, frames, 64, 64, 2)), jnp.zeros(1)
    condition = jnp.zeros((1, 1), jnp.int32)
    graph, state = nnx.split(model)

    def loss(state):
        return jnp.sum(nnx.merge(graph, state)(latents, timestep, condition))

    text = str(jax.make_jaxpr(jax.grad(loss, allow_int=True))(state))
    return text.count("new_dtype=float8_e4m3fn"), text.count("new_dtype=float8_e5m2")


@pytest.mark.slow
def test_layers_of_blocks_round_all_products_over_many_tokens():
    config = dataclasses.replace(CONFIG, matmul="float8")
    for each in (config, dataclasses.replace(config, lora=LoraConfig(rank=2))):
        values, gradients = float8_products(each, frames=4)  # 4,096 tokens
        # Four of attention, two of text, the one before GELU, and the one behind it for each side.
        assert gradients == 9
        assert values >= 16
    assert float8_products(config, frames=1) == (0, 0)
    assert float8_products(CONFIG, frames=4) == (0, 0)
    narrow = dataclasses.replace(config, dtype="float32")
    assert float8_products(narrow, frames=4) == (0, 0)


def test_auto_takes_float8_where_it_was_faster(monkeypatch):
    config = dataclasses.replace(CONFIG, matmul="auto")
    assert float8_products(config, frames=4) == (0, 0)  # a CPU has no products in float8
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA X", compute_capability="8.9")
    monkeypatch.setattr(devices, "current_device", lambda: gpu)
    try:
        COMPARISONS.use({"float8_product 32 64 bfloat16": 1.5, "float8_product 64 32 bfloat16": 1})
        assert float8_products(config, frames=4)[1] == 1
    finally:
        COMPARISONS.clear()


def test_gpus_without_float8_are_refused(monkeypatch):
    old = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
    monkeypatch.setattr(devices, "current_device", lambda: old)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = dataclasses.replace(CONFIG, matmul="float8", norm="xla", dim=48, num_heads=3)
    abstract_model(config)  # of a checkpoint that is drawn from there, or of a plan
    with pytest.raises(InputError, match=r"model.matmul is float8, but NVIDIA A100 .* 8\.9"):
        training_graph(config)
    training_graph(dataclasses.replace(config, matmul="auto"))


@pytest.mark.parametrize(
    ("changes", "tokens", "reason"),
    [
        ({}, TOKENS, ""),
        ({}, TOKENS - 1, "at most 4,095 tokens"),
        ({"dtype": "float32"}, TOKENS, "no linear layer in bfloat16"),
        ({"dim": 40, "num_heads": 2, "ffn_dim": 40}, TOKENS, "multiples of 16"),
    ],
)
def test_where_it_has_no_effect_that_is_said(changes, tokens, reason):
    said = float8_unused(dataclasses.replace(CONFIG, matmul="float8", **changes), tokens)
    assert reason in said
    assert bool(said) == bool(reason)


def test_joint_models_have_them_too():
    config = HunyuanVideoConfig(
        dim=32, ffn_dim=64, num_heads=2, num_layers=2, in_channels=2, matmul="float8"
    )
    model = nnx.eval_shape(
        lambda: build_model(dataclasses.replace(config, dtype="bfloat16"), nnx.Rngs(0))
    )
    named = [m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.Linear)]
    assert sum(layer.dot_general is float8.dot_general for layer in named) >= 12


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS + 8])
def test_a_gpu_multiplies_in_float8(tokens):
    x, kernel = drawn(0, 1, tokens, 512), drawn(1, 512, 1024)

    def both(x, kernel):
        out, pull = jax.vjp(float8.product, x, kernel)
        return out, *pull(out)

    options = {"xla_gpu_enable_triton_gemm": False}  # as in training
    compiled = jax.jit(both).lower(x, kernel).compile(options)
    assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    with jax.default_device(jax.devices("cpu")[0]):
        expected = both(*(jnp.asarray(np.asarray(each)) for each in (x, kernel)))
    for found, want in zip(compiled(x, kernel), expected, strict=True):
        found, want = np.asarray(found, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(found, want, atol=2**-6 * np.abs(want).max())
