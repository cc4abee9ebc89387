"""Moments in eight bits: bounds of the error, and training beside float32 AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.update_rules import (
    BLOCK,
    Quantised,
    dequantise,
    dynamic_codes,
    quantise,
    scale_by_adam8bit,
)


def spread(seed, shape, signed):
    """Values over many decades, with zeros and a block of zeros."""
    rng = np.random.default_rng(seed)
    values = 10.0 ** rng.uniform(-12, 2, shape)
    values *= rng.random(shape) > 0.1
    values[..., : shape[-2] // 2, 0] = 0
    return (values * np.where(rng.random(shape) < 0.5, -1, 1) if signed else values).astype(
        np.float32
    )


def blocks_along_inputs(values):
    size = min(BLOCK, values.shape[-2])
    return [slice(start, start + size) for start in range(0, values.shape[-2], size)]


SHAPES = [(1, 1), (7, 3), (256, 2), (300, 2), (2, 520, 3)]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.booleans())
def test_a_value_becomes_the_nearest_code_of_its_block(seed, shape, signed):
    values = spread(seed, shape, signed)
    stored = quantise(jnp.asarray(values), signed)
    found = np.asarray(dequantise(stored, signed), np.float64)
    codes = dynamic_codes(signed).astype(np.float64)
    assert stored.codes.dtype == jnp.uint8
    assert stored.codes.shape == shape
    assert stored.scale.shape == (*shape[:-2], len(blocks_along_inputs(values)), shape[-1])
    for rows in blocks_along_inputs(values):
        block = values[..., rows, :].astype(np.float64)
        scale = np.abs(block).max(-2, keepdims=True)
        best = np.abs(block[..., None] - scale[..., None] * codes).min(-1)
        away = np.abs(found[..., rows, :] - block)
        allowed = best + 1e-6 * scale
        if not signed:  # what is not zero stays above zero
            least = scale * codes[1]
            allowed = np.where((block > 0) & (block < least), least * (1 + 1e-6), allowed)
        assert (away <= allowed).all()
    if not signed:
        assert ((found > 0) == (values > 0)).all()


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.booleans())
def test_codes_stay_what_they_are_when_nothing_changes(seed, shape, signed):
    once = quantise(jnp.asarray(np.abs(spread(seed, shape, signed))), signed)
    twice = quantise(dequantise(once, signed), signed)
    np.testing.assert_array_equal(once.codes, twice.codes)
    np.testing.assert_array_equal(once.scale, twice.scale)


@pytest.mark.parametrize(("signed", "intervals"), [(True, 64), (False, 128)])
def test_the_error_within_a_decade_of_the_largest_is_half_an_interval(signed, intervals):
    values = np.linspace(0.1, 1, 256, dtype=np.float32)[:, None]
    found = np.asarray(dequantise(quantise(jnp.asarray(values), signed), signed))
    error = np.abs(found - values).max()
    assert 0.9 * 0.45 / intervals < error < 1.001 * 0.45 / intervals


def test_the_first_update_is_that_of_adam():
    grads = {"kernel": jnp.asarray(spread(0, (2, 300, 4), True))}
    ours, theirs = scale_by_adam8bit(0.9, 0.99, 1e-8), optax.scale_by_adam(0.9, 0.99, 1e-8)
    found, _ = ours.update(grads, ours.init(grads))
    expected, _ = theirs.update(grads, theirs.init(grads))
    np.testing.assert_allclose(found["kernel"], expected["kernel"], rtol=1e-5)


def test_small_arrays_and_vectors_keep_float32_moments():
    params = {
        "large": {"kernel": jnp.ones((64, 64))},
        "small": {"kernel": jnp.ones((63, 65))},
        "table": {"embedding": jnp.ones((64, 64))},
        "norm": {"scale": jnp.ones((2, 4096))},
    }
    state = make_optimizer(OptimizerConfig(name="adamw8bit"), 10).init(params)
    found = [tree for _, tree in optax.tree.get_all_with_path(state, "nu") if jax.tree.leaves(tree)]
    dtypes = [{str(leaf.dtype) for leaf in jax.tree.leaves(tree)} for tree in found]
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in found]
    assert sorted(zip(map(tuple, dtypes), sizes, strict=True)) == [
        (("float32",), 63 * 65 + 64 * 64 + 2 * 4096),
        (("uint8",), 64 * 64),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_training_converges_as_with_float32_moments(seed):
    """A two-layer regression on noisy minibatches: the final losses differ by a few percent."""
    rng = np.random.default_rng(seed)
    inputs = jnp.asarray(rng.normal(size=(512, 64)), jnp.float32)
    outputs = jnp.tanh(inputs @ rng.normal(size=(64, 64)).astype(np.float32) / 8)
    start = {
        "first": {"kernel": jnp.asarray(rng.normal(size=(64, 96)) / 8, jnp.float32)},
        "second": {"kernel": jnp.asarray(rng.normal(size=(96, 64)) / 10, jnp.float32)},
    }

    def loss(params, rows):
        hidden = jnp.tanh(inputs[rows] @ params["first"]["kernel"])
        return jnp.mean((hidden @ params["second"]["kernel"] - outputs[rows]) ** 2)

    def trained(name):
        config = OptimizerConfig(name=name, learning_rate=3e-3, warmup_steps=10)
        optimizer = make_optimizer(config, 300)

        def step(carry, key):
            params, state = carry
            rows = jax.random.randint(key, (64,), 0, 512)
            updates, state = optimizer.update(jax.grad(loss)(params, rows), state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(seed), 300)
        (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), keys)
        return float(loss(params, jnp.arange(512)))

    full, ours = trained("adamw"), trained("adamw8bit")
    assert full < 0.1 * float(loss(start, jnp.arange(512)))
    assert abs(ours / full - 1) < 0.05


def test_a_stored_array_has_a_byte_for_each_value():
    stored = quantise(jnp.ones((4, 1024, 64)), signed=True)
    size = sum(part.size * part.dtype.itemsize for part in stored)
    assert isinstance(stored, Quantised)
    assert size == 4 * 1024 * 64 * (1 + 4 / BLOCK)
