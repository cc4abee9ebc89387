"""Attention within the segments of packed rows: cuDNN's kernel, and the same in plain XLA.

JAX has cuDNN's packed (variable-length) attention in a private module only; this file alone
touches it, and says so where a version of JAX lacks it. It uses the module's primitives rather
than its function for the sake of what grows with slots times tokens: the blocks and the memory of
cuDNN, which is called once for each class of lengths, and the softmax statistics, of which each
token's own are kept.
"""

import importlib
import inspect
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alload_jax.models.common.length_classes import LengthClass, length_classes
from alload_jax.models.common.remat import ATTENTION_OUTPUT
from alload_jax.models.common.segments import PADDING, AttentionSegments, Segments

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_ARRAYS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v"),
)
_OPTIONS = (
    *("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout"),
    "sliding_window_length",
)
_PRIMITIVES = {
    "_dot_product_attention_fwd": (*_ARRAYS, *_OPTIONS, "is_training"),
    "_dot_product_attention_bwd": (*_ARRAYS, "activation", "fwd_output", "grad_output", *_OPTIONS),
}
"""The private primitives, by the beginning of their names, and what they take."""
_LEAST_CAPABILITY = 9.0
"""cuDNN has packed attention, forward and backward, from Hopper on."""
_MOST_ELEMENTS = 2**31
"""Of queries or keys: offsets are 32-bit counts of elements."""


def packed_unsupported_reason(elements: int = 0) -> str:
    """Why cuDNN's packed attention can't run here; empty when it can.

    Args:
      elements: of the queries or the keys on one device, whichever are more.
    """
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()!r}, not 'gpu'"
    if _private_module() is None:
        return f"JAX {jax.__version__} has no packed attention as it is known in {_MODULE}"
    try:
        capability = float(jax.local_devices()[0].compute_capability)
    except (AttributeError, ValueError):  # a GPU that is not NVIDIA's
        return f"it needs an NVIDIA GPU, and this is {jax.local_devices()[0].device_kind}"
    if capability < _LEAST_CAPABILITY:
        return f"it needs compute capability {_LEAST_CAPABILITY}, and this GPU has {capability}"
    if elements >= _MOST_ELEMENTS:
        return f"queries or keys have {elements} elements, not below 2^31"
    return ""


@jax.custom_vjp
def cudnn_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> jax.Array:
    """cuDNN's packed attention, as `xla_packed`; what cuDNN leaves unwritten is zero."""
    return _forward(_Heads(query, key, value), packed, is_training=False)[0]


