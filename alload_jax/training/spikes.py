"""Skips updates whose gradient is far larger than those before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_DECAY = 0.99
"""Decay of the running mean of gradient norms, about 100 steps."""
_FIRST = 20
"""Number of steps before the first that can be skipped."""


class SpikeState(NamedTuple):
    """State of `skip_spikes`.

    Attributes:
      mean: running mean of the gradient norms, each counted up to the bound; not corrected for its
        start at 0.
      steps: number of steps.
      skipped: number of steps that were skipped.
      inner: state of the optimizer.
    """

    mean: jax.Array
    steps: jax.Array
    skipped: jax.Array
    inner: Any


def skip_spikes(
    optimizer: optax.GradientTransformation, times: float
) -> optax.GradientTransformation:
    """Wraps an optimizer so that it skips updates of large gradients.

    Updates are zero, and the optimizer's state is unchanged, where the gradient's global norm is
    more than `times` its running mean. A skipped norm counts in the mean with the bound's value, so
    that the bound follows gradients that stay large.
    """

    def init(params: Any) -> SpikeState:
        zero = jnp.zeros((), jnp.int32)
        return SpikeState(jnp.zeros((), jnp.float32), zero, zero, optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SpikeState]:
        norm = optax.tree.norm(updates).astype(jnp.float32)
        mean = state.mean / (1 - _DECAY ** jnp.maximum(state.steps, 1).astype(jnp.float32))
        bound = jnp.where(state.steps < _FIRST, jnp.inf, times * mean)
        skip = norm > bound
        found, inner = optimizer.update(updates, state.inner, params)
        found = jax.tree.map(lambda value: jnp.where(skip, jnp.zeros_like(value), value), found)
        inner = jax.tree.map(lambda new, old: jnp.where(skip, old, new), inner, state.inner)
        counted = jnp.minimum(norm, bound)
        after = SpikeState(
            _DECAY * state.mean + (1 - _DECAY) * counted,
            state.steps + 1,
            state.skipped + skip,
            inner,
        )
        return found, after

    return optax.GradientTransformation(init, update)


def skipped_updates(opt_state: Any) -> jax.Array | None:
    """Returns the number of updates that were skipped; None if none can be."""
    return opt_state.skipped if isinstance(opt_state, SpikeState) else None
