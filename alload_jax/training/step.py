"""The training step: gradients of micro-batches of any shape, then one update.

The gradient is that of the weighted mean loss over all samples of an optimizer step, however they
are grouped into micro-batches and ranks: micro-batches add up weighted sums of loss and gradient,
and the update divides by the sum of weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from alload_jax.data.batch import AnyBatch
from alload_jax.models.config import DiTConfig
from alload_jax.sharding.mesh import batch_sharding, replicated
from alload_jax.sharding.rules import zero_shardings
from alload_jax.training.objective import DiffusionConfig, weighted_loss
from alload_jax.training.optimizer import OptimizerConfig, update_ema
from alload_jax.training.state import TrainState, model_graph, state_shardings


class Sums(NamedTuple):
    """What micro-batches add up.

    Attributes:
      grads: like the parameters, of the weighted sum of losses.
      loss: the weighted sum of losses.
      weight: the sum of weights.
    """

    grads: Any
    loss: Any
    weight: Any


Accumulate = Callable[[Any, Sums, AnyBatch, jax.Array, jax.Array], Sums]
Metrics = dict[str, jax.Array]
Update = Callable[[TrainState, Sums], tuple[TrainState, Sums, Metrics]]


def make_accumulate(model: DiTConfig, diffusion: DiffusionConfig, mesh: Mesh) -> Accumulate:
    """A jitted (params, sums, batch, key, epoch) → sums; compiled once per shape of micro-batch.

    `sums` is donated.
    """
    graph = model_graph(model)

    def loss_of(params: Any, batch: AnyBatch, key: jax.Array) -> jax.Array:
        return weighted_loss(nnx.merge(graph, params), batch, key, diffusion, batch_sharding(mesh))

    @partial(jax.jit, donate_argnums=1)
    def accumulate(
        params: Any, sums: Sums, batch: AnyBatch, key: jax.Array, epoch: jax.Array
    ) -> Sums:
        epoch_key = jax.random.fold_in(jax.random.wrap_key_data(key), epoch)
        loss, grads = jax.value_and_grad(loss_of)(params, batch, epoch_key)
        added = Sums(grads, loss, jnp.sum(batch.weight))
        return jax.lax.with_sharding_constraint(
            jax.tree.map(jnp.add, sums, added), sums_shardings(params, mesh)
        )

    return accumulate


def make_update(
    optimizer: optax.GradientTransformation, config: OptimizerConfig, mesh: Mesh
) -> Update:
    """A jitted (state, sums) → (next state, zeroed sums, metrics). Both arguments are donated.

    Metrics: `loss`, `grad_norm` (before clipping).
    """
    advance = make_advance(optimizer, config, mesh)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(state: TrainState, sums: Sums) -> tuple[TrainState, Sums, Metrics]:
        after, metrics = advance(state, sums)
        zeroed = jax.lax.with_sharding_constraint(
            jax.tree.map(jnp.zeros_like, sums), sums_shardings(state.params, mesh)
        )
        return after, zeroed, metrics

    return update


def make_advance(
    optimizer: optax.GradientTransformation, config: OptimizerConfig, mesh: Mesh
) -> Callable[[TrainState, Sums], tuple[TrainState, Metrics]]:
    """A (state, sums) → (next state, metrics), to be part of a jitted update."""

    def advance(state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        mean = 1 / jnp.maximum(sums.weight, 1e-20)
        grads = jax.tree.map(lambda g: g * mean, sums.grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = update_ema(state.ema, params, state.step, config.ema_decay)
        # A step whose every row is filler leaves all but the step's number as it was.
        params, ema, opt_state = jax.tree.map(
            lambda new, old: jnp.where(sums.weight > 0, new, old),
            (params, ema, opt_state),
            (state.params, state.ema, state.opt_state),
        )
        after = TrainState(state.step + 1, state.key, params, ema, opt_state)
        metrics = {"loss": sums.loss * mean, "grad_norm": optax.tree.norm(grads)}
        return jax.lax.with_sharding_constraint(after, state_shardings(after, mesh)), metrics

    return advance


def zero_sums(params: Any, mesh: Mesh) -> Sums:
    """Sums of nothing."""

    def make() -> Sums:
        zero = jnp.zeros(())
        return Sums(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params), zero, zero)

    return jax.jit(make, out_shardings=sums_shardings(params, mesh))()


def sums_shardings(params: Any, mesh: Mesh) -> Sums:
    """Gradients lie as the optimizer's state; the scalars everywhere."""
    return Sums(zero_shardings(params, mesh), replicated(mesh), replicated(mesh))
