"""The size of a training state, for memory models."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from alload_jax.planning.analytic import ALL_TRAINED, STATE_BYTES, Trained
from alload_jax.sharding.rules import path_name
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import ParametersConfig, split_parameters

_WEIGHT_BYTES = 4


def trained_of(
    params: Any,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    *,
    accumulates: bool = True,
    narrow: Mapping[str, Any] | None = None,
) -> Trained:
    """Counts the trained parameters and the bytes of each, for memory models.

    Args:
      params: nested dict of a model's parameters or of their shapes.
      parameters: which of them are trained.
      optimizer: the optimizer, whose state is counted without being made.
      accumulates: as in `Trained`.
      narrow: dtypes of gradients, by names of parameters, that are not the optimizer's
        `accumulate_dtype`.
    """
    trained, _ = split_parameters(params, parameters)
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), trained)
    state = jax.eval_shape(make_optimizer(optimizer, 1).init, shapes)
    moments = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim
    )
    average = 0 if optimizer.ema_decay is None else _WEIGHT_BYTES
    gradients = sum(
        leaf.size
        * jnp.dtype((narrow or {}).get(path_name(path), optimizer.accumulate_dtype)).itemsize
        for path, leaf in jax.tree_util.tree_flatten_with_path(trained)[0]
    )
    each = _WEIGHT_BYTES + average + (gradients + moments) / count
    if parameters.identity():
        return Trained(count, parameters.stored_dtype, each, accumulates)
    if each == STATE_BYTES and accumulates:
        return ALL_TRAINED
    return Trained(bytes_each=each, accumulates=accumulates)
