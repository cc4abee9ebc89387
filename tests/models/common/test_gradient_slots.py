"""Kernels whose gradient arrives in a slot, in the dtype in which layers compute it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common.gradient_slots import SlottedKernel, with_slots
from alload_jax.models.families import config_from_fields, gradient_dtypes

LAYERS = {"in_channels": 4, "dim": 32, "ffn_dim": 64, "num_heads": 2, "num_layers": 2}


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from(["bfloat16", "float16"]))
def test_a_slots_gradient_is_the_one_before_the_cast(seed, dtype):
    keys = jax.random.split(jax.random.key(seed), 3)
    kernel = jax.random.normal(keys[0], (6, 4))
    x, weights = (
        jax.random.normal(key, (5, n), dtype) for key, n in zip(keys[1:], (6, 4), strict=True)
    )

    def loss(kernel):
        return jnp.sum((x @ kernel[...].astype(dtype)) * weights)

    def of_slot(slot):
        return loss(SlottedKernel(kernel, slot))

    plain = jax.jit(jax.grad(loss))(kernel)
    found = jax.jit(jax.grad(of_slot))(jnp.zeros(kernel.shape, dtype))
    assert (plain.dtype, found.dtype) == (jnp.float32, dtype)
    np.testing.assert_array_equal(plain, found.astype(jnp.float32))
    np.testing.assert_array_equal(loss(kernel), of_slot(jnp.full(kernel.shape, jnp.nan, dtype)))


@pytest.mark.parametrize("family", ["wan", "hunyuan_video"])
def test_only_kernels_of_layers_that_compute_in_16_bits_have_narrow_gradients(family):
    fields = LAYERS | {"family": family}
    narrow = gradient_dtypes(config_from_fields(fields | {"dtype": "bfloat16"}))
    assert set(narrow.values()) == {jnp.dtype("bfloat16")}
    assert all(name.endswith("/kernel") for name in narrow)
    assert any(name.endswith("feed_forward/hidden/kernel") for name in narrow)
    assert not [name for name in narrow if "modulation" in name or "time" in name]
    assert gradient_dtypes(config_from_fields(fields | {"dtype": "float32"})) == {}


def test_parameters_without_a_slot_are_those_that_are_differentiated():
    values = {"a": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones(2)}}
    slots = {"a": {"kernel": jnp.zeros((2, 3, 4), jnp.bfloat16), "bias": jnp.full(2, 5.0)}}
    found = with_slots(values, slots, {"a/kernel": jnp.bfloat16, "absent/kernel": jnp.bfloat16})
    assert isinstance(found["a"]["kernel"], SlottedKernel)
    assert found["a"]["kernel"].shape == (2, 3, 4)
    np.testing.assert_array_equal(found["a"]["kernel"][1], values["a"]["kernel"][1])
    np.testing.assert_array_equal(found["a"]["bias"], slots["a"]["bias"])
