"""Attention within the segments of packed rows: cuDNN's kernel, and the same in plain XLA.

JAX has cuDNN's packed (variable-length) attention in a private module only; this file alone
touches it, and says so where a version of JAX lacks it.
"""

import importlib
import inspect
import math
from types import ModuleType

import jax
import jax.numpy as jnp

from alload_jax.models.segments import PADDING, Segments

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_ARGUMENTS = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "mask_type", "scale"}
_LEAST_CAPABILITY = 9.0
"""cuDNN has packed attention, forward and backward, from Hopper on."""
_MOST_ELEMENTS = 2**31
"""Of queries or keys: offsets are 32-bit counts of elements."""


def packed_obstacle(query: jax.Array, key: jax.Array) -> str:
    """Why cuDNN's packed attention can't take these; empty when it can."""
    if _private_module() is None:
        return f"JAX {jax.__version__} has no packed attention in {_MODULE}"
    capability = float(jax.local_devices()[0].compute_capability)
    if capability < _LEAST_CAPABILITY:
        return f"it needs compute capability {_LEAST_CAPABILITY}, and this GPU has {capability}"
    elements = max(math.prod(query.shape), math.prod(key.shape))
    if elements >= _MOST_ELEMENTS:
        return f"queries or keys have {elements} elements, not below 2^31"
    return ""


def cudnn_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, queries: Segments, keys: Segments
) -> jax.Array:
    """cuDNN's packed attention; shapes as `xla_packed`.

    cuDNN leaves what lies outside segments unwritten, in outputs and gradients alike: it is set to
    zero here, in the output and, by the gradient of the same, in those of all three inputs.
    """
    module = _private_module()
    assert module is not None
    of_query = queries.ids(query.shape[1]) != PADDING
    of_key = keys.ids(key.shape[1]) != PADDING
    query, key, value = _only(of_query, query), _only(of_key, key), _only(of_key, value)
    q_seqlen, q_offsets = _for_cudnn(queries)
    kv_seqlen, kv_offsets = _for_cudnn(keys)
    output = module.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=q_seqlen,
        kv_seqlen=kv_seqlen,
        q_offsets=q_offsets,
        kv_offsets=kv_offsets,
        scale=1 / math.sqrt(query.shape[-1]),
        mask_type=module.MaskType.PADDING,
    )
    return _only(of_query, output)


def xla_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, queries: Segments, keys: Segments
) -> jax.Array:
    """softmax(query·keyᵀ/√head_dim)·value within segments, in float32, all pairs computed.

    What is not finite in one segment stays there: 0·NaN of a masked pair is not added up.

    Args:
      query: [R, S, num_heads, head_dim].
      key, value: [R, T, num_heads, head_dim].
      queries, keys: where segments lie among queries and keys.

    Returns:
      [R, S, num_heads, head_dim] in the query's dtype; zeros outside segments.
    """
    of_query, of_key = queries.ids(query.shape[1]), keys.ids(key.shape[1])
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
    return output.astype(query.dtype)


def _only(inside: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(inside[..., None, None], x, jnp.zeros((), x.dtype))


def _for_cudnn(segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Lengths [R, M] and offsets [R, M + 1], −1 in unused places; M at least 2, as cuDNN has it."""
    length, offset = segments.length, segments.offset
    if length.shape[1] == 1:
        length, offset = (jnp.pad(part, ((0, 0), (0, 1))) for part in (length, offset))
    used = length > 0
    offset = jnp.where(used, offset, -1)
    return jnp.where(used, length, -1), jnp.pad(offset, ((0, 0), (0, 1)), constant_values=-1)


def _private_module() -> ModuleType | None:
    """JAX's module of cuDNN attention, if it still has what is needed here."""
    try:
        module = importlib.import_module(_MODULE)
        arguments = set(inspect.signature(module.dot_product_attention).parameters)
    except (ImportError, AttributeError):
        return None
    return module if arguments >= _ARGUMENTS and hasattr(module, "MaskType") else None
