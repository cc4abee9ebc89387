"""The training step: gradients of micro-batches of any shape, then one update.

The gradient is that of the weighted mean loss over all samples of an optimizer step, however they
are grouped into micro-batches and ranks: micro-batches add up weighted sums of loss and gradient,
and the update divides by the sum of weights. Noise belongs to the sample, not to its place.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from alload_jax.data.batch import Batch
from alload_jax.diffusion.flow import TIMESTEP_SCALE, interpolate, squared_error, velocity
from alload_jax.diffusion.timesteps import TimestepConfig, sample_sigma
from alload_jax.errors import InputError
from alload_jax.models.config import DiTConfig
from alload_jax.sharding.mesh import batch_sharding, replicated
from alload_jax.sharding.rules import tree_shardings
from alload_jax.training.optimizer import OptimizerConfig, update_ema
from alload_jax.training.state import TrainState, model_graph


@dataclass(frozen=True)
class DiffusionConfig:
    """How samples are noised.

    Attributes:
      timesteps: distribution of noise levels.
      condition_dropout: share of samples trained without their condition, for guidance: without
        class, or with a text of zeros.
    """

    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    condition_dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.condition_dropout <= 1:
            raise InputError(
                f"diffusion.condition_dropout is {self.condition_dropout}; it must be from 0 to 1"
            )


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


Accumulate = Callable[[Any, Sums, Batch, jax.Array, jax.Array], Sums]
Update = Callable[[TrainState, Sums], tuple[TrainState, Sums, dict[str, jax.Array]]]


def noised(
    batch: Batch, key: jax.Array, config: DiffusionConfig, model: DiTConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Noises a micro-batch: each sample by a key of its own.

    Args:
      batch: a micro-batch.
      key: the epoch's key.

    Returns:
      latents [B, ...], target velocity [B, ...], sigma [B], condition like the batch's.
    """
    seq_len = math.prod(batch.latents.shape[1:4]) // math.prod(model.patch_size)

    def draw(sample: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        noise_key, sigma_key, drop_key = jax.random.split(jax.random.fold_in(key, sample), 3)
        return (
            jax.random.normal(noise_key, batch.latents.shape[1:]),
            sample_sigma(sigma_key, config.timesteps, seq_len),
            jax.random.bernoulli(drop_key, config.condition_dropout),
        )

    noise, sigma, dropped = jax.vmap(draw)(batch.sample)
    null = 0 if model.text else model.num_classes
    dropped = dropped.reshape(-1, *(1,) * (batch.condition.ndim - 1))
    condition = jnp.where(dropped, jnp.asarray(null, batch.condition.dtype), batch.condition)
    latents = interpolate(batch.latents, noise, sigma)
    return latents, velocity(batch.latents, noise), sigma, condition


def make_accumulate(model: DiTConfig, diffusion: DiffusionConfig, mesh: Mesh) -> Accumulate:
    """A jitted (params, sums, batch, key, epoch) → sums; compiled once per shape of micro-batch.

    `sums` is donated.
    """
    graph = model_graph(model)

    def weighted_loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        latents, target, sigma, condition = noised(batch, key, diffusion, model)
        transformer = nnx.merge(graph, params)
        predicted = transformer(
            latents, sigma * TIMESTEP_SCALE, condition, sharding=batch_sharding(mesh)
        )
        return jnp.sum(batch.weight * squared_error(predicted, target))

    @partial(jax.jit, donate_argnums=1)
    def accumulate(params: Any, sums: Sums, batch: Batch, key: jax.Array, epoch: jax.Array) -> Sums:
        epoch_key = jax.random.fold_in(jax.random.wrap_key_data(key), epoch)
        loss, grads = jax.value_and_grad(weighted_loss)(params, batch, epoch_key)
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

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(state: TrainState, sums: Sums) -> tuple[TrainState, Sums, dict[str, jax.Array]]:
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
        after = jax.lax.with_sharding_constraint(after, tree_shardings(after, mesh))
        zeroed = jax.lax.with_sharding_constraint(
            jax.tree.map(jnp.zeros_like, sums), sums_shardings(params, mesh)
        )
        return after, zeroed, metrics

    return update


def zero_sums(params: Any, mesh: Mesh) -> Sums:
    """Sums of nothing, sharded as the parameters."""

    def make() -> Sums:
        zero = jnp.zeros(())
        return Sums(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params), zero, zero)

    return jax.jit(make, out_shardings=sums_shardings(params, mesh))()


def sums_shardings(params: Any, mesh: Mesh) -> Sums:
    """Gradients lie as their parameters; the scalars everywhere."""
    return Sums(tree_shardings(params, mesh), replicated(mesh), replicated(mesh))
