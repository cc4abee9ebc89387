"""Feed-forward layers under rematerialisation: how often GELU is computed."""

from typing import get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alload_jax.models.common.feed_forward import FeedForward
from alload_jax.models.common.remat import rematerialise
from alload_jax.planning.analytic import keeps_feed_forward
from alload_jax.planning.remat import RematPolicy
from pallas_kernels import devices, triton_support

POLICIES = get_args(RematPolicy)


def layer_of(dim, hidden, dtype):
    layer = FeedForward(dim, hidden, dtype=dtype, rngs=nnx.Rngs(0))
    return nnx.split(layer)


def gated(graph, policy):
    """A loss in which the layer's output has a gate, whose gradient needs the output."""

    def loss(state, x, gate):
        def block(x, state):
            layer = nnx.merge(graph, state)
            return x + gate * layer(x, output_kept=keeps_feed_forward(policy))

        out = rematerialise(block, policy, in_loop=False)(x, state)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return loss


@pytest.mark.parametrize("policy", POLICIES)
def test_gelu_runs_once_more_only_where_the_layer_is_applied_again(policy):
    dim, hidden = 64, 1024
    graph, state = layer_of(dim, hidden, jnp.bfloat16)
    shapes = (state, jnp.zeros((2, 2048, dim), jnp.bfloat16), jnp.zeros((), jnp.bfloat16))
    grad = jax.jit(jax.grad(gated(graph, policy), argnums=(0, 1, 2)))
    with (
        mock.patch.object(triton_support, "unsupported_device", return_value=None),
        mock.patch.object(devices, "device_kind", return_value="NVIDIA H200"),
    ):
        text = grad.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    runs = {name: text.count(f'name = "bias_gelu_{name}"') for name in ("forward", "backward")}
    again = not keeps_feed_forward(policy)
    assert runs == {"forward": 2 if again else 1, "backward": 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_all_policies_give_the_same_gradients(policy):
    graph, state = layer_of(16, 48, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    found, expected = (
        jax.jit(jax.grad(gated(graph, each), argnums=(0, 1, 2)))(state, x, jnp.float32(0.5))
        for each in (policy, "none")
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_that_of_the_functions_apart():
    graph, state = layer_of(8, 24, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, 3, 8))

    def slope(x, kept):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, output_kept=kept)))

    along = jnp.cos(x)
    found = [
        jax.jvp(jax.grad(lambda x, kept=kept: slope(x, kept)), (x,), (along,))[1]
        for kept in (True, False)
    ]
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
