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
from alload_jax.models.wan.config import WanConfig
from alload_jax.objectives.flow_matching import DiffusionConfig, weighted_loss
from alload_jax.sharding.mesh import batch_sharding, replicated
from alload_jax.sharding.rules import zero_shardings
from alload_jax.training.optimizer import OptimizerConfig, update_ema
from alload_jax.training.state import TrainState, model_graph, state_shardings


class GradientAccumulator(NamedTuple):
    """What micro-batches add up.

    Attributes:
      grads: like the parameters, of the weighted sum of losses.
      loss: the weighted sum of losses.
      weight: the sum of weights.
    """

    grads: Any
    loss: Any
    weight: Any


Accumulate = Callable[
    [Any, GradientAccumulator, AnyBatch, jax.Array, jax.Array], GradientAccumulator
]
Metrics = dict[str, jax.Array]
Update = Callable[
    [TrainState, GradientAccumulator], tuple[TrainState, GradientAccumulator, Metrics]
]


def make_accumulate(model: WanConfig, diffusion: DiffusionConfig, mesh: Mesh) -> Accumulate:
    """A jitted (params, sums, batch, key, epoch) → sums; compiled once per shape of micro-batch.

    `sums` is donated.
    """
    graph = model_graph(model)

    def loss_of(params: Any, batch: AnyBatch, key: jax.Array) -> jax.Array:
        return weighted_loss(nnx.merge(graph, params), batch, key, diffusion, batch_sharding(mesh))

    @partial(jax.jit, donate_argnums=1)
    def accumulate(
        params: Any, sums: GradientAccumulator, batch: AnyBatch, key: jax.Array, epoch: jax.Array
    ) -> GradientAccumulator:
        epoch_key = jax.random.fold_in(jax.random.wrap_key_data(key), epoch)
        loss, grads = jax.value_and_grad(loss_of)(params, batch, epoch_key)
        added = GradientAccumulator(grads, loss, jnp.sum(batch.weight))
        return jax.lax.with_sharding_constraint(
            jax.tree.map(jnp.add, sums, added), accumulator_shardings(params, mesh)
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
    def update(
        state: TrainState, sums: GradientAccumulator
    ) -> tuple[TrainState, GradientAccumulator, Metrics]:
        after, metrics = advance(state, sums)
        zeroed = jax.lax.with_sharding_constraint(
            jax.tree.map(jnp.zeros_like, sums), accumulator_shardings(state.params, mesh)
        )
        return after, zeroed, metrics

    return update


def make_advance(
    optimizer: optax.GradientTransformation, config: OptimizerConfig, mesh: Mesh
) -> Callable[[TrainState, GradientAccumulator], tuple[TrainState, Metrics]]:
    """A (state, sums) → (next state, metrics), to be part of a jitted update."""

    def advance(state: TrainState, sums: GradientAccumulator) -> tuple[TrainState, Metrics]:
        mean = 1 / jnp.maximum(sums.weight, 1e-20)
        grads = jax.tree.map(lambda g: g * mean, sums.grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = update_ema(state.ema, params, state.step, config.ema_decay)
        # A step whose every row is padding leaves all but the step's number as it was.
        params, ema, opt_state = jax.tree.map(
            lambda new, old: jnp.where(sums.weight > 0, new, old),
            (params, ema, opt_state),
            (state.params, state.ema, state.opt_state),
        )
        after = TrainState(state.step + 1, state.key, params, ema, opt_state)
        metrics = {"loss": sums.loss * mean, "grad_norm": optax.tree.norm(grads)}
        return jax.lax.with_sharding_constraint(after, state_shardings(after, mesh)), metrics

    return advance


def zero_accumulator(params: Any, mesh: Mesh) -> GradientAccumulator:
    """GradientAccumulator of nothing."""

    def make() -> GradientAccumulator:
        zero = jnp.zeros(())
        return GradientAccumulator(
            jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params), zero, zero
        )

    return jax.jit(make, out_shardings=accumulator_shardings(params, mesh))()


def accumulator_shardings(params: Any, mesh: Mesh) -> GradientAccumulator:
    """Gradients lie as the optimizer's state; the scalars everywhere."""
    return GradientAccumulator(zero_shardings(params, mesh), replicated(mesh), replicated(mesh))
