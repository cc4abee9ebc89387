"""From linear layers to the heads of attention: norm of queries and keys, rotary embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from alload_jax.models.common.linear import Linear
from alload_jax.models.common.parts import LINEAR, QK_NORM
from alload_jax.models.common.remat import LINEAR_OUTPUT, NORM_OUTPUT
from alload_jax.models.common.rotary import RotaryTable, apply_rotary
from alload_jax.models.common.single_row import split_single_row, splits_single_row
from alload_jax.sharding.mesh import with_tensor_axis
from pallas_kernels import rms_norm_rotary


def project_heads(
    x: jax.Array,
    linear: Linear,
    norm: nnx.RMSNorm | None = None,
    rotary: RotaryTable | None = None,
    *,
    num_heads: int,
    norm_implementation: str = "auto",
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Projects, norms and rotates.

    Args:
      x: [B, S, D'].
      linear: from D' to D.
      norm: over D, or over each head if its width is head_dim; None for none.
      rotary: table of the tokens, [S, head_dim // 2] or [B, S, head_dim // 2]; None for none.
      num_heads: heads of D.
      norm_implementation: the config's `norm`. What others than XLA's can do for queries and keys
        depends on heads and mesh, so that "auto" chooses among them.
      sharding: sharding of rows over a mesh of Auto axes, which kernels need.

    Returns:
      [B, S, num_heads, head_dim].
    """

    def projected(x: jax.Array, *tables: jax.Array) -> jax.Array:
        if norm is None:
            with jax.named_scope(LINEAR):
                y = checkpoint_name(linear(x), LINEAR_OUTPUT)
            y = y.reshape(*y.shape[:-1], num_heads, -1)
            return apply_rotary(y, tables) if tables else y
        with jax.named_scope(LINEAR):
            product = linear.product(x)
            bias = linear.bias_of(product)
            # The norm adds up the bias's gradient.
            y = checkpoint_name(product + jax.lax.stop_gradient(bias), LINEAR_OUTPUT)
        with jax.named_scope(QK_NORM):
            heads = rms_norm_rotary(
                y,
                _weight(norm),
                tables or None,
                head_dim=y.shape[-1] // num_heads,
                bias=bias,
                eps=norm.epsilon,
                implementation="xla" if norm_implementation == "xla" else "auto",
                sharding=with_tensor_axis(sharding),
            )
            return checkpoint_name(heads, NORM_OUTPUT)

    tables = tuple(rotary or ())
    if splits_single_row(x, sharding):
        tables = tuple(jnp.broadcast_to(part, (*x.shape[:2], part.shape[-1])) for part in tables)
        return split_single_row(projected, sharding, x, *tables)
    return projected(x, *tables)


def _weight(norm: nnx.RMSNorm) -> jax.Array:
    assert norm.scale is not None
    return norm.scale[...]
