"""cuDNN's fused attention: the primitives behind it, and attention of dense rows.

JAX's public function wraps the primitives so that XLA may split them over a mesh, which binds a
program to its devices while it is lowered. Here `shard_map` splits them instead: a program that is
lowered once serves every group of devices. JAX has packed attention in a private module only. Only
this file uses that module, and it reports when a version of JAX lacks it.
"""

import importlib
import inspect
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alload_jax.models.common.remat import ATTENTION_OUTPUT, SHORT_ATTENTION_OUTPUT
from alload_jax.planning.remat import HOST_KEYS
from pallas_kernels.devices import current_device

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_ARRAYS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v"),
)
_OPTIONS = (
    *("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout"),
    "sliding_window_length",
)
_FORWARD, _BACKWARD = "_dot_product_attention_fwd", "_dot_product_attention_bwd"
_PRIMITIVES = {
    _FORWARD: (*_ARRAYS, *_OPTIONS, "is_training"),
    _BACKWARD: (*_ARRAYS, "activation", "fwd_output", "grad_output", *_OPTIONS),
}
"""The private primitives by name prefix, and their parameters."""
HOPPER = 9.0
"""Compute capability of NVIDIA Hopper."""


def unsupported_reason(query: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Returns why cuDNN's fused attention cannot run on such a query; empty if it can."""
    head_dim = query.shape[-1]
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()!r}, not 'gpu'"
    if _private_module() is None:
        return f"JAX {jax.__version__} lacks the expected attention in {_MODULE}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its dtype is {query.dtype}, not bfloat16 or float16"
    most = 128 if (capability() or HOPPER) < HOPPER else 256
    if head_dim % 8 or head_dim > most:
        return f"head_dim is {head_dim}, not a multiple of 8 up to {most}"
    return ""


def capability() -> float | None:
    """Compute capability of the GPU to run on; None if it is not NVIDIA's."""
    try:
        return float(current_device().compute_capability)
    except (AttributeError, ValueError):
        return None


Lengths = tuple[jax.Array, jax.Array] | None
"""Tokens of queries and of keys, int32: [B] each, or by slot; None for all tokens."""


@jax.custom_vjp
def cudnn_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: Lengths = None
) -> jax.Array:
    """Attention of dense rows; outputs and gradients of masked tokens are undefined.

    Args:
      query: [B, S, num_heads, head_dim] with even S, in bfloat16 or float16.
      key, value: [B, T, num_heads, head_dim] with even T.
      lengths: the first tokens of each row that are not masked.
    """
    return forward(_arrays(query, key, value, lengths), is_training=False)[0]


def _forward_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: Lengths
) -> tuple[jax.Array, Any]:
    name = ATTENTION_OUTPUT if key.shape[1] >= HOST_KEYS else SHORT_ATTENTION_OUTPUT
    found = forward(_arrays(query, key, value, lengths), is_training=True)
    output, statistics = (checkpoint_name(each, name) for each in found)
    return output, (query, key, value, lengths, output, statistics)


def _backward_rule(saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    *arrays, output, statistics = saved
    return *backward(_arrays(*arrays), statistics, output, grad), None


cudnn_rows.defvjp(_forward_rule, _backward_rule)


def _arrays(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: Lengths
) -> list[jax.Array]:
    empty = jnp.zeros(0, query.dtype)
    return [query, key, value, empty, *(lengths or (empty, empty)), *[empty] * 4]


def forward(arrays: Sequence[jax.Array], *, is_training: bool) -> list[jax.Array]:
    """Returns the output, shaped like the query, and in training the softmax statistics.

    Args:
      arrays: of the primitives, in the order of `_ARRAYS`; of size 0 where there is none.
      is_training: whether the statistics are wanted.
    """
    return _primitive(_FORWARD).bind(*arrays, **_options(arrays), is_training=is_training)


def backward(
    arrays: Sequence[jax.Array], statistics: jax.Array, output: jax.Array, grad: jax.Array
) -> list[jax.Array]:
    """Returns the gradients of query, key and value; arguments as `forward` takes and returns."""
    return _primitive(_BACKWARD).bind(*arrays, statistics, output, grad, **_options(arrays))


def _options(arrays: Sequence[jax.Array]) -> dict[str, Any]:
    module = _private_module()
    assert module is not None
    masks = module.MaskType
    return {
        "scale": 1 / math.sqrt(arrays[0].shape[-1]),
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": masks.PADDING if arrays[4].size else masks.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }


def _primitive(name: str) -> Any:
    return getattr(_private_module(), f"{name}_p")


def _private_module() -> ModuleType | None:
    """Returns JAX's module of cuDNN attention if its primitives have the expected parameters."""
    try:
        module = importlib.import_module(_MODULE)
        for name, known in _PRIMITIVES.items():
            lowering = inspect.signature(getattr(module, f"{name}_cuda_lowering"))
            if tuple(lowering.parameters)[1:] != known or not hasattr(module, f"{name}_p"):
                return None
        kinds = module.MaskType.PADDING, module.MaskType.NO_MASK, module.AttentionLayout.BTNH
    except (ImportError, AttributeError):
        return None
    return module if all(kind is not None for kind in kinds) else None
