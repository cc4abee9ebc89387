"""Config of sparse self-attention, and which layers have switched to it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import jax.numpy as jnp
from flax import nnx

from alload_jax.errors import InputError, require_fields
from alload_jax.models.common.parts import Auxiliary

SelectorName = Literal["predictor", "pooled", "random", "all"]

_MOST_BRANCHES = 3
"""Most lengths of lists of a layer with forced densities."""
_NO_SAMPLE = 2**31
"""More tokens than a sample can have."""


@dataclass(frozen=True)
class SparseAttentionConfig:
    """Dynamic sparse self-attention in two stages (DSV, arXiv 2502.07590); dense by default.

    Every layer begins with dense attention. It switches to sparse attention when its measured
    sparsity and the recall of its selector reach their thresholds, and back when one of them falls
    `hysteresis` below.

    Attributes:
      selector: what chooses the blocks of keys: `predictor` (low-rank projections that are trained
        beside the model), `pooled` (mean queries and keys), `random` and `all` (controls).
      block: tokens of a block, 64 or 128.
      rank: rank of a head's projections in the predictor; even.
      min_tokens: samples of fewer tokens have dense attention always.
      coverage: share of the attention that critical blocks hold.
      profile_every: steps between measurements, which also train the predictor.
      sparse_profile_every: likewise, of layers that are sparse.
      profile_blocks: blocks of queries that a measurement samples.
      decay: decay of the moving average of measurements.
      dense_steps: steps before which no layer switches.
      min_sparsity: sparsity from which a layer switches; mean over its heads.
      min_recall: recall from which a layer switches; mean over its heads.
      hysteresis: how far a value may fall below its threshold before the layer switches back.
      max_density: density of a layer that has just switched, and the most that lists hold.
      min_density: least density of a head.
      anneal_steps: steps in which the density falls from `max_density` to `min_density`.
      capacities: densities below `max_density` for which shorter lists are compiled; others are
        ignored. A layer uses the shortest lists that hold its densest head: they are made faster.
      balance_heads: whether the ranks of a context group get heads of about the same total density
        for split samples, in place of consecutive heads.
      head_exchange: how many ranks of a context group exchange heads of split samples: the `most`
        that divide them, or the number that is predicted to be `fastest`, fewer where the densest
        heads would make ranks wait. That compiles both, which takes twice as long and more memory.
      forced: densities of the layers, 1 for dense, in place of the measured ones; null to switch by
        measurement.
    """

    selector: SelectorName = "pooled"
    block: int = 64
    rank: int = 16
    min_tokens: int = 16_384
    coverage: float = 0.9
    profile_every: int = 10
    sparse_profile_every: int = 50
    profile_blocks: int = 8
    decay: float = 0.9
    dense_steps: int = 1000
    min_sparsity: float = 0.8
    min_recall: float = 0.9
    hysteresis: float = 0.05
    max_density: float = 0.3
    min_density: float = 0.02
    anneal_steps: int = 500
    capacities: tuple[float, ...] = (0.1,)
    balance_heads: bool = True
    head_exchange: Literal["most", "fastest"] = "most"
    forced: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        known, most, share = get_args(SelectorName), self.max_density, "above 0 and at most 1"
        if self.selector not in known:
            names = ", ".join(known)
            raise InputError(
                f"model.sparse_attention.selector is {self.selector}; choose one of {names}"
            )
        require = partial(require_fields, "model.sparse_attention.", self)
        counts = "rank profile_every sparse_profile_every profile_blocks"
        require("block", lambda value: value in (64, 128), "64 or 128")
        require(counts, lambda value: value >= 1, "at least 1")
        require("rank", lambda value: value % 2 == 0, "even")
        require("min_tokens dense_steps anneal_steps", lambda value: value >= 0, "0 or more")
        require("coverage max_density min_density", lambda value: 0 < value <= 1, share)
        shares = "decay min_sparsity min_recall hysteresis"
        require(shares, lambda value: 0 <= value <= 1, "from 0 to 1")
        require("min_density", lambda value: value <= most, f"at most max_density, {most}")
        exchanges = ("most", "fastest") if self.balance_heads else ("most",)
        bound = "most, or fastest with balance_heads"
        require("head_exchange", lambda value: value in exchanges, bound)
        if self.forced is None:
            bound = (
                f"at least 1 - max_density, {1 - most:g}: a layer that is less sparse needs "
                "longer lists"
            )
            require("min_sparsity", lambda value: value >= 1 - most - 1e-9, bound)
        for name in ("capacities", "forced"):
            for density in getattr(self, name) or ():
                if not 0 < density <= 1:
                    raise InputError(
                        f"model.sparse_attention.{name} is {getattr(self, name)}; each must be "
                        f"{share}"
                    )

    def identity(self) -> dict[str, object]:
        """The fields that determine a checkpoint's arrays, as JSON values."""
        return {"selector": self.selector} | (
            {"rank": self.rank} if self.selector == "predictor" else {}
        )

    @property
    def measures(self) -> bool:
        """Whether the layers ever measure: forced ones only to train their predictors."""
        return self.forced is None or self.selector == "predictor"

    def as_dense(self) -> "SparseAttentionConfig":
        """A config for the same checkpoints, by which the attention of all samples is dense."""
        return replace(self, min_tokens=_NO_SAMPLE)

    def list_densities(self) -> tuple[float, ...]:
        """The densities for which lists are compiled, falling; a layer uses the lowest it can."""
        if self.selector == "all":
            return (1.0,)
        if self.forced is not None:
            sparse = {each for each in self.forced if each < 1} or {self.max_density}
            return tuple(sorted(sparse, reverse=True)[:_MOST_BRANCHES])
        lower = {each for each in self.capacities if each < self.max_density}
        return tuple(sorted({self.max_density, *lower}, reverse=True))


