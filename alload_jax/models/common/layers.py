"""A stack of equal layers, run as a loop or each by itself, and what they keep for the gradient."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, PyTree

from alload_jax.models.common import parts
from alload_jax.models.common.config import TransformerConfig
from alload_jax.models.common.host_loop import Step, host_scan, is_on_host
from alload_jax.models.common.segments import Grid
from alload_jax.models.common.sparse_attention.config import number_layers
from alload_jax.models.common.stored import with_cast_kernels
from alload_jax.planning.remat import OFFLOADED, RematPolicy


class StackedTransformer(nnx.Module):
    """A transformer of equal blocks, whose parameters are stacked over layers.

    The sparse attention of its blocks is their module `sparse_attention`.
    """

    config: TransformerConfig

    def __call__(self, *inputs: PyTree, **named: PyTree) -> jax.Array:
        """Returns the velocity of `forward`."""
        return self.forward(*inputs, **named).velocity

    def forward(self, *inputs: PyTree, **named: PyTree) -> parts.Output:
        """See `Model.forward`."""
        raise NotImplementedError

    def draw_blocks(self, block: Callable[..., PyTree], rngs: nnx.Rngs) -> PyTree:
        """Draws the parameters of all blocks, each of which is `block(config, rngs=...)`."""
        config = self.config
        blocks = nnx.vmap(lambda keys: block(config, rngs=keys))(rngs.split(config.num_layers))
        if config.sparse_attention is not None:
            switch = blocks.sparse_attention.switch
            number_layers(switch, config.sparse_attention, config.num_layers)
        return blocks

    def grid_of(self, latents: Float[jax.Array, "rows frames height width channels"]) -> Grid:
        """The (t, h, w) of samples of one shape, in tokens."""
        frames, height, width = latents.shape[1:4]
        t, h, w = self.config.patch_size
        return frames // t, height // h, width // w

    def block_of_tiles(self, grid: Grid) -> int:
        """Tokens of a tile of samples of a (t, h, w); 0 where their attention is always dense."""
        sparse = self.config.sparse_attention
        return 0 if sparse is None or math.prod(grid) < sparse.min_tokens else sparse.block


@jax.named_scope(parts.BLOCKS)
def apply_layers(
    blocks: nnx.Module, x: PyTree, context: PyTree, config: TransformerConfig, sample_axes: int
) -> tuple[PyTree, parts.Auxiliary]:
    """Applies layer after layer.

    A loop compiles one layer for all, or one for each policy, and copies what the backward pass
    keeps into arrays of all layers. Without one nothing is copied, and the program is as long as
    the layers are many. Layers that keep something in the host's memory are always a loop.

    Args:
      blocks: the layers, with parameters stacked over them; (x, context) → (x, auxiliary values).
      x: input of the first layer.
      context: inputs that all layers share, a named tuple; its field `remat` is set for each.
      config: its `policies` say what layers keep for the backward pass and repeat over the layers,
        and its `scan_layers` whether to run them as a loop.
      sample_axes: of auxiliary values: 1 for [B], 2 for [R, M].

    Returns:
      The output of the last layer; auxiliary values by sample, see `by_sample`.
    """
    policies = config.policies
    offloaded = any(each in OFFLOADED for each in policies)
    offloaded = offloaded or any(map(is_on_host, jax.tree.leaves(nnx.state(blocks))))
    as_loop = config.scan_layers or offloaded
    graph, layers = nnx.split(blocks if as_loop else with_cast_kernels(blocks))

    def apply_layer(
        policy: RematPolicy, x: PyTree, layer: nnx.State
    ) -> tuple[PyTree, parts.Auxiliary]:
        return nnx.merge(graph, layer)(x, context._replace(remat=policy))

    if not as_loop:
        found = []
        # The gradient of `jax.lax.split` puts those of the layers together once; that of indexing
        # adds up an array of all layers for each. Indexing kernels with slots, which have no such
        # gradient, took XLA many times as long to compile and saved no memory.
        leaves, tree = jax.tree.flatten(layers)
        split = [jax.lax.split(leaf, [1] * len(leaf), axis=0) for leaf in leaves]
        for number, each in enumerate(zip(*split, strict=True)):
            layer = jax.tree.unflatten(tree, [jnp.squeeze(part, axis=0) for part in each])
            policy = policies[number % len(policies)]
            step = rematerialise(partial(apply_layer, policy), policy, in_loop=False)
            x, values = step(x, layer)
            found.append(values)
        return x, parts.by_sample(jax.tree.map(lambda *each: jnp.stack(each), *found), sample_axes)
    if len(policies) == 1:  # a part of a group would be kept beside the group itself
        grouped = layers
        steps: list[Callable] = [partial(apply_layer, *policies)]
    else:
        shape = (-1, len(policies))
        grouped = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), layers)

        def of_group(number: int, x: PyTree, group: PyTree) -> tuple[PyTree, parts.Auxiliary]:
            """A step takes its parameters from those of the group by itself.

            Given them, it would keep them for the backward pass, in a copy of all layers'.
            """
            layer = jax.tree.map(lambda leaf: leaf[number], group)
            return apply_layer(policies[number], x, layer)

        steps = [partial(of_group, number) for number in range(len(policies))]
    # XLA would compute all layers of an iteration again before it needs the first.
    wrap = partial(rematerialise, in_loop=len(policies) == 1)
    if offloaded:
        on_host = [
            Step(step, partial(wrap, policy=policy), to_host=policy in OFFLOADED)
            for step, policy in zip(steps, policies, strict=True)
        ]
        x, by_step = host_scan(on_host, x, grouped, parts.FEED_FORWARD_OUTPUT)
    else:
        wrapped = list(map(wrap, steps, policies))

        def apply_group(x: PyTree, group: PyTree) -> tuple[PyTree, tuple]:
            auxiliary = []
            for step in wrapped:
                x, values = step(x, group)
                auxiliary.append(values)
            return x, tuple(auxiliary)

        x, by_step = jax.lax.scan(apply_group, x, grouped)
    return x, parts.by_sample(
        jax.tree.map(
            lambda *values: jnp.stack(values, axis=1).reshape(-1, *values[0].shape[1:]), *by_step
        ),
        sample_axes,
    )


# ---------------------------------------------------------------- what a layer keeps

_LONG_ATTENTION = (parts.ATTENTION_OUTPUT, parts.BLOCK_LISTS)
_ATTENTION = (*_LONG_ATTENTION, parts.SHORT_ATTENTION_OUTPUT)
_KEPT: dict[RematPolicy, tuple[str, ...]] = {
    "full": (parts.BLOCK_LISTS,),
    "offload": (parts.BLOCK_LISTS,),
    "offload_attention": _LONG_ATTENTION,
    "offload_feed_forward_and_attention": (*_LONG_ATTENTION, parts.FEED_FORWARD_OUTPUT),
    "attention": _ATTENTION,
    "feed_forward_and_attention": (*_ATTENTION, parts.FEED_FORWARD_OUTPUT),
    "matmuls_and_attention": (*_ATTENTION, parts.LINEAR_OUTPUT, parts.FEED_FORWARD_OUTPUT),
    "norms_matmuls_and_attention": (
        *_ATTENTION,
        parts.LINEAR_OUTPUT,
        parts.FEED_FORWARD_OUTPUT,
        parts.NORM_OUTPUT,
    ),
}
"""Names of the activations that a rematerialisation policy keeps."""


def rematerialise(function: Callable, policy: RematPolicy, *, in_loop: bool) -> Callable:
    """Wraps a function in `jax.checkpoint` with the given policy.

    Args:
      function: of arrays.
      policy: what it keeps for the backward pass. For those of `OFFLOADED`, `host_loop` moves it to
        the host's memory.
      in_loop: whether it is the whole body of a loop, in which XLA cannot undo the recomputation,
        nor do it early; else it is kept from that.
    """
    if policy == "none":
        return function
    kept = jax.checkpoint_policies.save_only_these_names(*_KEPT[policy])
    return jax.checkpoint(function, policy=kept, prevent_cse=not in_loop)
