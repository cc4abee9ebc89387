"""Weights that take as long to compute with as trained ones."""

import jax
import jax.numpy as jnp

from alload_jax.training.state import TrainState

_STDDEV = 0.02


def without_zeros(state: TrainState) -> TrainState:
    """Draws the parameters that are all zero.

    A fresh model's head and gates are zero, and with them most products in the first two steps'
    backward passes. GPUs draw less power for zeros: the second step took an H200 up to a tenth less
    time than those that followed, and with these weights takes as much.

    Args:
      state: fresh; its parameters are given up.
    """

    def draw(params: dict) -> dict:
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [
            jnp.where(jnp.any(leaf), leaf, _STDDEV * jax.random.normal(key, leaf.shape, leaf.dtype))
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, drawn)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    drawn = jax.jit(draw, out_shardings=shardings, donate_argnums=0)(state.params)
    return state._replace(params=drawn)
