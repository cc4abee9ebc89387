"""Runs a stack of equal layers: as one loop, or each by itself."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.remat import RematPolicy, rematerialise


def apply_layers(
    apply_layer: Callable[[Any, Any], tuple[Any, Auxiliary]],
    x: Any,
    layers: Any,
    *,
    remat: RematPolicy,
    scan: bool,
) -> tuple[Any, Auxiliary]:
    """Applies layer after layer.

    A loop compiles one layer for all, and copies what the backward pass keeps into arrays of all
    layers. Without one nothing is copied, and the program is as long as the layers are many.

    Args:
      apply_layer: (x, parameters of a layer) → (x, auxiliary values).
      x: input of the first layer.
      layers: parameters, stacked over layers.
      remat: what each layer keeps for the backward pass.
      scan: whether to run them as a loop.

    Returns:
      The output of the last layer; auxiliary values, stacked over layers.
    """
    if scan:
        return jax.lax.scan(rematerialise(apply_layer, remat, in_loop=True), x, layers)
    apply_one = rematerialise(apply_layer, remat, in_loop=False)
    auxiliary = []
    for layer in _each(layers):
        x, values = apply_one(x, layer)
        auxiliary.append(values)
    return x, jax.tree.map(lambda *values: jnp.stack(values), *auxiliary)


def _each(layers: Any) -> Iterator[Any]:
    """The parameters of one layer after another.

    By `jax.lax.split`, whose gradient puts those of the layers together once; that of indexing adds
    up an array of all layers for each.
    """
    leaves, tree = jax.tree.flatten(layers)
    parts = [jax.lax.split(leaf, [1] * len(leaf), axis=0) for leaf in leaves]
    for layer in zip(*parts, strict=True):
        yield jax.tree.unflatten(tree, [jnp.squeeze(part, axis=0) for part in layer])
