"""Computes all attention of the models, with one of the implementations that JAX offers.

All-to-alls exchange a rank's split tokens of all heads for all split tokens of some heads and back,
as in DeepSpeed-Ulysses (arXiv 2309.14509). Where the ranks of a group do not divide the heads, only
some neighbours exchange them; each then gets the keys and values of its heads from the others. This
applies to the first A tokens of each rank's row; the other tokens attend on their own rank.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from alload_jax.models.common.cudnn import (
    RowLengths,
    cudnn_packed,
    cudnn_rows,
    packed_unsupported_reason,
    unsupported_reason,
)
from alload_jax.models.common.parts import ATTENTION, ATTENTION_OUTPUT
from alload_jax.models.common.segments import (
    PADDING,
    AttentionSegments,
    SplitRows,
    from_tiles,
    in_blocks,
    to_tiles,
    to_tokens,
)
from alload_jax.sharding.mesh import CONTEXT, TENSOR, row_shards
from pallas_kernels import devices
from pallas_kernels.block_sparse_attention import BlockLists, block_sparse_attention
from pallas_kernels.block_sparse_attention.api import unsupported_query

_KEY_BLOCK = 128
"""Keys of a block in cuDNN's backward."""
_LEAST_PARTS = 528
"""Blocks of keys times rows and heads that fill a GPU: four for each of 132 multiprocessors."""
_FEW_KEYS = 8
"""Queries for each key from which on they are split."""


