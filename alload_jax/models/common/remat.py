"""Rematerialisation policies: which activations a block keeps for its backward pass."""

from collections.abc import Callable

import jax

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
"""Name by which policies find attention outputs and their softmax statistics."""

SHORT_ATTENTION_OUTPUT = "short_attention_output"
"""Likewise of cuDNN's attention of dense rows over fewer than `HOST_KEYS` keys."""

BLOCK_LISTS = "attention_block_lists"
"""Name of the blocks that sparse attention has chosen, which every policy keeps: computed again,
rounding could choose others."""

_policies = jax.checkpoint_policies


_KEEP_LONG_ATTENTION = _policies.save_only_these_names(ATTENTION_OUTPUT, BLOCK_LISTS)
_KEEP_ATTENTION = _policies.save_only_these_names(
    ATTENTION_OUTPUT, SHORT_ATTENTION_OUTPUT, BLOCK_LISTS
)
_KEEP_BLOCK_LISTS = _policies.save_only_these_names(BLOCK_LISTS)
_KEEP_FEED_FORWARD = _policies.save_only_these_names(FEED_FORWARD_OUTPUT)
_POLICIES = {
    "full": _KEEP_BLOCK_LISTS,
    "offload": _KEEP_BLOCK_LISTS,
    "offload_attention": _KEEP_LONG_ATTENTION,
    "offload_feed_forward_and_attention": _policies.save_from_both_policies(
        _KEEP_LONG_ATTENTION, _KEEP_FEED_FORWARD
    ),
    "attention": _KEEP_ATTENTION,
    "feed_forward_and_attention": _policies.save_from_both_policies(
        _KEEP_ATTENTION, _KEEP_FEED_FORWARD
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
      function: of arrays.
      policy: what it keeps for the backward pass. For those of `OFFLOADED`, `host_loop` moves it to
        the host's memory.
      in_loop: whether it is the whole body of a loop, in which XLA cannot undo the recomputation,
        nor do it early; else it is kept from that.
    """
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=_POLICIES[policy], prevent_cse=not in_loop)
