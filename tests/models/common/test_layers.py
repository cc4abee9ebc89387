"""How layers are run as a loop or one by one, and their kernels in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from alload_jax.models.common.stored import (
    Float8Kernel,
    SlottedKernel,
    narrow_linears,
    quantise,
    with_cast_kernels,
    with_slots,
)
from alload_jax.models.families import build_model, config_from_fields, gradient_dtypes
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.state import abstract_state
from alload_jax.training.step import make_accumulate, zero_accumulator
from alload_jax.training.trial_step import random_batch, training_spec

# ---------------------------------------------------------------- layers


TINY = {"dim": 8, "ffn_dim": 16, "num_heads": 2, "num_layers": 4, "in_channels": 4}


@pytest.mark.parametrize(
    ("policies", "barriers"),
    [(["full"], 0), (["attention", "full"], 2), (["full", "attention", "full", "attention"], 4)],
)
def test_layers_of_an_iteration_are_computed_again_in_turn(policies, barriers):
    spec = training_spec(config_from_fields(TINY | {"remat": "none", "remat_layers": policies}))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    weights = abstract_state(spec, mesh, 0).weights
    batch = jax.eval_shape(lambda: random_batch(spec.model, (1, 1, 4, 4), 1))
    sums = jax.eval_shape(lambda: zero_accumulator(spec, mesh, weights, batch, single=True))
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    text = make_accumulate(spec, mesh, single=True).lower(weights, sums, batch, key).as_text()
    of_timesteps = 1
    assert text.count("stablehlo.optimization_barrier") == of_timesteps + barriers


# ---------------------------------------------------------------- stacked kernels


FIELDS = {"in_channels": 4, "dim": 32, "ffn_dim": 64, "num_heads": 2, "num_layers": 3}


def config_of(family, dtype="bfloat16", **fields):
    return config_from_fields(FIELDS | {"family": family, "dtype": dtype} | fields)


def blocks_of(config):
    return build_model(config, nnx.Rngs(0)).blocks


@pytest.mark.parametrize("family", ["wan", "hunyuan_video"])
def test_a_copy_has_the_kernels_in_16_bits_and_all_else_as_it_was(family):
    blocks = blocks_of(config_of(family))
    before = nnx.to_pure_dict(nnx.state(blocks))
    copy = with_cast_kernels(blocks)
    narrow = {"/".join(map(str, path)) for path, *_ in narrow_linears(blocks)}
    assert len(narrow) == (10 if family == "wan" else 12)

    def compare(path, value, original):
        name = "/".join(str(key.key) for key in path)
        cast = name.removesuffix("/kernel") in narrow and name.endswith("/kernel")
        assert value.dtype == ("bfloat16" if cast else "float32")
        np.testing.assert_array_equal(value, original.astype(value.dtype))

    jax.tree_util.tree_map_with_path(compare, nnx.to_pure_dict(nnx.state(copy)), before)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(blocks)), before)


def test_layers_in_float32_are_copied_as_they_are():
    blocks = blocks_of(config_of("wan", "float32"))
    states = [nnx.to_pure_dict(nnx.state(each)) for each in (blocks, with_cast_kernels(blocks))]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_kernel_in_float8_stays_in_float8():
    blocks = blocks_of(config_of("wan"))
    linear = blocks.self_attention.query
    linear.kernel = nnx.Param(Float8Kernel(**quantise(linear.kernel[...])))
    kept = with_cast_kernels(blocks).self_attention.query.kernel.get_value()
    assert isinstance(kept, Float8Kernel)
    assert kept.values.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("family", ["wan", "hunyuan_video"])
def test_layers_compiled_one_by_one_split_no_kernels_in_float32(family):
    found = {}
    for scan in (False, True):
        config = config_of(family, scan_layers=scan)
        batch = jax.eval_shape(lambda config=config: random_batch(config, (1, 1, 4, 4), 8))
        shapes = jax.eval_shape(lambda config=config: build_model(config, nnx.Rngs(0)))
        graph, state = nnx.split(shapes)

        def loss(state, batch, graph=graph):
            time = jnp.zeros(len(batch.latents))
            output = nnx.merge(graph, state)(batch.latents, time, batch.condition)
            return jnp.sum(output)

        jaxpr = jax.make_jaxpr(jax.grad(loss))(state, batch).jaxpr
        found[scan] = [each.invars[0].aval for each in equations(jaxpr) if is_split(each)]
    # The modulation of HunyuanVideo's layers computes in float32.
    modulation = (3, 32, 6 * 32)
    split = [aval for aval in found[False] if aval.ndim == 3 and aval.shape != modulation]
    kernels = [aval for aval in split if min(aval.shape[1:]) >= 32]
    assert kernels
    assert {str(aval.dtype) for aval in kernels} == {"bfloat16"}
    assert not [aval for aval in found[True] if aval.shape[:1] == (3,) and aval.ndim == 3]


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def is_split(equation):
    return equation.primitive.name == "split" and equation.params["axis"] == 0


def test_adapters_beside_frozen_kernels_are_not_cast():
    config = config_of("wan", lora={"rank": 2})
    copy = with_cast_kernels(blocks_of(config))
    query = copy.self_attention.query
    assert query.kernel.get_value().dtype == "bfloat16"
    assert query.lora_down.get_value().dtype == "float32"


# ---------------------------------------------------------------- gradient slots


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
