"""Updates of large gradients are skipped."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alload_jax.errors import InputError
from alload_jax.training.optimizer import (
    OptimizerConfig,
    make_optimizer,
    skip_spikes,
    skipped_updates,
)


def follow(norms, times):
    """By hand in float64: which of the steps are skipped, none of them by a hair."""
    total, weight, found = 0.0, 0.0, []
    for number, norm in enumerate(norms):
        bound = np.inf if number < 20 else times * total / weight
        assume(abs(norm / bound - 1) > 1e-4)
        found.append(norm > bound)
        total = 0.99 * total + 0.01 * min(norm, bound)
        weight = 0.99 * weight + 0.01
    return found


def run(optimizer, norms):
    """The parameters after each step, and how many updates were skipped up to it."""
    params = {"a": jnp.ones(3), "b": jnp.full((2,), 2.0)}
    state, found = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for norm in norms:
        value = norm / np.sqrt(5)
        grads = {"a": jnp.full(3, value), "b": jnp.full(2, value)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append((jax.tree.map(np.asarray, params), int(skipped_updates(state) or 0)))
    return found


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(0.1, 3.0), min_size=20, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.floats(10, 1e6)), max_size=4),
)
def test_the_updates_are_those_of_the_steps_that_are_not_skipped(norms, spikes):
    for place, norm in spikes:
        norms[place % len(norms)] = norm
    expected = follow(norms, 5.0)
    kept = [norm for norm, skipped in zip(norms, expected, strict=True) if not skipped]
    found = run(skip_spikes(optax.adam(0.1), 5.0), norms)
    assert [count for _, count in found] == np.cumsum(expected).tolist()
    alone = run(optax.adam(0.1), kept)
    # Two programs may round differently, each update at the size of the weights, which begin at 1.
    same = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(same, found[-1][0], alone[-1][0])


def test_gradients_that_stay_large_are_accepted_after_some_steps():
    norms = [1.0] * 50 + [100.0] * 200
    skipped = [count for _, count in run(skip_spikes(optax.sgd(0.1), 5.0), norms)]
    assert skipped[49] == 0
    assert skipped[50] == 1
    assert skipped[-1] == skipped[-50] < 150


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, float("nan")])
def test_bounds_that_would_skip_the_usual_are_refused(value):
    with pytest.raises(InputError, match=r"optimizer\.skip_above"):
        OptimizerConfig(skip_above=value)


def test_the_state_is_another_so_that_checkpoints_differ_in_words():
    assert OptimizerConfig().identity() == {}
    assert OptimizerConfig(skip_above=5.0).identity() == {"skip_above": "set"}
    optimizer = make_optimizer(OptimizerConfig(skip_above=5.0), 10)
    state = optimizer.init({"kernel": jnp.ones(2)})
    assert int(skipped_updates(state)) == 0
    assert skipped_updates(make_optimizer(OptimizerConfig(), 10).init({})) is None
