"""Kernels of stacked layers, cast once for layers that are compiled one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from alload_jax.bench.step import random_batch
from alload_jax.models.common.stacked_kernels import narrow_linears, with_cast_kernels
from alload_jax.models.common.stored import Float8Kernel, quantise
from alload_jax.models.families import build_model, config_from_fields

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
