"""The feed-forward layer of transformer blocks."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.parts import ACTIVATION, FEED_FORWARD, LINEAR
from alload_jax.models.common.single_row import split_single_row

gelu_tanh = partial(nnx.gelu, approximate=True)


class FeedForward(nnx.Module):
    """Linear, activation (by default GELU in its tanh form), linear."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = gelu_tanh,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.hidden = nnx.Linear(dim, hidden, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, dim, dtype=dtype, rngs=rngs)

    @jax.named_scope(FEED_FORWARD)
    def __call__(self, x: jax.Array, sharding: NamedSharding | None = None) -> jax.Array:
        """[B, S, D] → [B, S, D]."""

        def both(x: jax.Array) -> jax.Array:
            with jax.named_scope(LINEAR):
                hidden = self.hidden(x)
            with jax.named_scope(ACTIVATION):
                hidden = self.activation(hidden)
            with jax.named_scope(LINEAR):
                return self.out(hidden)

        return split_single_row(both, sharding, x)
