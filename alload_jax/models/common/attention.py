"""Computes all attention of the models, with one of the implementations that JAX offers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.models.common.cudnn import Lengths, cudnn_rows, unsupported_reason
from alload_jax.models.common.packed_attention import (
    cudnn_packed,
    packed_unsupported_reason,
    xla_packed,
)
from alload_jax.models.common.parts import ATTENTION
from alload_jax.models.common.query_blocks import in_query_blocks, query_blocks
from alload_jax.models.common.remat import ATTENTION_OUTPUT
from alload_jax.models.common.segments import AttentionSegments, SplitRows
from alload_jax.models.common.split_attention import Within, split_packed
from alload_jax.sharding.mesh import TENSOR, row_shards

AttentionImplementation = Literal["auto", "xla", "cudnn"]


@jax.named_scope(ATTENTION)
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segments: AttentionSegments | SplitRows | None = None,
    lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    implementation: AttentionImplementation = "auto",
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Computes softmax(query·keyᵀ/√head_dim)·value within each row or segment.

    Args:
      query: [B, S, num_heads, head_dim].
      key: [B, T, num_heads, head_dim].
      value: [B, T, num_heads, head_dim].
      segments: positions of the segments of packed rows; None for bucketed rows. `SplitRows` needs
        a mesh with a context axis.
      lengths: [B] int32, for bucketed rows of which only the first tokens are some: the others
        attend to nothing, are not attended to and get zeros; None for all tokens.
      key_lengths: [B] int32, likewise of keys, if they are others than the queries.
      implementation: "cudnn" (fused, GPU only), "xla", or "auto": cuDNN where it can run.
      sharding: sharding of rows over a mesh of Auto axes; B is split, and heads over a tensor axis.

    Returns:
      [B, S, num_heads, head_dim] in the query's dtype.

    Raises:
      NotImplementedError: cuDNN is requested where it cannot run, or the rows are packed and this
        GPU cannot run cuDNN on packed rows; the message gives the reason.
      ValueError: the implementation is unknown.
    """
    if implementation not in get_args(AttentionImplementation):
        raise ValueError(
            f"attention: implementation={implementation!r} is unknown; "
            f"choose one of {', '.join(get_args(AttentionImplementation))}"
        )
    if isinstance(segments, AttentionSegments) and segments.query.offset.shape[1] == 1:
        # Rows of one slot, whose segment begins at the first token, are bucketed rows.
        lengths, key_lengths = segments.query.length[:, 0], segments.key.length[:, 0]
    elif segments is not None:
        return _packed(query, key, value, segments, implementation, sharding)
    reason = unsupported_reason(query)
    if implementation == "cudnn" and reason:
        raise NotImplementedError(f"attention: cuDNN cannot run here, {reason}; use 'xla'")
    run: Callable[..., jax.Array] = _xla if implementation == "xla" or reason else _cudnn
    if lengths is None:
        blocks = 1 if run is _xla else query_blocks(query, key, row_shards(sharding))
        blocked = in_query_blocks(query, key, value, blocks)
        return _on_shards(run, sharding, *blocked).reshape(query.shape)
    # Zeros on both sides, because cuDNN leaves outputs and gradients of masked tokens unwritten.
    key_lengths = lengths if key_lengths is None else key_lengths
    asking, seen = _first_tokens(query, lengths), _first_tokens(key, key_lengths)
    parts = (jnp.where(asking, query, 0), *(jnp.where(seen, part, 0) for part in (key, value)))
    least = jnp.maximum(lengths, 1), jnp.maximum(key_lengths, 1)
    return jnp.where(asking, _on_shards(run, sharding, *parts, least), 0)


def _on_shards(
    run: Callable[..., jax.Array], sharding: NamedSharding | None, *arguments: Any
) -> jax.Array:
    """Runs attention of query, key, value and what rows have, on each device's rows and heads."""
    if sharding is None or sharding.mesh.size == 1:
        return run(*arguments)
    heads, rows = head_spec(sharding), jax.P(sharding.spec[0])
    return jax.shard_map(
        run,
        mesh=sharding.mesh,
        in_specs=(heads,) * 3 + (rows,) * (len(arguments) - 3),
        out_specs=heads,
        check_vma=False,
    )(*arguments)


