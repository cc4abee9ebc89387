"""Attention within the segments of packed rows: cuDNN's kernel and a plain XLA implementation.

It calls cuDNN's primitives instead of JAX's function because cuDNN's blocks, its memory and the
softmax statistics grow with slots times tokens: cuDNN is called once per class of lengths, and only
the statistics of each token's own segment are kept.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alload_jax.models.common import cudnn
from alload_jax.models.common.length_classes import LengthClass, length_classes
from alload_jax.models.common.remat import ATTENTION_OUTPUT
from alload_jax.models.common.segments import PADDING, AttentionSegments, Segments
from pallas_kernels import choose_rows
from pallas_kernels.devices import device_kind

_MAX_ELEMENTS = 2**31
"""Upper bound on the elements of queries or keys: offsets are 32-bit counts of elements."""


def packed_unsupported_reason(elements: int = 0) -> str:
    """Returns why cuDNN cannot run packed rows on this GPU, from Hopper on; empty if it can.

    Args:
      elements: number of elements of queries or keys on one device, whichever is larger.
    """
    capability = cudnn.capability()
    if capability is None:
        return f"it needs an NVIDIA GPU, and this is {device_kind()}"
    if capability < cudnn.HOPPER:
        return f"it needs compute capability {cudnn.HOPPER}, and this GPU has {capability}"
    if elements >= _MAX_ELEMENTS:
        return f"queries or keys have {elements} elements, not below 2^31"
    return ""


@jax.custom_vjp
def cudnn_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> jax.Array:
    """Computes `xla_packed` with cuDNN; outputs that cuDNN does not write are zero."""
    return _forward(_Heads(query, key, value), packed, is_training=False)[0]


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


class _Heads(NamedTuple):
    """query: [R, S, num_heads, head_dim]; key and value: [R, T, num_heads, head_dim]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def _forward(heads: _Heads, packed: AttentionSegments, is_training: bool) -> list[jax.Array]:
    """Returns the output, shaped like the query, and in training statistics [R·S, num_heads]."""
    classes, outputs, statistics = _classes(heads, packed), [], []
    for length_class in classes:
        arguments = _cudnn_arguments(heads, packed, length_class)
        output, *by_slot = cudnn.forward(arguments.arrays, is_training=is_training)
        outputs.append(_flat(output))
        statistics += [_to_tokens(part, packed.query, arguments.slot) for part in by_slot]
    output = _select_by_class(classes, packed, packed.query, outputs).reshape(heads.query.shape)
    if not is_training:
        return [output]
    return [output, _select_by_class(classes, packed, packed.query, statistics)]


def _forward_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> tuple[jax.Array, Any]:
    heads = _Heads(query, key, value)
    found = _forward(heads, packed, is_training=True)
    output, statistics = (checkpoint_name(each, ATTENTION_OUTPUT) for each in found)
    return output, (heads, packed, output, statistics)


