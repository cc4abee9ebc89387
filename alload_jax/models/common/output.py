"""What a model's forward pass gives."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Auxiliary = dict[str, jax.Array]
"""Named values that layers hand out beside their output, such as a loss or a statistic."""


class Output(NamedTuple):
    """The prediction of a forward pass.

    Attributes:
      velocity: of the flow, float32.
      auxiliary: values of each sample, float32: [B, ...] on bucketed rows, [R, M, ...] on packed
        ones. The objective weighs them like the samples' losses, and they add up over
        micro-batches, ranks and shape groups. Names that end in `_loss` are minimised too.
    """

    velocity: jax.Array
    auxiliary: Auxiliary


def by_sample(stacked: Auxiliary, sample_axes: int) -> Auxiliary:
    """Puts the layer axis of what a scan over layers has stacked behind the samples' axes.

    Args:
      stacked: values [layers, B, ...] or [layers, R, M, ...].
      sample_axes: 1 for [B], 2 for [R, M].

    Returns:
      values [B, layers, ...] or [R, M, layers, ...].
    """
    return {name: jnp.moveaxis(value, 0, sample_axes) for name, value in stacked.items()}
