"""The output of a model's forward pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Auxiliary = dict[str, jax.Array]
"""Named values that layers return beside their output, such as a loss or a statistic."""


class Output(NamedTuple):
    """The prediction of a forward pass.

    Attributes:
      velocity: velocity of the flow, float32, shaped like the input.
      auxiliary: values per sample, float32: [B, ...] for bucketed rows, [R, M, ...] for packed
        rows. The objective weights them like the sample losses and sums them over micro-batches,
        ranks and shape groups. Values whose names end in `_loss` are also minimised.
    """

    velocity: jax.Array
    auxiliary: Auxiliary


def by_sample(stacked: Auxiliary, sample_axes: int) -> Auxiliary:
    """Moves the layer axis, which a scan over layers stacks first, behind the sample axes.

    Args:
      stacked: values [layers, B, ...] or [layers, R, M, ...].
      sample_axes: number of sample axes: 1 for [B], 2 for [R, M].

    Returns:
      values [B, layers, ...] or [R, M, layers, ...].
    """
    return {name: jnp.moveaxis(value, 0, sample_axes) for name, value in stacked.items()}
