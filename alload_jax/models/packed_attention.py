"""Attention within the segments of packed rows: cuDNN's kernel, and the same in plain XLA.

JAX has cuDNN's packed (variable-length) attention in a private module only; this file alone
touches it, and says so where a version of JAX lacks it. It uses the module's primitives rather
than its function for the sake of two things that grow with slots times tokens: what cuDNN launches
for the longest segment possible, which is bounded here by the longest there is, and the softmax
statistics, of which each token's own are kept.
"""

import importlib
import inspect
import math
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alload_jax.models.remat import ATTENTION_OUTPUT
from alload_jax.models.segments import PADDING, Packed, Segments

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
WINDOWS = 64
"""Most windows that a row is shown as."""
_WINDOW_MULTIPLE = 8


def packed_obstacle(elements: int = 0) -> str:
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


def cudnn_packed(query: jax.Array, key: jax.Array, value: jax.Array, packed: Packed) -> jax.Array:
    """cuDNN's packed attention; as `xla_packed` where every query belongs to a segment.

    Of keys and values outside segments cuDNN leaves gradients unwritten: they are zero here.
    """
    inside = packed.key.ids != PADDING
    key, value = _zero_gradients_outside(inside, key), _zero_gradients_outside(inside, value)
    return _fused(query, key, value, packed)


def xla_packed(query: jax.Array, key: jax.Array, value: jax.Array, packed: Packed) -> jax.Array:
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


class _Windows(NamedTuple):
    """How cuDNN is shown packed rows: as `number` rows, each as long as a segment may be.

    cuDNN launches blocks for every slot up to the end of a row. Segments lie at offsets counted
    over all rows, and may cross from one of these windows to the next.
    """

    number: int
    queries: int
    keys: int


def _windows(queries: tuple[int, ...], keys: tuple[int, ...], longest: tuple[int, int]) -> _Windows:
    """The most windows that the longest segments fit into, from (rows, tokens) of both."""
    totals = math.prod(queries), math.prod(keys)
    for count in range(WINDOWS * queries[0], 0, -1):
        sizes = [total // count for total in totals]
        whole = not any(total % count for total in totals)
        if whole and all(
            size >= most and size % _WINDOW_MULTIPLE == 0
            for size, most in zip(sizes, longest, strict=True)
        ):
            return _Windows(count, *sizes)
    # Lengths that are no multiples, such as in tests.
    return _Windows(queries[0], queries[1], keys[1])


@jax.custom_vjp
def _fused(query: jax.Array, key: jax.Array, value: jax.Array, packed: Packed) -> jax.Array:
    return _forward(_Heads(query, key, value), packed, is_training=False)[0]


def _forward(heads: _Heads, packed: Packed, is_training: bool) -> list[jax.Array]:
    """Output like the query and, in training, statistics [slots, num_heads, window]."""
    arrays, query = _arrays(heads, packed), heads.query
    options = _options(query.shape[-1]) | {"is_training": is_training}
    output, *statistics = _primitive("_dot_product_attention_fwd").bind(*arrays, **options)
    return [output.reshape(query.shape), *statistics]


def _forward_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: Packed
) -> tuple[jax.Array, Any]:
    heads = _Heads(query, key, value)
    output, statistics = _forward(heads, packed, is_training=True)
    output = checkpoint_name(output, ATTENTION_OUTPUT)
    slot, place = _slot_and_place(packed.query)
    own = checkpoint_name(statistics[slot, :, place], ATTENTION_OUTPUT)
    return output, (heads, packed, output, own)


def _backward_rule(saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    heads, packed, output, own = saved
    arrays = _arrays(heads, packed)
    window, slots = arrays[0].shape[1], arrays[4].size
    token = _first_tokens(packed.query)[:, None] + jnp.arange(window)
    token = jnp.pad(token, ((0, slots - len(token)), (0, 0)))
    statistics = own[jnp.minimum(token, len(own) - 1)].transpose(0, 2, 1)
    grads = _primitive("_dot_product_attention_bwd").bind(
        *arrays,
        statistics,
        *(part.reshape(arrays[0].shape) for part in (output, grad)),
        **_options(heads.query.shape[-1]),
    )
    shaped = (found.reshape(like.shape) for found, like in zip(grads, heads, strict=True))
    return (*shaped, None)


_fused.defvjp(_forward_rule, _backward_rule)


def _first_tokens(segments: Segments) -> jax.Array:
    """[R·M] int32: where segments begin, counted over all rows; unused slots at their row's end."""
    rows, tokens = segments.ids.shape
    offset = jnp.where(segments.length > 0, segments.offset, tokens)
    return (offset + jnp.arange(rows, dtype=jnp.int32)[:, None] * tokens).reshape(-1)


def _slot_and_place(segments: Segments) -> tuple[jax.Array, jax.Array]:
    """[R·T] int32 each: the slot of each token, over all rows, and its place in the segment."""
    rows, tokens = segments.ids.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    ids = jnp.maximum(segments.ids, 0)
    place = jnp.arange(tokens, dtype=jnp.int32) - jnp.take_along_axis(segments.offset, ids, axis=1)
    return (ids + row * segments.offset.shape[1]).reshape(-1), jnp.maximum(place, 0).reshape(-1)


def _arrays(heads: _Heads, packed: Packed) -> list[jax.Array]:
    """The primitives' arrays, as `_ARRAYS` names them."""
    query, key, value = heads
    windows = _windows(query.shape[:2], key.shape[:2], packed.longest)
    none, of_token = jnp.zeros(0, query.dtype), query.shape[-2:]
    # At least two, below which JAX takes rows for unpacked.
    slots = max(2, -(-packed.query.offset.size // windows.number))
    lengths, offsets = [], []
    for segments, size in ((packed.query, windows.queries), (packed.key, windows.keys)):
        spare = slots * windows.number - segments.offset.size
        first = jnp.pad(
            _first_tokens(segments),
            (0, spare + windows.number),
            constant_values=size * windows.number,
        )
        lengths.append(jnp.pad(segments.length.reshape(-1), (0, spare)).reshape(-1, slots))
        offsets.append((first * math.prod(of_token)).reshape(-1, slots + 1))
    return [
        query.reshape(-1, windows.queries, *of_token),
        *(part.reshape(-1, windows.keys, *of_token) for part in (key, value)),
        none,
        *lengths,
        *offsets,
        none,
        none,
    ]


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


@jax.custom_vjp
def _zero_gradients_outside(inside: jax.Array, x: jax.Array) -> jax.Array:
    """x: [R, T, num_heads, head_dim], whose gradient is zero where `inside` [R, T] is not."""
    del inside
    return x


_zero_gradients_outside.defvjp(
    lambda inside, x: (x, inside),
    lambda inside, grad: (None, jnp.where(inside[..., None, None], grad, jnp.zeros_like(grad))),
)


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
