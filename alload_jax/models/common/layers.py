"""Runs a stack of equal layers: as a loop, or each by itself."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from alload_jax.models.common.host_loop import Step, host_scan
from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.remat import FEED_FORWARD_OUTPUT, rematerialise
from alload_jax.models.common.stacked_kernels import with_cast_kernels
from alload_jax.planning.remat import OFFLOADED, RematPolicy

ApplyLayer = Callable[[RematPolicy, Any, Any], tuple[Any, Auxiliary]]
"""(policy, x, parameters of a layer) → (x, auxiliary values)."""


def apply_layers(
    blocks: nnx.Module,
    x: Any,
    context: Any,
    *,
    policies: Sequence[RematPolicy],
    scan: bool,
) -> tuple[Any, Auxiliary]:
    """Applies layer after layer.

    A loop compiles one layer for all, or one for each policy, and copies what the backward pass
    keeps into arrays of all layers. Without one nothing is copied, and the program is as long as
    the layers are many.

    Args:
      blocks: the layers, with parameters stacked over them; (x, context) → (x, auxiliary values).
      x: input of the first layer.
      context: inputs that all layers share, a named tuple; its field `remat` is set for each.
      policies: what layers keep for the backward pass; they repeat over the layers, and their
        number divides that of the layers.
      scan: whether to run them as a loop. Layers that keep something in the host's memory always
        are one.

    Returns:
      The output of the last layer; auxiliary values, stacked over layers.
    """
    offloaded = any(each in OFFLOADED for each in policies)
    as_loop = scan or offloaded
    graph, layers = nnx.split(blocks if as_loop else with_cast_kernels(blocks))

    def apply_layer(policy: RematPolicy, x: Any, layer: nnx.State) -> tuple[Any, Auxiliary]:
        return nnx.merge(graph, layer)(x, context._replace(remat=policy))

    if not as_loop:
        times = len(jax.tree.leaves(layers)[0]) // len(policies)
        return _in_turn(apply_layer, x, layers, [*policies] * times)
    if len(policies) == 1 and not offloaded:
        [policy] = policies
        step = rematerialise(partial(apply_layer, policy), policy, in_loop=True)
        return jax.lax.scan(step, x, layers)
    grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, len(policies), *leaf.shape[1:]), layers)
    steps = [_of_group(apply_layer, *each) for each in enumerate(policies)]
    # XLA would compute all layers of an iteration again before it needs the first.
    wrap = partial(rematerialise, in_loop=len(policies) == 1)
    if offloaded:
        on_host = [
            Step(step, partial(wrap, policy=policy), to_host=policy in OFFLOADED)
            for step, policy in zip(steps, policies, strict=True)
        ]
        x, auxiliary = host_scan(on_host, x, grouped, FEED_FORWARD_OUTPUT)
    else:
        wrapped = list(map(wrap, steps, policies))
        x, auxiliary = jax.lax.scan(partial(_apply_group, wrapped), x, grouped)
    return x, _interleaved(auxiliary)


def _of_group(apply_layer: ApplyLayer, number: int, policy: RematPolicy) -> Callable:
    """Applies one of the layers of an iteration of the loop.

    It takes its parameters from those of the group by itself. Given them, it would keep them for
    the backward pass, in a copy of all layers'.
    """

    def apply_one(x: Any, group: Any) -> tuple[Any, Auxiliary]:
        return apply_layer(policy, x, jax.tree.map(lambda leaf: leaf[number], group))

    return apply_one


def _apply_group(steps: Sequence[Callable], x: Any, group: Any) -> tuple[Any, tuple]:
    """Applies the layers of one iteration of the loop."""
    auxiliary = []
    for step in steps:
        x, values = step(x, group)
        auxiliary.append(values)
    return x, tuple(auxiliary)


def _interleaved(auxiliary: Sequence[Auxiliary]) -> Auxiliary:
    """Values of all layers, from those of each in its group, stacked over groups."""
    return jax.tree.map(
        lambda *values: jnp.stack(values, axis=1).reshape(-1, *values[0].shape[1:]), *auxiliary
    )


def _in_turn(
    apply_layer: ApplyLayer, x: Any, layers: Any, policies: Sequence[RematPolicy]
) -> tuple[Any, Auxiliary]:
    """Applies as many layers as there are policies, without a loop."""
    auxiliary = []
    for layer, policy in zip(_each(layers), policies, strict=True):
        step = rematerialise(partial(apply_layer, policy), policy, in_loop=False)
        x, values = step(x, layer)
        auxiliary.append(values)
    return x, _stacked(auxiliary)


def _each(layers: Any) -> Iterator[Any]:
    """The parameters of one layer after another.

    By `jax.lax.split`, whose gradient puts those of the layers together once; that of indexing adds
    up an array of all layers for each. Indexing kernels with slots, which have no such gradient,
    took XLA many times as long to compile and saved no memory.
    """
    leaves, tree = jax.tree.flatten(layers)
    parts = [jax.lax.split(leaf, [1] * len(leaf), axis=0) for leaf in leaves]
    for layer in zip(*parts, strict=True):
        yield jax.tree.unflatten(tree, [jnp.squeeze(part, axis=0) for part in layer])


def _stacked(auxiliary: Sequence[Auxiliary]) -> Auxiliary:
    return jax.tree.map(lambda *values: jnp.stack(values), *auxiliary)
