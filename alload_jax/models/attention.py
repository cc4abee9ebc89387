"""The one place that computes attention: an adapter over the implementations JAX offers."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

AttentionImplementation = Literal["auto", "xla", "cudnn"]

ATTENTION_OUTPUT = "attention_output"
"""Name under which rematerialisation policies find the output of attention."""


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    implementation: AttentionImplementation = "auto",
) -> jax.Array:
    """softmax(query·keyᵀ/√head_dim)·value, each row attending to all keys of its row.

    Args:
      query: [B, S, num_heads, head_dim].
      key: [B, T, num_heads, head_dim].
      value: [B, T, num_heads, head_dim].
      implementation: "cudnn" (fused, GPU only), "xla", or "auto": cuDNN where it can be used.

    Returns:
      [B, S, num_heads, head_dim] in the query's dtype.

    Raises:
      NotImplementedError: cuDNN was asked for where it cannot run; the message says why.
      ValueError: the implementation's name is unknown.
    """
    if implementation not in get_args(AttentionImplementation):
        raise ValueError(
            f"attention: implementation={implementation!r} is unknown; "
            f"choose one of {', '.join(get_args(AttentionImplementation))}"
        )
    obstacle = _cudnn_obstacle(query)
    if implementation == "cudnn" and obstacle:
        raise NotImplementedError(f"attention: cuDNN cannot run here, {obstacle}; use 'xla'")
    if implementation == "xla" or obstacle:
        output = jax.nn.dot_product_attention(query, key, value, implementation="xla")
    else:
        output = _cudnn(query, key, value)
    return checkpoint_name(output, ATTENTION_OUTPUT)


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX refuses odd lengths to cuDNN's backward, so they get one more token, masked out."""
    batch, queries, keys = *query.shape[:2], key.shape[1]
    if queries % 2 == 0 and keys % 2 == 0:
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
    output = jax.nn.dot_product_attention(
        *(_to_even(part) for part in (query, key, value)),
        query_seq_lengths=jnp.full(batch, queries, jnp.int32),
        key_value_seq_lengths=jnp.full(batch, keys, jnp.int32),
        implementation="cudnn",
    )
    return output[:, :queries]


def _to_even(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def _cudnn_obstacle(query: jax.Array) -> str:
    """Why cuDNN's fused attention can't take this query; empty when it can."""
    head_dim = query.shape[-1]
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()!r}, not 'gpu'"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its dtype is {query.dtype}, not bfloat16 or float16"
    if head_dim % 8 or head_dim > 256:
        return f"head_dim is {head_dim}, not a multiple of 8 up to 256"
    return ""