def query_blocks(query: jax.Array, key: jax.Array, shards: int = 1) -> int:
    """Into how many blocks of queries attention to few keys is split.

    cuDNN's backward divides its work by blocks of keys, rows and heads. A long row's
    cross-attention has so few of them that most of a GPU would wait.

    Args:
      query: [B, S, num_heads, head_dim].
      key: [B, T, num_heads, head_dim].
      shards: devices that the rows are split over.
    """
    rows, queries, heads, _ = query.shape
    keys = key.shape[1]
    parts = max(1, rows // shards) * heads * -(-keys // _KEY_BLOCK)
    wanted = -(-_LEAST_PARTS // parts)
    if keys % 2 or queries < _FEW_KEYS * keys:
        return 1
    fitting = [
        blocks
        for blocks in range(1, 2 * wanted + 1)
        if queries % (2 * blocks) == 0 and queries // blocks >= keys
    ]
    enough = [blocks for blocks in fitting if blocks >= wanted]
    return min(enough, default=max(fitting, default=1))


def in_query_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, blocks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of which each has a block of queries and all keys: [B·blocks, S / blocks, ...]."""
    if blocks == 1:
        return query, key, value
    rows, queries, *heads = query.shape
    shape = (rows * blocks, queries // blocks, *heads)
    repeated_key, repeated_value = (jnp.repeat(part, blocks, axis=0) for part in (key, value))
    return query.reshape(shape), repeated_key, repeated_value


Within = Callable[[jax.Array, jax.Array, jax.Array, AttentionSegments], jax.Array]
"""(query, key, value, segments) → output, on one device."""


def split_packed(
    within: Within, query: jax.Array, key: jax.Array, value: jax.Array, split: SplitRows
) -> jax.Array:
    """Computes softmax(query·keyᵀ/√head_dim)·value within whole and split segments.

    It must run inside `shard_map`.

    Args:
      within: attention on packed rows of one device.
      query, key, value: [1, T, num_heads, head_dim], the row of one rank.
      split: positions of the segments.

    Returns:
      [1, T, num_heads, head_dim] in the query's dtype.
    """
    count, ranks = split.split_tokens, jax.lax.axis_size(CONTEXT)
    together = math.gcd(ranks, query.shape[2])
    q, k, v = (tokens_together(x[:, :count], together) for x in (query, key, value))
    segments = split.within_split()
    if together < ranks:
        k, v = (parts_together(x, together) for x in (k, v))
        segments = split.from_part(jax.lax.axis_index(CONTEXT) // together, together)
    outputs = [heads_together(within(q, k, v, segments), together)]
    if count < query.shape[1]:
        q, k, v = (x[:, count:] for x in (query, key, value))
        outputs.append(within(q, k, v, split.within_whole()))
    return jnp.concatenate(outputs, axis=1)


def tokens_together(x: jax.Array, together: int) -> jax.Array:
    """[1, A, num_heads, D] on each rank → [1, n·A, num_heads / n, D] of n = `together` ranks."""
    return _all_to_all(x, together, split_axis=2, concat_axis=1)


def heads_together(x: jax.Array, together: int) -> jax.Array:
    """Inverts `tokens_together`."""
    return _all_to_all(x, together, split_axis=1, concat_axis=2)


def _all_to_all(x: jax.Array, together: int, split_axis: int, concat_axis: int) -> jax.Array:
    if together == 1:
        return x
    return jax.lax.all_to_all(
        x,
        CONTEXT,
        split_axis=split_axis,
        concat_axis=concat_axis,
        axis_index_groups=_neighbours(together).tolist(),
        tiled=True,
    )


def parts_together(x: jax.Array, together: int) -> jax.Array:
    """[1, n·A, num_heads / n, D] after `tokens_together` → [1, c·A, num_heads / n, D]."""
    groups = _neighbours(together).T.tolist()
    return jax.lax.all_gather(x, CONTEXT, axis=1, axis_index_groups=groups, tiled=True)


def sum_of_parts(x: jax.Array, together: int) -> jax.Array:
    """The sum of x over the ranks that have the same heads after `tokens_together`."""
    return jax.lax.psum(x, CONTEXT, axis_index_groups=_neighbours(together).T.tolist())


def gathered_heads(x: jax.Array, together: int) -> jax.Array:
    """[1, M, num_heads / n] after `tokens_together` → [1, M, num_heads] of n = `together` ranks."""
    groups = _neighbours(together).tolist()
    return jax.lax.all_gather(x, CONTEXT, axis=2, axis_index_groups=groups, tiled=True)


def _neighbours(together: int) -> np.ndarray:
    """[c / n, n], the ranks of a context group by n neighbours; columns have the same heads."""
    return np.arange(jax.lax.axis_size(CONTEXT)).reshape(-1, together)


AttentionImplementation = Literal["auto", "xla", "cudnn", "triton"]


@jax.named_scope(ATTENTION)
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: AttentionSegments | SplitRows | None = None,
    *,
    implementation: AttentionImplementation = "auto",
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Computes softmax(query·keyᵀ/√head_dim)·value within each row or segment.

    Args:
      query: [B, S, num_heads, head_dim].
      key: [B, T, num_heads, head_dim].
      value: [B, T, num_heads, head_dim].
      segments: positions of the segments of packed rows; None for rows that are one segment each.
        Tokens of no segment attend to nothing, are not attended to and get zeros. Rows of one slot,
        whose segment begins at the first token, are computed as bucketed rows. `SplitRows` needs a
        mesh with a context axis.
      implementation: "cudnn" (fused, GPU only), "triton" (packed rows by a kernel of
        `pallas_kernels`, others as with "auto"), "xla", or "auto": cuDNN where it can run, else
        Triton for packed rows.
      sharding: sharding of rows over a mesh of Auto axes; B is split, and heads over a tensor axis.

    Returns:
      [B, S, num_heads, head_dim] in the query's dtype.

    Raises:
      NotImplementedError: cuDNN or Triton is requested where it cannot run, or the rows are packed
        and this GPU can run neither on them; the message gives the reason.
      ValueError: the implementation is unknown.
    """
    if implementation not in get_args(AttentionImplementation):
        raise ValueError(
            f"attention: implementation={implementation!r} is unknown; "
            f"choose one of {', '.join(get_args(AttentionImplementation))}"
        )
    run: Callable[..., jax.Array]
    if isinstance(segments, SplitRows) or (segments and segments.query.offset.shape[1] > 1):
        run = attention_within(query, key, implementation, sharding)
        if isinstance(segments, SplitRows):
            run = partial(split_packed, run)
        return _on_shards(run, sharding, query, key, value, segments)
    reason = unsupported_reason(query)
    if implementation == "cudnn" and reason:
        raise NotImplementedError(f"attention: cuDNN cannot run here, {reason}; use 'xla'")
    run = _xla if implementation == "xla" or reason else _cudnn
    if segments is None:
        blocks = 1 if run is _xla else query_blocks(query, key, row_shards(sharding))
        blocked = in_query_blocks(query, key, value, blocks)
        return _on_shards(run, sharding, *blocked).reshape(query.shape)
    # Zeros on both sides, because cuDNN leaves outputs and gradients of masked tokens unwritten.
    lengths, key_lengths = segments.query.length[:, 0], segments.key.length[:, 0]
    asking, seen = _first_tokens(query, lengths), _first_tokens(key, key_lengths)
    parts = (jnp.where(asking, query, 0), *(jnp.where(seen, part, 0) for part in (key, value)))
    least = jnp.maximum(lengths, 1), jnp.maximum(key_lengths, 1)
    return jnp.where(asking, _on_shards(run, sharding, *parts, least), 0)


def _on_shards(
    run: Callable[..., jax.Array], sharding: NamedSharding | None, *arguments: PyTree
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
      NotImplementedError: what is requested cannot run on packed rows of this GPU.
    """
    if implementation == "xla":
        return xla_packed
    elements = max(query.size, key.size) // row_shards(sharding)
    kernel, reason = _packed_kernel(implementation, query, elements)
    if kernel:
        return kernel
    if implementation == "auto" and jax.default_backend() != "gpu":
        return xla_packed
    raise NotImplementedError(
        f"attention: {implementation} cannot run on packed rows here, {reason}; choose a bucketed "
        "planning.policy such as dual_constraint"
    )


def _packed_kernel(
    implementation: AttentionImplementation,
    query: jax.Array | jax.ShapeDtypeStruct,
    elements: int = 0,
) -> tuple[Within | None, str]:
    """The kernel for packed rows, or None and why none can run; arguments as `attention_within`."""
    reasons = []
    if implementation != "triton":
        if not (reason := unsupported_reason(query) or packed_unsupported_reason(elements)):
            return cudnn_packed, ""
        reasons.append(f"cuDNN: {reason}")
    if implementation != "cudnn":
        if not (error := unsupported_query(query) or devices.unsupported_triton_device()):
            return triton_packed, ""
        reasons.append(f"Triton: {error}")
    return None, "; ".join(reasons)


def head_spec(sharding: NamedSharding) -> PartitionSpec:
    """How [R, S, num_heads, ...] is split over a mesh: rows, and heads over its tensor axis."""
    return PartitionSpec(sharding.spec[0], None, TENSOR if TENSOR in sharding.mesh.shape else None)


def _xla(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: RowLengths = None
) -> jax.Array:
    """Runs XLA's attention on dense rows."""
    query_lengths, key_lengths = lengths or (None, None)
    output = jax.nn.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        implementation="xla",
    )
    return checkpoint_name(output, ATTENTION_OUTPUT)


def xla_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> jax.Array:
    """Computes softmax(query·keyᵀ/√head_dim)·value within segments, in float32, for all pairs.

    Values that are not finite affect only their own segment: 0·NaN of masked pairs is excluded.

    Args:
      query: [R, S, num_heads, head_dim].
      key, value: [R, T, num_heads, head_dim].
      packed: positions of the segments in queries and keys.

    Returns:
      [R, S, num_heads, head_dim] in the query's dtype; zeros outside segments.
    """
    query_ids, key_ids = packed.query.ids, packed.key.ids
    allowed = (query_ids[:, None, :, None] == key_ids[:, None, None, :]) & (query_ids != PADDING)[
        :, None, :, None
    ]
    logits = jnp.einsum("rshd,rthd->rhst", query, key, preferred_element_type=jnp.float32)
    logits = jnp.where(allowed, logits / math.sqrt(query.shape[-1]), -jnp.inf)
    most = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(most), 0.0, most))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    finite = jnp.isfinite(value).all(axis=(2, 3))
    clean = jnp.where(finite[..., None, None], value.astype(jnp.float32), 0.0)
    output = jnp.einsum("rhst,rthd->rshd", weights, clean)
    affected = (allowed & ~finite[:, None, None, :]).any(axis=-1)
    output = jnp.where(affected.transpose(0, 2, 1)[..., None], jnp.nan, output)
    return checkpoint_name(output.astype(query.dtype), ATTENTION_OUTPUT)


