"""Rematerialisation policies: which activations a block keeps for its backward pass."""

from collections.abc import Callable
from typing import Any, Literal

import jax

RematPolicy = Literal["none", "full", "attention", "matmuls_and_attention"]
"""`none` keeps all activations; `full` keeps only the block's input; `attention` keeps attention
outputs; `matmuls_and_attention` keeps those and the outputs of matrix products."""

ATTENTION_OUTPUT = "attention_output"
"""Name by which policies find attention outputs that are not from JAX's fused attention."""

BLOCK_LISTS = "attention_block_lists"
"""Name of the blocks that sparse attention has chosen, which every policy keeps: computed again,
rounding could choose others."""

_policies = jax.checkpoint_policies


def _keeps_fused_attention(prim: Any, *_: Any, **__: Any) -> bool:
    """Keeps outputs and softmax statistics of JAX's cuDNN attention, so that it runs only once."""
    return prim.name == "dot_product_attention_fwd_wrapper"


_KEEP_ATTENTION = _policies.save_from_both_policies(
    _policies.save_only_these_names(ATTENTION_OUTPUT, BLOCK_LISTS), _keeps_fused_attention
)
_POLICIES = {
    "full": _policies.save_only_these_names(BLOCK_LISTS),
    "attention": _KEEP_ATTENTION,
    "matmuls_and_attention": _policies.save_from_both_policies(
        _KEEP_ATTENTION, _policies.dots_with_no_batch_dims_saveable
    ),
}


def rematerialise(function: Callable, policy: RematPolicy) -> Callable:
    """Wraps a function (usually the body of a scan) in `jax.checkpoint` with the given policy."""
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=_POLICIES[policy], prevent_cse=False)
