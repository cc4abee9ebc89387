"""Weights for benchmarks, with which steps take as long as with trained ones."""

import jax
import jax.numpy as jnp

from alload_jax.training.state import TrainState

_STDDEV = 0.02


def without_zeros(state: TrainState) -> TrainState:
    """Replaces parameters that are all zero by random ones.

    The head and the gates of a new model are zero, and so are most products in the backward passes
    of the first two steps. GPUs draw less power for zeros: on an H200 the second step took up to a
    tenth less time than later steps. With these weights it takes the same time.

    Args:
      state: a new state; its parameters are donated.
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
