"""Patches, and an input that several linear layers share."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common.parts import fan_out, patchify, unpatchify

# ---------------------------------------------------------------- patches


sizes = st.integers(1, 3)


@settings(max_examples=30, deadline=None)
@given(st.tuples(sizes, sizes, sizes), st.tuples(sizes, sizes, sizes), sizes, sizes)
def test_unpatchify_undoes_patchify(grid, patch, batch, channels):
    shape = (batch, *(g * p for g, p in zip(grid, patch, strict=True)), channels)
    latents = jnp.arange(np.prod(shape)).reshape(shape)
    tokens = patchify(latents, patch)
    assert tokens.shape == (batch, np.prod(grid), np.prod(patch) * channels)
    np.testing.assert_array_equal(unpatchify(tokens, shape, patch), latents)


def test_a_token_holds_its_patch():
    latents = np.arange(2 * 4 * 6).reshape(1, 2, 4, 6, 1)
    tokens = np.asarray(patchify(jnp.asarray(latents), (1, 2, 2)))
    assert tokens[0, 0].tolist() == latents[0, 0, :2, :2, 0].ravel().tolist()
    assert tokens[0, 1].tolist() == latents[0, 0, :2, 2:4, 0].ravel().tolist()
    assert tokens[0, 6].tolist() == latents[0, 1, :2, :2, 0].ravel().tolist()


# ---------------------------------------------------------------- fan out


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 5), st.integers(0, 1000))
def test_its_gradient_is_the_sum_of_its_users(users, seed):
    key = jax.random.key(seed)
    x, *weights = jax.random.normal(key, (1 + users, 7))

    def loss(x):
        parts = fan_out(x, users)
        return sum(jnp.vdot(jnp.sin(part), w) for part, w in zip(parts, weights, strict=True))

    assert all(part is x for part in fan_out(x, users))
    np.testing.assert_allclose(jax.grad(loss)(x), jnp.cos(x) * sum(weights), rtol=1e-5, atol=1e-5)


def test_each_gradient_stands_before_the_sum_of_those_behind_it():
    """As cuBLAS's epilogue needs it: a product, to which an array is added."""
    x = jnp.ones(3)
    _, pull = jax.vjp(lambda x: fan_out(x, 3), x)
    first, second = jax.make_jaxpr(pull)((x, 2 * x, 3 * x)).jaxpr.eqns
    assert (first.primitive.name, second.primitive.name) == ("add", "add")
    assert second.invars[1] is first.outvars[0]