def xla_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> jax.Array:
    """softmax(query·keyᵀ/√head_dim)·value within segments, in float32, all pairs computed.

    What is not finite in one segment stays there: 0·NaN of a masked pair is not added up.

    Args:
      query: [R, S, num_heads, head_dim].
      key, value: [R, T, num_heads, head_dim].
      packed: where segments lie among queries and keys.

    Returns:
      [R, S, num_heads, head_dim] in the query's dtype; zeros outside segments.
    """
    of_query, of_key = packed.query.ids, packed.key.ids
    allowed = (of_query[:, None, :, None] == of_key[:, None, None, :]) & (of_query != PADDING)[
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
    spoilt = (allowed & ~finite[:, None, None, :]).any(axis=-1)
    output = jnp.where(spoilt.transpose(0, 2, 1)[..., None], jnp.nan, output)
    return checkpoint_name(output.astype(query.dtype), ATTENTION_OUTPUT)


class _Heads(NamedTuple):
    """[R, S, num_heads, head_dim], and [R, T, num_heads, head_dim] twice."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def _forward(heads: _Heads, packed: AttentionSegments, is_training: bool) -> list[jax.Array]:
    """Output like the query and, in training, statistics [R·S, num_heads] of each token."""
    options = _options(heads.query.shape[-1]) | {"is_training": is_training}
    classes, outputs, statistics = _classes(heads, packed), [], []
    for of in classes:
        shown = _shown(heads, packed, of)
        output, *own = _primitive("_dot_product_attention_fwd").bind(*shown.arrays, **options)
        outputs.append(_flat(output))
        statistics += [_of_tokens(found, packed.query, shown.slot) for found in own]
    output = _own(classes, packed, packed.query, outputs).reshape(heads.query.shape)
    return [output, *([_own(classes, packed, packed.query, statistics)] if is_training else [])]


def _forward_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> tuple[jax.Array, Any]:
    heads = _Heads(query, key, value)
    found = _forward(heads, packed, is_training=True)
    output, statistics = (checkpoint_name(each, ATTENTION_OUTPUT) for each in found)
    return output, (heads, packed, output, statistics)


def _backward_rule(saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    heads, packed, output, statistics = saved
    options = _options(heads.query.shape[-1])
    classes, grads = _classes(heads, packed), []
    for of in classes:
        shown = _shown(heads, packed, of)
        like_query = shown.arrays[0].shape
        found = _primitive("_dot_product_attention_bwd").bind(
            *shown.arrays,
            _of_slots(statistics, shown.first, of.windows.queries),
            *(part.reshape(like_query) for part in (output, grad)),
            **options,
        )
        grads.append([_flat(part) for part in found])
    sides = (packed.query, packed.key, packed.key)
    parts = zip(sides, zip(*grads, strict=True), heads, strict=True)
    own = (_own(classes, packed, side, of).reshape(like.shape) for side, of, like in parts)
    return (*own, None)


cudnn_packed.defvjp(_forward_rule, _backward_rule)


class _Shown(NamedTuple):
    """What cuDNN is shown of a class of segments.

    Attributes:
      arrays: the primitives', as `_ARRAYS` names them.
      first: [n] int32, where the segment of each slot begins among queries, counted over all rows.
      slot: [R·M] int32, that of each segment, if it is of the class.
    """

    arrays: list[jax.Array]
    first: jax.Array
    slot: jax.Array


def _classes(heads: _Heads, packed: AttentionSegments) -> tuple[LengthClass, ...]:
    rows, queries = heads.query.shape[:2]
    keys = heads.key.shape[1]
    return length_classes((rows, queries), (rows, keys), packed.lengths, packed.longest_key)


def _shown(heads: _Heads, packed: AttentionSegments, of: LengthClass) -> _Shown:
    query, key, value = heads
    length = packed.query.length.reshape(-1)
    belongs = (length > of.above) & (length <= of.longest)
    slot, segment, used = _slots(belongs, of.slots)
    windows = of.windows
    # At least two, below which JAX takes rows for unpacked.
    slots = max(2, -(-of.slots // windows.number))
    spare = slots * windows.number - of.slots
    none, of_token = jnp.zeros(0, query.dtype), query.shape[-2:]
    firsts, lengths, offsets = [], [], []
    for segments, size in ((packed.query, windows.queries), (packed.key, windows.keys)):
        total = size * windows.number
        first = jnp.where(used, _first_tokens(segments)[segment], total)
        first = jnp.pad(first, (0, spare + windows.number), constant_values=total)
        own = jnp.where(used, segments.length.reshape(-1)[segment], 0)
        firsts.append(first)
        lengths.append(jnp.pad(own, (0, spare)).reshape(-1, slots))
        offsets.append((first * math.prod(of_token)).reshape(-1, slots + 1))
    arrays = [
        query.reshape(-1, windows.queries, *of_token),
        *(part.reshape(-1, windows.keys, *of_token) for part in (key, value)),
        none,
        *lengths,
        *offsets,
        none,
        none,
    ]
    return _Shown(arrays, firsts[0][: slots * windows.number], slot)


def _slots(belongs: jax.Array, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each segment's slot [R·M]; each slot's segment, and whether it has one, [slots]."""
    slot = jnp.cumsum(belongs, dtype=jnp.int32) - 1
    segment = jnp.zeros(slots, jnp.int32)
    segment = segment.at[jnp.where(belongs, slot, slots)].set(
        jnp.arange(belongs.size, dtype=jnp.int32), mode="drop"
    )
    return slot, segment, jnp.arange(slots) <= slot[-1]


def _own(
    classes: Sequence[LengthClass],
    packed: AttentionSegments,
    side: Segments,
    found: Sequence[jax.Array],
) -> jax.Array:
    """Of each token what was found for its segment's class; zero outside segments.

    Args:
      classes: shortest first.
      packed: where segments lie.
      side: its queries or its keys.
      found: for each class [R·S, ...] of that side's tokens.
    """
    queries = packed.query.length.reshape(-1)[_segment_of_token(side)]
    queries = jnp.where(side.ids.reshape(-1) == PADDING, 0, queries)
    chosen = jnp.zeros_like(found[0])
    for of, each in zip(classes, found, strict=True):
        longer = (queries > of.above).reshape(-1, *[1] * (each.ndim - 1))
        chosen = jnp.where(longer, each, chosen)
    return chosen


def _flat(x: jax.Array) -> jax.Array:
    """[rows, tokens, ...] → [rows·tokens, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _first_tokens(segments: Segments) -> jax.Array:
    """[R·M] int32: where segments begin, counted over all rows; unused slots at their row's end."""
    rows, tokens = segments.ids.shape
    offset = jnp.where(segments.length > 0, segments.offset, tokens)
    return (offset + jnp.arange(rows, dtype=jnp.int32)[:, None] * tokens).reshape(-1)


def _segment_of_token(segments: Segments) -> jax.Array:
    """[R·S] int32: counted over all rows; the row's first for tokens of none."""
    row = jnp.arange(len(segments.ids), dtype=jnp.int32)[:, None]
    return (jnp.maximum(segments.ids, 0) + row * segments.offset.shape[1]).reshape(-1)


def _of_tokens(statistics: jax.Array, segments: Segments, slot: jax.Array) -> jax.Array:
    """[slots, num_heads, window] → [R·S, num_heads]; of tokens of other classes anything."""
    tokens = jnp.arange(segments.ids.size, dtype=jnp.int32)
    segment = _segment_of_token(segments)
    place = tokens - _first_tokens(segments)[segment]
    # Out of bounds only where the class is another one.
    return statistics.at[slot[segment], :, place].get(mode="clip")


def _of_slots(statistics: jax.Array, first: jax.Array, window: int) -> jax.Array:
    """The way back, [R·S, num_heads] → [slots, num_heads, window]."""
    token = jnp.minimum(first[:, None] + jnp.arange(window), len(statistics) - 1)
    return statistics[token].transpose(0, 2, 1)


def _options(head_dim: int) -> dict[str, Any]:
    module = _private_module()
    assert module is not None
    return {
        "scale": 1 / math.sqrt(head_dim),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": module.MaskType.PADDING,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }


def _primitive(name: str) -> Any:
    return getattr(_private_module(), f"{name}_p")


def _private_module() -> ModuleType | None:
    """JAX's module of cuDNN attention, if its primitives take what is known here."""
    try:
        module = importlib.import_module(_MODULE)
        for name, known in _PRIMITIVES.items():
            lowering = inspect.signature(getattr(module, f"{name}_cuda_lowering"))
            if tuple(lowering.parameters)[1:] != known or not hasattr(module, f"{name}_p"):
                return None
        kinds = module.MaskType.PADDING, module.AttentionLayout.BTNH
    except (ImportError, AttributeError):
        return None
    return module if all(kinds) else None