PROFILED, SPARSITY, RECALL = "attention_profiled", "attention_sparsity", "attention_recall"
"""Names of auxiliary values: 1 where a sample was measured, and what was found; else 0."""
PREDICTOR_LOSS = "attention_predictor_loss"
"""Likewise; the name's end has the objective minimise it."""
PREDICTOR_PATTERN = "sparse_attention/selector"
"""Matches the parameters of predictors in every family."""
PREDICTOR_NAME = f"blocks/{PREDICTOR_PATTERN}/query/kernel"
"""The name of one of them."""
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
    switch.layer[...] = jnp.arange(layers, dtype=jnp.int32)
    for name, value in forced_state(config, {"density": switch.density[...]}).items():
        getattr(switch, name)[...] = value


def forced_state(config: SparseAttentionConfig, state: Auxiliary) -> Auxiliary:
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
    config: SparseAttentionConfig, state: Auxiliary, auxiliary: Auxiliary
) -> Auxiliary:
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
    config: SparseAttentionConfig, state: Auxiliary, auxiliary: Auxiliary
) -> Auxiliary:
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


def switch_records(config: SparseAttentionConfig, state: Auxiliary) -> Auxiliary:
    """What runs record of each layer: sparsity, recall and density by head, and whether sparse.

    Args:
      config: its selector.
      state: values of `Switch`, stacked over layers.
    """
    density = 1.0 if config.selector == "all" else state["density"]
    density = jnp.where(state["sparse"][:, None], density, jnp.ones_like(state["density"]))
    measured = {name: state[name] for name in ("sparsity", "recall", "sparse")}
    return measured | {"density": density}


def _averaged(config: SparseAttentionConfig, state: Auxiliary, auxiliary: Auxiliary) -> Auxiliary:
    """Measurements of this step in the moving averages, if there are any."""
    share = auxiliary[PROFILED]
    some = share > 0
    # An average of few measurements weighs them alike.
    rate = jnp.maximum(1 - config.decay, 1 / (1 + state["measured"]))
    averaged: Auxiliary = {"measured": state["measured"] + some}
    for name, key in (("sparsity", SPARSITY), ("recall", RECALL), ("loss", PREDICTOR_LOSS)):
        if key not in auxiliary:
            continue
        old, found = state[name], auxiliary[key]
        per_layer = (-1, *(1,) * (found.ndim - 1))
        moved = found / jnp.where(some, share, 1.0).reshape(per_layer)
        moved = old + rate.reshape(per_layer) * (moved - old)
        averaged[name] = jnp.where(some.reshape(per_layer), moved, old)
    return {name: new.astype(state[name].dtype) for name, new in averaged.items()}
