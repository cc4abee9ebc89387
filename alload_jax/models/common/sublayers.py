"""What blocks consist of beside attention: rotary embedding, queries and keys, feed-forward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from alload_jax.models.common import parts
from alload_jax.models.common.config import TransformerConfig
from alload_jax.sharding.mesh import with_tensor_axis
from pallas_kernels import bias_gelu, bias_gelu_then, residual_layernorm_modulate, rms_norm_rotary

NormOptions = dict[str, Any]
"""Options of the kernels: `implementation`, `sharding`, and of norms `eps` and `segment_ids`."""

RotaryTable = tuple[jax.Array, ...]
"""Cosines and sines, [S, head_dim // 2] or [R, S, head_dim // 2] float32 each."""


def grid_positions(frames: int, height: int, width: int) -> jax.Array:
    """Returns the positions of the tokens of one clip, in the order of `patchify`.

    Args:
      frames, height, width: size of the clip in tokens.

    Returns:
      [frames·height·width, 3] int32, the (t, h, w) of each token.
    """
    grid = jnp.indices((frames, height, width), dtype=jnp.int32)
    return grid.reshape(3, -1).T


def rotary_table(
    positions: jax.Array | np.ndarray,
    limits: tuple[int, int, int],
    head_dim: int,
    theta: float = 10_000.0,
    sizes: tuple[int, int, int] | None = None,
) -> RotaryTable:
    """Computes cosines and sines for every token and every pair of channels.

    Within each of the three parts of a head's channels, pairs rotate at the usual geometric
    frequencies (arXiv 2104.09864).
    Angles are computed in float64 in a small table per axis and looked up by position.

    Args:
      positions: [S, 3] integers from 0, or [R, S, 3] for different positions per row.
      limits: exclusive upper bounds of the positions, (t, h, w).
      head_dim: width of a head; even.
      theta: base of the frequencies.
      sizes: channels for (t, h, w), even, with the sum head_dim; None for Wan 2.1's: 2·(head_dim //
        6) each for h and w, the rest for t.

    Returns:
      cos, sin: [S, head_dim // 2] float32, or [R, S, head_dim // 2]; NaN where traced positions are
      outside the limits.

    Raises:
      ValueError: a position that is known is outside the limits.
    """
    if not isinstance(positions, jax.core.Tracer):
        known = np.asarray(positions)
        wrong = ((known < 0) | (known >= np.asarray(limits))).any(axis=-1)
        for position in known[wrong][:1].tolist():
            raise ValueError(
                f"rotary_table: position {position} is outside (t, h, w) from 0 to below "
                f"{list(limits)}; give the limits of the longest clip"
            )
    spatial = 2 * (head_dim // 6)
    cosines: list[jax.Array] = []
    sines: list[jax.Array] = []
    for axis, size in enumerate(sizes or (head_dim - 2 * spatial, spatial, spatial)):
        frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / max(size, 1))
        angle = np.arange(limits[axis])[:, None] * frequencies
        place = jnp.asarray(positions)[..., axis]
        place = jnp.where(place < 0, limits[axis], place)  # a negative index counts from the end
        for part, values in ((cosines, np.cos(angle)), (sines, np.sin(angle))):
            table = jnp.asarray(values, jnp.float32)
            part.append(table.at[place].get(mode="fill", fill_value=jnp.nan))
    return jnp.concatenate(cosines, axis=-1), jnp.concatenate(sines, axis=-1)


@jax.named_scope(parts.ROTARY)
def apply_rotary(x: jax.Array, table: RotaryTable) -> jax.Array:
    """Rotates neighbouring channel pairs (2i, 2i + 1) by the table's angles, in float32.

    Args:
      x: [B, S, num_heads, head_dim].
      table: cos and sin, [S, head_dim // 2] each, or [B, S, head_dim // 2].

    Returns:
      [B, S, num_heads, head_dim] in `x.dtype`.
    """
    cos, sin = (part[..., :, None, :] for part in table)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


class AttentionProjections(nnx.Module):
    """Linear layers before and after attention, with an RMSNorm of queries and keys."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        norm_width: int | None,
        eps: float,
        with_output: bool = True,
        rngs: nnx.Rngs,
    ):
        """Draws the weights.

        Args:
          config: the model's, of which D is the width. What other norms than XLA's can do for
            queries and keys depends on heads and mesh, so that "auto" chooses among them.
          norm_width: channels that the RMSNorm is over: D, or head_dim for each head by itself;
            None for no norm.
          eps: epsilon of the norm.
          with_output: whether there is a layer after attention.
          rngs: draws the weights.
        """
        dim, dtype = config.dim, config.compute_dtype

        def make_norm() -> nnx.RMSNorm | None:
            if norm_width is None:
                return None
            return nnx.RMSNorm(norm_width, epsilon=eps, dtype=dtype, rngs=rngs)

        self.num_heads = config.num_heads
        self.norm_implementation = "xla" if config.norm == "xla" else "auto"
        self.query, self.key, self.value = (
            parts.Linear(dim, dim, dtype=dtype, rngs=rngs) for _ in range(3)
        )
        if with_output:
            self.out = parts.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.query_norm, self.key_norm = make_norm(), make_norm()

    def heads(
        self,
        x: jax.Array,
        context: jax.Array,
        rotary: RotaryTable | None,
        sharding: NamedSharding | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query of x: [B, S, D], key and value of context: [B, T, D], as `attention` takes them."""
        if x is context:
            of_query, of_key, of_value = parts.fan_out(x, 3)
        else:
            of_query, (of_key, of_value) = x, parts.fan_out(context, 2)
        return (
            self.projected(of_query, self.query, self.query_norm, rotary, sharding),
            self.projected(of_key, self.key, self.key_norm, rotary, sharding),
            self.projected(of_value, self.value, None, None, sharding),
        )

    def projected(
        self,
        x: jax.Array,
        linear: parts.Linear,
        norm: nnx.RMSNorm | None,
        rotary: RotaryTable | None,
        sharding: NamedSharding | None,
    ) -> jax.Array:
        """Projects, norms and rotates.

        Args:
          x: [B, S, D'].
          linear: from D' to D.
          norm: over D, or over each head if its width is head_dim; None for none.
          rotary: table of the tokens, [S, head_dim // 2] or [B, S, head_dim // 2]; None for none.
          sharding: sharding of rows over a mesh of Auto axes, which kernels need.

        Returns:
          [B, S, num_heads, head_dim].
        """

        def of_tokens(x: jax.Array, *tables: jax.Array) -> jax.Array:
            if norm is None:
                with jax.named_scope(parts.LINEAR):
                    y = checkpoint_name(linear(x), parts.LINEAR_OUTPUT)
                y = y.reshape(*y.shape[:-1], self.num_heads, -1)
                return apply_rotary(y, tables) if tables else y
            with jax.named_scope(parts.LINEAR):
                product = linear.product(x)
                bias = linear.bias_of(product)
                # The norm adds up the bias's gradient.
                y = checkpoint_name(product + jax.lax.stop_gradient(bias), parts.LINEAR_OUTPUT)
            assert norm.scale is not None
            with jax.named_scope(parts.QK_NORM):
                heads = rms_norm_rotary(
                    y,
                    norm.scale[...],
                    tables or None,
                    head_dim=y.shape[-1] // self.num_heads,
                    bias=bias,
                    eps=norm.epsilon,
                    implementation=self.norm_implementation,
                    sharding=with_tensor_axis(sharding),
                )
                return checkpoint_name(heads, parts.NORM_OUTPUT)

        tables = tuple(rotary or ())
        if parts.splits_single_row(x, sharding):
            shape = x.shape[:2]
            tables = tuple(jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in tables)
            return parts.split_single_row(of_tokens, sharding, x, *tables)
        return of_tokens(x, *tables)

    def output(self, mixed: jax.Array, sharding: NamedSharding | None) -> jax.Array:
        """Projects what attention returns, [B, S, num_heads, head_dim] → [B, S, D]."""
        with jax.named_scope(parts.LINEAR):
            y = parts.split_single_row(self.out, sharding, mixed.reshape(*mixed.shape[:2], -1))
            return checkpoint_name(y, parts.LINEAR_OUTPUT)


class FeedForward(nnx.Module):
    """Linear, activation, linear."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        hidden: int | None = None,
        activation: Callable[[jax.Array], jax.Array] | None = None,
        beside: int = 0,
        rngs: nnx.Rngs,
    ):
        """Draws the weights.

        Args:
          config: the model's. Other implementations than XLA's are chosen among by "auto".
          hidden: width between the linear layers; None for the config's `ffn_dim`.
          activation: a function of elements; None for GELU in its tanh form.
          beside: width of what the last layer takes before the hidden layer, with GELU.
          rngs: draws the weights.
        """
        dtype, hidden = config.compute_dtype, hidden or config.ffn_dim
        self.activation = activation
        self.implementation = "xla" if config.norm == "xla" else "auto"
        self.hidden = parts.Linear(config.dim, hidden, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(beside + hidden, config.dim, dtype=dtype, rngs=rngs)

    @jax.named_scope(parts.FEED_FORWARD)
    def __call__(
        self,
        x: jax.Array,
        sharding: NamedSharding | None = None,
        *beside: jax.Array,
        output_kept: bool = True,
    ) -> jax.Array:
        """[B, S, D] → [B, S, D].

        Args:
          x: inputs.
          sharding: of x's rows over a mesh of Auto axes, which kernels need.
          beside: [B, S, width], what the last layer takes before the hidden layer, if anything.
          output_kept: whether the backward pass has the output, and need not apply the layer again.
        """

        def computed(x: jax.Array, *beside: jax.Array) -> jax.Array:
            if self.activation is not None:
                with jax.named_scope(parts.LINEAR):
                    hidden = checkpoint_name(self.hidden(x), parts.LINEAR_OUTPUT)
                with jax.named_scope(parts.ACTIVATION):
                    hidden = checkpoint_name(self.activation(hidden), parts.NORM_OUTPUT)
                with jax.named_scope(parts.LINEAR):
                    return self.out(hidden)
            with jax.named_scope(parts.LINEAR):
                product = checkpoint_name(self.hidden.product(x), parts.LINEAR_OUTPUT)
            bias = self.hidden.bias_of(product)
            options: NormOptions = {
                "implementation": self.implementation,
                "sharding": with_tensor_axis(sharding),
            }
            if not output_kept:
                with jax.named_scope(parts.ACTIVATION):
                    hidden = bias_gelu(product, bias, **options)
                with jax.named_scope(parts.LINEAR):
                    return self.out(_side_by_side(*beside, hidden))
            # The backward pass computes GELU again in the kernel of its gradient.
            graph, weights = nnx.split(self.out)

            def out(hidden: jax.Array, given: tuple[nnx.State, tuple[jax.Array, ...]]) -> jax.Array:
                with jax.named_scope(parts.LINEAR):
                    return nnx.merge(graph, given[0])(_side_by_side(*given[1], hidden))

            with jax.named_scope(parts.ACTIVATION):
                return bias_gelu_then(product, bias, out, (weights, beside), **options)

        return parts.split_single_row(
            lambda *each: checkpoint_name(computed(*each), parts.FEED_FORWARD_OUTPUT),
            sharding,
            *(x, *beside),
        )


def _side_by_side(*arrays: jax.Array) -> jax.Array:
    """Arrays [B, S, ...] as one."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)


@jax.named_scope(parts.RESIDUAL)
def gated_add(x: jax.Array, y: jax.Array, gate: jax.Array, options: NormOptions) -> jax.Array:
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
