"""The gated residual sum of blocks that the timestep modulates."""

from typing import Any

import jax
import jax.numpy as jnp

from alload_jax.models.common.parts import RESIDUAL
from pallas_kernels import residual_layernorm_modulate


@jax.named_scope(RESIDUAL)
def gated_add(x: jax.Array, y: jax.Array, gate: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Computes x + y·gate in float32, rounded once.

    Args:
      x, y: [B, S, D].
      gate: float32, [B, D], or [B, S, D] for one per token; with segments [B, M, D].
      options: options of the norms, with `segment_ids` where a gate belongs to a segment; tokens
        outside segments are then zero.

    Returns:
      [B, S, D] in x's dtype.
    """
    if "segment_ids" in options or gate.ndim == 2:
        # The residual sum of the fused norm. The gate's gradient is then a reduction over a segment
        # or a row, where indexing the gates by token would give a scatter over all tokens; and for
        # rows of many samples XLA would transpose x and y before it reduces.
        none = jnp.zeros_like(gate)
        return residual_layernorm_modulate(x, y, gate, none, none, **options)[0]
    return (x.astype(jnp.float32) + y.astype(jnp.float32) * gate).astype(x.dtype)
