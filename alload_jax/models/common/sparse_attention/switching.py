"""The state by which each layer switches between dense and sparse attention, and its update."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig

PROFILED, SPARSITY, RECALL = "attention_profiled", "attention_sparsity", "attention_recall"
"""Names of auxiliary values: 1 where a sample was measured, and what was found; else 0."""
PREDICTOR_LOSS = "attention_predictor_loss"
"""Likewise; the name's end has the objective minimise it."""
SPARSE_LAYERS, DENSITY = "attention_sparse_layers", "attention_density"
"""Names of logged values: share of the layers that are sparse, and of the blocks attended to."""


class SwitchState(nnx.Variable):
    """A value of a layer's state; not trained, updated after each step."""


class Switch(nnx.Module):
    """The state of a layer.

    Attributes:
      layer: int32, number of the layer.
      step: int32, optimizer steps done.
      measured: int32, measurements that the averages hold.
      sparsity: [num_heads], moving average of measurements.
      recall: [num_heads], likewise, of the selector.
      loss: likewise, of the predictor; 0 for other selectors.
      sparse: bool, whether attention is sparse.
      density: [num_heads], share of the blocks of keys that lists hold while it is.
    """

    def __init__(self, config: SparseAttentionConfig, num_heads: int):
        self.layer = SwitchState(jnp.zeros((), jnp.int32))
        self.step = SwitchState(jnp.zeros((), jnp.int32))
        self.measured = SwitchState(jnp.zeros((), jnp.int32))
        self.sparsity = SwitchState(jnp.zeros(num_heads))
        self.recall = SwitchState(jnp.zeros(num_heads))
        self.loss = SwitchState(jnp.zeros(()))
        self.sparse = SwitchState(jnp.zeros((), bool))
        self.density = SwitchState(jnp.full(num_heads, config.max_density))


def number_layers(switch: Switch, config: SparseAttentionConfig, layers: int) -> None:
    """Gives stacked layers their numbers, and their forced densities."""
    config.check_layers(layers)
    switch.layer[...] = jnp.arange(layers, dtype=jnp.int32)
    given = forced_state(config, {"density": switch.density[...]})
    switch.density[...] = given["density"]
    switch.sparse[...] = given.get("sparse", switch.sparse[...])


def forced_state(config: SparseAttentionConfig, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the forced densities of the config, if it has any.

    A run may be continued with other densities than those of its checkpoint.

    Args:
      config: its `forced`.
      state: values of `Switch`, stacked over layers.
    """
    if config.forced is None:
        return state
    forced = jnp.asarray(config.forced)
    density = jnp.broadcast_to(forced[:, None], state["density"].shape)
    return state | {"sparse": forced < 1, "density": density}


def update_switches(
    config: SparseAttentionConfig, state: dict[str, Any], auxiliary: Auxiliary
) -> dict[str, Any]:
    """The state of all layers after an optimizer step.

    Args:
      config: thresholds and rates.
      state: values of `Switch`, stacked over layers.
      auxiliary: means over the samples of the step, [layers, ...].
    """
    state = state | {"step": state["step"] + 1}
    state |= _averaged(config, state, auxiliary)
    if config.forced is not None:
        return state
    sparsity, recall = (state[name].mean(axis=-1) for name in ("sparsity", "recall"))
    slack = jnp.where(state["sparse"], config.hysteresis, 0.0)
    enough = (sparsity >= config.min_sparsity - slack) & (recall >= config.min_recall - slack)
    sparse = enough & (state["measured"] > 0) & (state["step"] >= config.dense_steps)
    fall = (config.max_density - config.min_density) / max(1, config.anneal_steps)
    wanted = jnp.clip(1 - state["sparsity"], config.min_density, config.max_density)
    annealed = jnp.maximum(wanted, state["density"] - fall)
    density = jnp.where(sparse[:, None], annealed, config.max_density)
    return state | {"sparse": sparse, "density": density}


def switch_metrics(
    config: SparseAttentionConfig, state: dict[str, Any], auxiliary: Auxiliary
) -> dict[str, jax.Array]:
    """Scalars to log: averages over layers and heads of what is measured.

    Args:
      config: which says what is.
      state: values of `Switch` after the step, stacked over layers.
      auxiliary: means over the samples of the step, [layers, ...]; others are logged as they are.
    """
    own = (PROFILED, SPARSITY, RECALL, PREDICTOR_LOSS)
    metrics = {name: jnp.mean(value) for name, value in auxiliary.items() if name not in own}
    records = switch_records(config, state)
    if config.measures:
        metrics |= {SPARSITY: records["sparsity"].mean(), RECALL: records["recall"].mean()}
    if config.selector == "predictor":
        metrics[PREDICTOR_LOSS] = state["loss"].mean()
    sparse_layers = records["sparse"].mean(dtype=jnp.float32)
    return metrics | {SPARSE_LAYERS: sparse_layers, DENSITY: records["density"].mean()}


def switch_records(config: SparseAttentionConfig, state: dict[str, Any]) -> dict[str, jax.Array]:
    """What runs record of each layer: sparsity, recall and density by head, and whether sparse.

    Args:
      config: its selector.
      state: values of `Switch`, stacked over layers.
    """
    density = 1.0 if config.selector == "all" else state["density"]
    density = jnp.where(state["sparse"][:, None], density, jnp.ones_like(state["density"]))
    measured = {name: state[name] for name in ("sparsity", "recall", "sparse")}
    return measured | {"density": density}


def _averaged(
    config: SparseAttentionConfig, state: dict[str, Any], auxiliary: Auxiliary
) -> dict[str, Any]:
    """Measurements of this step in the moving averages, if there are any."""
    share = auxiliary[PROFILED]
    some = share > 0
    # An average of few measurements weighs them alike.
    rate = jnp.maximum(1 - config.decay, 1 / (1 + state["measured"]))
    averaged: dict[str, Any] = {"measured": state["measured"] + some}
    for name, key in (("sparsity", SPARSITY), ("recall", RECALL), ("loss", PREDICTOR_LOSS)):
        if key not in auxiliary:
            continue
        old, found = state[name], auxiliary[key]
        per_layer = (-1, *(1,) * (found.ndim - 1))
        moved = found / jnp.where(some, share, 1.0).reshape(per_layer)
        moved = old + rate.reshape(per_layer) * (moved - old)
        averaged[name] = jnp.where(some.reshape(per_layer), moved, old)
    return {name: new.astype(state[name].dtype) for name, new in averaged.items()}
