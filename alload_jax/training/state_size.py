"""The size of a training state, for memory models."""

import math
from typing import Any

import jax

from alload_jax.planning.analytic import ALL_TRAINED, STATE_BYTES, Trained
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import ParametersConfig, split_parameters

_WEIGHT_BYTES = 4
_SUM_BYTES = {"float32": 4, "bfloat16": 2}


def trained_of(
    params: Any,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    *,
    accumulates: bool = True,
) -> Trained:
    """Counts the trained parameters and the bytes of each, for memory models.

    Args:
      params: nested dict of a model's parameters or of their shapes.
      parameters: which of them are trained.
      optimizer: the optimizer, whose state is counted without being made.
      accumulates: as in `Trained`.
    """
    trained, _ = split_parameters(params, parameters)
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), trained)
    state = jax.eval_shape(make_optimizer(optimizer, 1).init, shapes)
    moments = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim
    )
    average = 0 if optimizer.ema_decay is None else _WEIGHT_BYTES
    sums = _SUM_BYTES[optimizer.accumulate_dtype]
    each = _WEIGHT_BYTES + average + sums + moments / count
    if parameters.identity():
        return Trained(count, parameters.stored_dtype, each, accumulates)
    if each == STATE_BYTES and accumulates:
        return ALL_TRAINED
    return Trained(bytes_each=each, accumulates=accumulates)
