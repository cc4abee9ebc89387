"""Names of the parts of a training step, as `jax.named_scope` puts them into compiled programs.

`alload bench step --profile` finds them there, and so do other profilers. An operation belongs to
the innermost of these scopes. Scopes cost no time: they are names of instructions only.
"""

from typing import Final

SELF_ATTENTION: Final = "self_attention"
CROSS_ATTENTION: Final = "cross_attention"
JOINT_ATTENTION: Final = "joint_attention"
FEED_FORWARD: Final = "feed_forward"
"""These four say where in a block an operation is. The following say what it computes."""

ATTENTION: Final = "attention_core"
"""Softmax and the products of queries, keys and values; the choice of blocks, where sparse."""
LINEAR: Final = "linear"
"""Linear layers: matrix products and biases."""
NORM: Final = "norm_modulation"
"""Norms with modulation, and the residual sums that the same kernel computes."""
QK_NORM: Final = "qk_norm"
"""RMSNorm of queries and keys, with their rotary embedding."""
ROTARY: Final = "rotary_embedding"
"""Rotary embedding of what has no such norm."""
ACTIVATION: Final = "activation"
RESIDUAL: Final = "residual_gate"
"""Residual sums with gates outside of the norms."""
EMBEDDING: Final = "embedding"
"""Embeddings of the inputs, and the refiner of texts."""
HEAD: Final = "head"
OBJECTIVE: Final = "objective"
"""Noise and loss."""
BLOCKS: Final = "blocks"
"""The scan over blocks."""
ACCUMULATION: Final = "gradient_accumulation"
OPTIMIZER: Final = "optimizer"
"""Clipping, optimizer, EMA."""