def _first_tokens(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B, S, 1, 1] bool, which tokens of x: [B, S, ...] are the first of their rows."""
    return (jnp.arange(x.shape[1]) < lengths[:, None])[:, :, None, None]


def attention_of_rows(implementation: AttentionImplementation) -> Within:
    """The attention of bucketed rows, each of one segment that begins at its first token."""

    def within(
        query: jax.Array, key: jax.Array, value: jax.Array, segments: AttentionSegments
    ) -> jax.Array:
        lengths, key_lengths = (part.length[:, 0] for part in (segments.query, segments.key))
        return attention(
            *(query, key, value),
            lengths=lengths,
            key_lengths=key_lengths,
            implementation=implementation,
        )

    return within


def _packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: AttentionSegments | SplitRows,
    implementation: AttentionImplementation,
    sharding: NamedSharding | None,
) -> jax.Array:
    """Computes attention within segments."""
    within = attention_within(query, key, implementation, sharding)
    run: Callable[..., jax.Array] = within
    if isinstance(segments, SplitRows):
        run = partial(split_packed, within)
    return _on_shards(run, sharding, query, key, value, segments)


def attention_within(
    query: jax.Array,
    key: jax.Array,
    implementation: AttentionImplementation,
    sharding: NamedSharding | None,
) -> Within:
    """Chooses the attention within the segments of packed rows that each device computes.

    Args:
      query: [R, S, num_heads, head_dim], of all devices.
      key: [R, T, num_heads, head_dim].
      implementation: as in `attention`.
      sharding: of the rows.

    Raises:
      NotImplementedError: cuDNN cannot run on packed rows of this GPU.
    """
    elements = max(query.size, key.size) // row_shards(sharding)
    reason = unsupported_reason(query) or packed_unsupported_reason(elements)
    on_gpu = jax.default_backend() == "gpu"
    if reason and (implementation == "cudnn" or (implementation == "auto" and on_gpu)):
        raise NotImplementedError(
            f"attention: cuDNN cannot run on packed rows here, {reason}; choose a bucketed "
            "planning.policy such as dual_constraint"
        )
    return xla_packed if reason or implementation == "xla" else cudnn_packed


def head_spec(sharding: NamedSharding) -> PartitionSpec:
    """How [R, S, num_heads, ...] is split over a mesh: rows, and heads over its tensor axis."""
    return PartitionSpec(sharding.spec[0], None, TENSOR if TENSOR in sharding.mesh.shape else None)


def _xla(query: jax.Array, key: jax.Array, value: jax.Array, lengths: Lengths = None) -> jax.Array:
    """Runs XLA's attention on dense rows."""
    query_lengths, key_lengths = lengths or (None, None)
    output = jax.nn.dot_product_attention(
        *(query, key, value),
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        implementation="xla",
    )
    return checkpoint_name(output, ATTENTION_OUTPUT)


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: Lengths = None
) -> jax.Array:
    """Runs cuDNN on dense rows.

    cuDNN's backward pass takes no odd lengths, so they get one masked token more.
    """
    batch, queries, keys = *query.shape[:2], key.shape[1]
    if lengths is None and (queries % 2 or keys % 2):
        lengths = jnp.full(batch, queries, jnp.int32), jnp.full(batch, keys, jnp.int32)
    return cudnn_rows(*(_to_even(part) for part in (query, key, value)), lengths)[:, :queries]


def _to_even(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def packing_unsupported_reason(
    implementation: AttentionImplementation, head_dim: int, dtype: jnp.dtype
) -> str:
    """Returns why a model should not train on packed rows on this device; empty if it can.

    Args:
      implementation: the model's attention.
      head_dim: width of its heads.
      dtype: dtype of its computation.
    """
    if implementation == "xla":
        return "model.attention is xla, which computes all pairs of a row"
    head = jax.ShapeDtypeStruct((1, 1, 1, head_dim), dtype)
    return unsupported_reason(head) or packed_unsupported_reason()
