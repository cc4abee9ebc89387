"""An input that several linear layers share."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common.fan_out import fan_out


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