_BLOCKS = 128, 64
"""Tokens of a block of queries and of keys of packed rows."""


def triton_packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    packed: AttentionSegments,
    *,
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """Computes `xla_packed` by the kernel of block-sparse attention.

    Each segment begins a block of its own, and each block of queries lists the blocks of keys of
    its segment.

    Args:
      query, key, value, packed: as of `xla_packed`.
      implementation, interpret: of `block_sparse_attention`.
    """
    (queries, _), (keys, first) = (
        in_blocks(side, block, (side.ids.shape[1] + side.length.shape[1] * (block - 1)) // block)
        for side, block in zip((packed.query, packed.key), _BLOCKS, strict=True)
    )
    longest = min(packed.longest_key or packed.lengths[-1][0], key.shape[1])
    begin, length = (to_tokens(each, queries.segments) for each in (first, packed.key.length))
    listed = begin[..., None] + jnp.arange(-(-longest // _BLOCKS[1]), dtype=jnp.int32)
    count = jnp.where(queries.segments == PADDING, 0, -(-length // _BLOCKS[1]))
    indices, counts = (
        jnp.broadcast_to(each[:, None], (len(each), query.shape[2], *each.shape[1:]))
        for each in (listed, count)
    )
    lists = BlockLists(indices, counts, queries.tokens, keys.tokens, *_BLOCKS)
    arrays = to_tiles(query, queries), to_tiles(key, keys), to_tiles(value, keys)
    output = block_sparse_attention(
        *arrays, lists, implementation=implementation, interpret=interpret
    )
    return from_tiles(output, queries)


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: RowLengths = None
) -> jax.Array:
    """Runs cuDNN on dense rows.

    cuDNN's backward pass takes no odd lengths, so they get one masked token more.
    """
    batch, queries, keys = *query.shape[:2], key.shape[1]
    if lengths is None and (queries % 2 or keys % 2):
        lengths = jnp.full(batch, queries, jnp.int32), jnp.full(batch, keys, jnp.int32)
    even = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value))
    return cudnn_rows(*even, lengths)[:, :queries]


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
    return _packed_kernel(implementation, jax.ShapeDtypeStruct((1, 1, 1, head_dim), dtype))[1]
