"""The feed-forward layer of transformer blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from alload_jax.models.common.linear import Linear
from alload_jax.models.common.parts import ACTIVATION, FEED_FORWARD, LINEAR
from alload_jax.models.common.remat import (
    FEED_FORWARD_OUTPUT,
    LINEAR_OUTPUT,
    NORM_OUTPUT,
)
from alload_jax.models.common.single_row import split_single_row
from alload_jax.sharding.mesh import with_tensor_axis
from pallas_kernels import bias_gelu, bias_gelu_then


class FeedForward(nnx.Module):
    """Linear, activation, linear."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[jax.Array], jax.Array] | None = None,
        implementation: str = "auto",
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Draws the weights.

        Args:
          dim: width of the inputs and outputs.
          hidden: width between the linear layers.
          activation: a function of elements; None for GELU in its tanh form.
          implementation: the config's `norm`. Others than XLA's are chosen among by "auto".
          dtype: in which the layers compute.
          rngs: draws the weights.
        """
        self.activation = activation
        self.implementation = "xla" if implementation == "xla" else "auto"
        self.hidden = Linear(dim, hidden, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, dim, dtype=dtype, rngs=rngs)

    @jax.named_scope(FEED_FORWARD)
    def __call__(
        self,
        x: jax.Array,
        sharding: NamedSharding | None = None,
        *,
        output_kept: bool = True,
    ) -> jax.Array:
        """[B, S, D] → [B, S, D].

        Args:
          x: inputs.
          sharding: of x's rows over a mesh of Auto axes, which kernels need.
          output_kept: whether the backward pass has the output, and need not apply the layer again.
        """
        if self.activation is not None:
            both = self._plain
        else:
            both = partial(self._with_gelu, sharding=sharding, again=output_kept)

        def named(x: jax.Array) -> jax.Array:
            return checkpoint_name(both(x), FEED_FORWARD_OUTPUT)

        return split_single_row(named, sharding, x)

    def _plain(self, x: jax.Array) -> jax.Array:
        """With an activation of elements."""
        assert self.activation is not None
        with jax.named_scope(LINEAR):
            hidden = checkpoint_name(self.hidden(x), LINEAR_OUTPUT)
        with jax.named_scope(ACTIVATION):
            hidden = checkpoint_name(self.activation(hidden), NORM_OUTPUT)
        with jax.named_scope(LINEAR):
            return self.out(hidden)

    def _with_gelu(self, x: jax.Array, *, sharding: NamedSharding | None, again: bool) -> jax.Array:
        """With GELU; `again` if the backward pass computes it in the kernel of its gradient."""
        with jax.named_scope(LINEAR):
            product = checkpoint_name(self.hidden.product(x), LINEAR_OUTPUT)
        options: dict[str, Any] = {
            "implementation": self.implementation,
            "sharding": with_tensor_axis(sharding),
        }
        bias = self.hidden.bias_of(product)
        if not again:
            with jax.named_scope(ACTIVATION):
                hidden = bias_gelu(product, bias, **options)
            with jax.named_scope(LINEAR):
                return self.out(hidden)
        graph, weights = nnx.split(self.out)

        def out(hidden: jax.Array, weights: nnx.State) -> jax.Array:
            with jax.named_scope(LINEAR):
                return nnx.merge(graph, weights)(hidden)

        with jax.named_scope(ACTIVATION):
            return bias_gelu_then(product, bias, out, weights, **options)