def _backward_rule(saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    heads, packed, output, statistics = saved
    classes, grads = _classes(heads, packed), []
    for length_class in classes:
        arguments = _cudnn_arguments(heads, packed, length_class)
        query_shape = arguments.arrays[0].shape
        found = cudnn.backward(
            arguments.arrays,
            _to_slots(statistics, arguments.first, length_class.windows.queries),
            *(part.reshape(query_shape) for part in (output, grad)),
        )
        grads.append([_flat(part) for part in found])
    sides = (packed.query, packed.key, packed.key)
    parts = zip(sides, zip(*grads, strict=True), heads, strict=True)
    selected = (
        _select_by_class(classes, packed, side, by_class).reshape(like.shape)
        for side, by_class, like in parts
    )
    return (*selected, None)


cudnn_packed.defvjp(_forward_rule, _backward_rule)


class CudnnArguments(NamedTuple):
    """Arguments of cuDNN's primitives for one class of segments.

    Attributes:
      arrays: arrays of the primitives, in `cudnn.forward`'s order.
      first: [n] int32, first query token of each slot's segment, counted over all rows.
      slot: [R·M] int32, slot of each segment; meaningless for segments of other classes.
    """

    arrays: list[jax.Array]
    first: jax.Array
    slot: jax.Array


def _classes(heads: _Heads, packed: AttentionSegments) -> tuple[LengthClass, ...]:
    rows, queries = heads.query.shape[:2]
    keys = heads.key.shape[1]
    return length_classes((rows, queries), (rows, keys), packed.lengths, packed.longest_key)


def _cudnn_arguments(
    heads: _Heads, packed: AttentionSegments, length_class: LengthClass
) -> CudnnArguments:
    query, key, value = heads
    length = packed.query.length.reshape(-1)
    belongs = (length > length_class.above) & (length <= length_class.longest)
    slot, segment, used = _slots(belongs, length_class.slots)
    windows = length_class.windows
    # With fewer than two slots per row, JAX treats the rows as unpacked.
    slots = max(2, -(-length_class.slots // windows.number))
    padding = slots * windows.number - length_class.slots
    empty, token_shape = jnp.zeros(0, query.dtype), query.shape[-2:]
    firsts, lengths, offsets = [], [], []
    for segments, size in ((packed.query, windows.queries), (packed.key, windows.keys)):
        total = size * windows.number
        first = jnp.where(used, _first_tokens(segments)[segment], total)
        first = jnp.pad(first, (0, padding + windows.number), constant_values=total)
        used_length = jnp.where(used, segments.length.reshape(-1)[segment], 0)
        firsts.append(first)
        lengths.append(jnp.pad(used_length, (0, padding)).reshape(-1, slots))
        offsets.append((first * math.prod(token_shape)).reshape(-1, slots + 1))
    arrays = [
        query.reshape(-1, windows.queries, *token_shape),
        *(part.reshape(-1, windows.keys, *token_shape) for part in (key, value)),
        empty,
        *lengths,
        *offsets,
        empty,
        empty,
    ]
    return CudnnArguments(arrays, firsts[0][: slots * windows.number], slot)


def _slots(belongs: jax.Array, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each segment's slot [R·M], each slot's segment and whether it has one, [slots]."""
    slot = jnp.cumsum(belongs, dtype=jnp.int32) - 1
    segment = jnp.zeros(slots, jnp.int32)
    segment = segment.at[jnp.where(belongs, slot, slots)].set(
        jnp.arange(belongs.size, dtype=jnp.int32), mode="drop"
    )
    return slot, segment, jnp.arange(slots) <= slot[-1]


def _select_by_class(
    classes: Sequence[LengthClass],
    packed: AttentionSegments,
    side: Segments,
    found: Sequence[jax.Array],
) -> jax.Array:
    """Selects for each token the value of its segment's class; zero outside segments.

    Args:
      classes: classes of segments, shortest first.
      packed: positions of the segments.
      side: the segments of queries or of keys.
      found: for each class, values [R·S, ...] of the tokens of that side.
    """
    queries = packed.query.length.reshape(-1)[_segment_of_token(side)]
    queries = jnp.where(side.ids.reshape(-1) == PADDING, 0, queries)
    longer = [(queries > each.above).astype(jnp.int32) for each in classes]
    # Of the longest class, which holds most tokens as a rule, nothing but padding is written.
    return choose_rows(found, sum(longer) - jnp.int32(1))


def _flat(x: jax.Array) -> jax.Array:
    """[rows, tokens, ...] → [rows·tokens, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _first_tokens(segments: Segments) -> jax.Array:
    """Returns the first token of each segment, [R·M] int32, counted over all rows.

    The first token of an unused slot is the end of its row.
    """
    rows, tokens = segments.ids.shape
    offset = jnp.where(segments.length > 0, segments.offset, tokens)
    return (offset + jnp.arange(rows, dtype=jnp.int32)[:, None] * tokens).reshape(-1)


def _segment_of_token(segments: Segments) -> jax.Array:
    """Returns the segment of each token, [R·S] int32, counted over all rows.

    Padding tokens get the first segment of their row.
    """
    row = jnp.arange(len(segments.ids), dtype=jnp.int32)[:, None]
    return (jnp.maximum(segments.ids, 0) + row * segments.offset.shape[1]).reshape(-1)


def _to_tokens(statistics: jax.Array, segments: Segments, slot: jax.Array) -> jax.Array:
    """[slots, num_heads, window] → [R·S, num_heads]; undefined for tokens of other classes."""
    tokens = jnp.arange(segments.ids.size, dtype=jnp.int32)
    segment = _segment_of_token(segments)
    place = tokens - _first_tokens(segments)[segment]
    # Only tokens of other classes are out of bounds.
    return statistics.at[slot[segment], :, place].get(mode="clip")


def _to_slots(statistics: jax.Array, first: jax.Array, window: int) -> jax.Array:
    """Inverts `_to_tokens`: [R·S, num_heads] → [slots, num_heads, window]."""
    token = jnp.minimum(first[:, None] + jnp.arange(window), len(statistics) - 1)
    return statistics[token].transpose(0, 2, 1)
