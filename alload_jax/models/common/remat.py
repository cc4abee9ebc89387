"""Rematerialisation policies: which activations a block keeps for its backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, checkpoint_name

from alload_jax.planning.remat import RematPolicy

LINEAR_OUTPUT = "linear_output"
"""Name by which policies find what linear layers of blocks compute: with their bias, where nothing
else adds it, so that the backward pass need not add it again."""

NORM_OUTPUT = "norm_output"
"""Name by which policies find what norms and rotations of blocks compute, and activations other
than GELU."""

FEED_FORWARD_OUTPUT = "feed_forward_output"
"""Name by which policies find outputs of feed-forward layers."""

ATTENTION_OUTPUT = "attention_output"
"""Name by which policies find attention outputs that are not from JAX's fused attention."""

BLOCK_LISTS = "attention_block_lists"
"""Name of the blocks that sparse attention has chosen, which every policy keeps: computed again,
rounding could choose others."""

_BLOCK_INPUT = "block_input"
_policies = jax.checkpoint_policies


def _keeps_fused_attention(prim: Any, *_: Any, **__: Any) -> bool:
    """Keeps outputs and softmax statistics of JAX's cuDNN attention, so that it runs only once."""
    return prim.name == "dot_product_attention_fwd_wrapper"


_TO_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
_OFFLOADED_KEYS = 8192
"""Least keys of attention whose output is worth the way to the host and back. Computing it again
takes 4 K d operations a token for K keys, and the way 4 d bytes: at 600 TFLOP/s and 55 GB/s they
take equally long at 11,000 keys if nothing hides the way. XLA hides most of it where no more than
two tensors are under way at a time, which is why nothing else is kept there."""
_offload_named = _policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[BLOCK_LISTS],
    names_which_can_be_offloaded=[_BLOCK_INPUT, ATTENTION_OUTPUT],
    **_TO_HOST,
)


def _offload_attention(prim: Any, *avals: Any, **params: Any) -> Any:
    """Keeps in the host's memory the block's input, and outputs of attention over many keys."""
    if _keeps_fused_attention(prim):
        _, key, *_ = avals
        if key.shape[1] < _OFFLOADED_KEYS:
            return False
        return Offloadable(src=_TO_HOST["offload_src"], dst=_TO_HOST["offload_dst"])
    return _offload_named(prim, *avals, **params)


_OFFLOAD_INPUT: tuple[RematPolicy, ...] = ("offload", "offload_attention")
_KEEP_ATTENTION = _policies.save_from_both_policies(
    _policies.save_only_these_names(ATTENTION_OUTPUT, BLOCK_LISTS), _keeps_fused_attention
)
_POLICIES = {
    "full": _policies.save_only_these_names(BLOCK_LISTS),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[BLOCK_LISTS],
        names_which_can_be_offloaded=[_BLOCK_INPUT],
        **_TO_HOST,
    ),
    "offload_attention": _offload_attention,
    "attention": _KEEP_ATTENTION,
    "feed_forward_and_attention": _policies.save_from_both_policies(
        _KEEP_ATTENTION, _policies.save_only_these_names(FEED_FORWARD_OUTPUT)
    ),
    "matmuls_and_attention": _policies.save_from_both_policies(
        _KEEP_ATTENTION, _policies.save_only_these_names(LINEAR_OUTPUT, FEED_FORWARD_OUTPUT)
    ),
    "norms_matmuls_and_attention": _policies.save_from_both_policies(
        _KEEP_ATTENTION,
        _policies.save_only_these_names(LINEAR_OUTPUT, FEED_FORWARD_OUTPUT, NORM_OUTPUT),
    ),
}


def rematerialise(function: Callable, policy: RematPolicy, *, in_loop: bool) -> Callable:
    """Wraps a function in `jax.checkpoint` with the given policy.

    Args:
      function: whose first argument is the block's input, arrays.
      policy: what it keeps for the backward pass.
      in_loop: whether it is the body of a loop, in which XLA cannot undo the recomputation; else it
        is kept from that.
    """
    if policy == "none":
        return function
    if policy in _OFFLOAD_INPUT:
        function = _with_named_input(function)
    return jax.checkpoint(function, policy=_POLICIES[policy], prevent_cse=not in_loop)


def _with_named_input(function: Callable) -> Callable:
    """Recomputation begins at the named input, so that the input itself is not kept."""

    def named(x: jax.Array, *others: Any) -> Any:
        return function(checkpoint_name(x, _BLOCK_INPUT), *others)

    return named
