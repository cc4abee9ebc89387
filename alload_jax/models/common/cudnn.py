"""cuDNN's fused attention: of dense rows, and within the segments of packed rows.

XLA has it as custom calls, which this file makes itself. JAX's public function has no packed rows,
and wraps its calls so that XLA may split them over a mesh, for which JAX binds every program that
holds them to its devices while it is lowered. Here `shard_map` splits the calls: a program that is
lowered once serves every group of devices. (Read for facts: `CudnnfMHABackendConfig` of XLA's
backend_configs.proto, and jax/_src/cudnn/fused_attention_stablehlo.py.)

For every slot of packed rows, cuDNN launches blocks and allocates memory for the full length of its
rows: a slot for a segment of 256 tokens costs as much as one for 300,000. One call for each class
of lengths, with rows as short as the class allows, keeps the cost proportional to the tokens. Only
the softmax statistics of each token's own segment are kept.
"""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from alload_jax.models.common.parts import ATTENTION_OUTPUT, SHORT_ATTENTION_OUTPUT
from alload_jax.models.common.segments import PADDING, AttentionSegments, Lengths, Segments
from alload_jax.planning.remat import HOST_KEYS
from pallas_kernels import choose_rows
from pallas_kernels.devices import current_device, device_kind

HOPPER = 9.0
"""Compute capability of NVIDIA Hopper."""


def unsupported_reason(query: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Returns why cuDNN's fused attention cannot run on such a query; empty if it can."""
    head_dim = query.shape[-1]
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()!r}, not 'gpu'"
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


RowLengths = tuple[jax.Array, jax.Array] | None
"""Tokens of queries and of keys, int32: [B] each, or by slot; None for all tokens."""


@jax.custom_vjp
def cudnn_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: RowLengths = None
) -> jax.Array:
    """Attention of dense rows; outputs and gradients of masked tokens are undefined.

    Args:
      query: [B, S, num_heads, head_dim] with even S, in bfloat16 or float16.
      key, value: [B, T, num_heads, head_dim] with even T.
      lengths: the first tokens of each row that are not masked.
    """
    return forward(CudnnInputs(query, key, value, lengths), is_training=False)[0]


def _rows_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: RowLengths
) -> tuple[jax.Array, PyTree]:
    name = ATTENTION_OUTPUT if key.shape[1] >= HOST_KEYS else SHORT_ATTENTION_OUTPUT
    found = forward(CudnnInputs(query, key, value, lengths), is_training=True)
    output, statistics = (checkpoint_name(each, name) for each in found)
    return output, (query, key, value, lengths, output, statistics)


def _rows_backward(saved: PyTree, grad: jax.Array) -> tuple[PyTree, ...]:
    *arrays, output, statistics = saved
    return *backward(CudnnInputs(*arrays), statistics, output, grad), None


cudnn_rows.defvjp(_rows_forward, _rows_backward)


# ---------------------------------------------------------------- XLA's calls

_FORWARD, _BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
_Contraction = tuple[int, int, tuple[int, int], tuple[int, int]]
_PRODUCTS: dict[str, dict[str, _Contraction]] = {
    _FORWARD: {
        "bmm1": (3, 3, (0, 2), (0, 2)),  # queries · keys
        "bmm2": (3, 1, (0, 1), (0, 2)),  # weights · values
    },
    _BACKWARD: {
        "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),  # gradients of scores · queries
        "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),  # of scores · keys
        "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),  # weights · gradients of outputs
        "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),  # of outputs · values
    },
}
"""What each call multiplies: contracted and batch dimensions of both sides."""
_HEADS_OUTSIDE = (0, 2, 1, 3)
"""Order of results [rows, num_heads, S, head_dim] in memory, and what makes them like the query."""


class CudnnInputs(NamedTuple):
    """What is attended with.

    Attributes:
      query: [rows, S, num_heads, head_dim], bfloat16 or float16.
      key, value: [rows, T, num_heads, head_dim].
      lengths: tokens of queries and of keys of each row, or of its slots, [rows, slots].
      offsets: of slots, those of queries and of keys: elements in all rows before a slot's tokens,
        int32 [rows, slots + 1]; None where a row is one slot.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    lengths: RowLengths = None
    offsets: tuple[jax.Array, jax.Array] | None = None

    @property
    def slots(self) -> int:
        """Segments of each row."""
        return self.offsets[0].shape[1] - 1 if self.offsets else 1


def forward(inputs: CudnnInputs, *, is_training: bool) -> list[jax.Array]:
    """Returns the output, shaped like the query, and in training the softmax statistics.

    Args:
      inputs: queries, keys and values.
      is_training: whether the statistics are wanted: float32 [rows · slots, num_heads, S].
    """
    rows, tokens, num_heads, _ = inputs.query.shape
    statistics = jax.ShapeDtypeStruct((rows * inputs.slots, num_heads, tokens), jnp.float32)
    results = [_result_like(inputs.query), *([statistics] if is_training else [])]
    return _call(_FORWARD, inputs, inputs[:3], results)


def backward(
    inputs: CudnnInputs, statistics: jax.Array, output: jax.Array, grad: jax.Array
) -> list[jax.Array]:
    """Returns the gradients of query, key and value; arguments as `forward` takes and returns."""
    operands = (*inputs[:3], statistics, grad, output)
    return _call(_BACKWARD, inputs, operands, [_result_like(each) for each in inputs[:3]])


def _result_like(x: jax.Array) -> jax.ShapeDtypeStruct:
    rows, tokens, num_heads, head_dim = x.shape
    return jax.ShapeDtypeStruct((rows, num_heads, tokens, head_dim), x.dtype)


def _call(
    target: str,
    inputs: CudnnInputs,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    call = jax.ffi.ffi_call(
        target,
        (*results, workspace),
        output_layouts=[_HEADS_OUTSIDE if len(each.shape) == 4 else None for each in results]
        + [None],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(_config(target, inputs)),
    )
    *found, _ = call(*operands, *(inputs.lengths or ()), *(inputs.offsets or ()))
    return [x.transpose(_HEADS_OUTSIDE) if x.ndim == 4 else x for x in found]


def _config(target: str, inputs: CudnnInputs) -> dict[str, PyTree]:
    """XLA's `GpuBackendConfig` of a call; 64-bit numbers are text in JSON."""
    rows, tokens, num_heads, head_dim = inputs.query.shape
    products = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": list(map(str, of_left)),
            "rhs_batch_dimensions": list(map(str, of_right)),
        }
        for name, (left, right, of_left, of_right) in _PRODUCTS[target].items()
    }
    scores = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[inputs.query.dtype.name],
        "dimensions": list(map(str, (rows, num_heads, tokens, inputs.key.shape[1]))),
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": 1 / math.sqrt(head_dim),
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "PADDING" if inputs.lengths else "NO_MASK",
        **products,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": inputs.slots,
        "is_paged_attention": False,
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}


# ---------------------------------------------------------------- packed rows

_WINDOWS = 64
"""Maximum number of windows per row."""
_WINDOW_MULTIPLE = 8
_CLASS_COST = 4
"""Cost of each additional class, in passes over the tokens: outputs and gradients are merged."""


class LengthClass(NamedTuple):
    """Segments with more than `above` and at most `longest` query tokens.

    cuDNN gets the packed rows as windows, each as long as the longest segment. Offsets of segments
    count over all rows, and a segment may extend from one window into the next.

    Attributes:
      above: lower bound in tokens, exclusive; 0 for the shortest class.
      longest: upper bound in tokens, inclusive.
      slots: maximum number of such segments in all rows.
      windows: number of windows.
      queries: query tokens per window.
      keys: key tokens per window.
    """

    above: int
    longest: int
    slots: int
    windows: int
    queries: int
    keys: int

    @property
    def launched(self) -> int:
        """Query tokens for which cuDNN launches blocks and allocates memory."""
        return self.slots * self.queries


def length_classes(
    queries: tuple[int, int], keys: tuple[int, int], lengths: Lengths, longest_key: int | None
) -> tuple[LengthClass, ...]:
    """Chooses the classes with the lowest cost, shortest segments first.

    Args:
      queries, keys: (rows, tokens) of queries and of keys.
      lengths: bounds on the lengths of the query segments in each row.
      longest_key: upper bound on the key tokens of a segment; None if queries and keys have equal
        lengths.
    """
    passes = _CLASS_COST * math.prod(queries)
    # For each length: the lowest cost of classes up to that length, and those classes.
    best: list[tuple[int, tuple[LengthClass, ...]]] = [(0, ())]
    for longest, _ in lengths[1:]:
        windows = _windows_for(queries, keys, (longest, longest_key or longest))
        found = []
        for (above, most), (cost, shorter) in zip(lengths, best, strict=False):
            each = LengthClass(above, longest, queries[0] * most, *windows)
            found.append((cost + each.launched + passes, (*shorter, each)))
        best.append(min(found, key=lambda classes: classes[0]))
    return best[-1][1]


def launched_tokens(rows: int, tokens: int, lengths: Lengths) -> int:
    """Query tokens of the largest call of cuDNN for self-attention within packed rows.

    Its backward pass holds float32 gradients of queries for so many tokens.
    """
    classes = length_classes((rows, tokens), (rows, tokens), lengths, None)
    return max(each.launched for each in classes)


def _windows_for(
    queries: tuple[int, int], keys: tuple[int, int], longest: tuple[int, int]
) -> tuple[int, int, int]:
    """Returns number, queries and keys of the shortest windows that hold the longest segments.

    Args:
      queries, keys: (rows, tokens) of queries and of keys.
      longest: maximum number of query tokens and of key tokens in a segment.
    """
    totals = math.prod(queries), math.prod(keys)
    for count in range(_WINDOWS * queries[0], 0, -1):
        if all(
            total % (count * _WINDOW_MULTIPLE) == 0 and total // count >= most
            for total, most in zip(totals, longest, strict=True)
        ):
            return count, totals[0] // count, totals[1] // count
    # The lengths are not multiples, as in some tests.
    return queries[0], queries[1], keys[1]


_MAX_ELEMENTS = 2**31
"""Upper bound on the elements of queries or keys: offsets are 32-bit counts of elements."""


def packed_unsupported_reason(elements: int = 0) -> str:
    """Returns why cuDNN cannot run packed rows on this GPU, from Hopper on; empty if it can.

    Args:
      elements: number of elements of queries or keys on one device, whichever is larger.
    """
    version = capability()
    if version is None:
        return f"it needs an NVIDIA GPU, and this is {device_kind()}"
    if version < HOPPER:
        return f"it needs compute capability {HOPPER}, and this GPU has {version}"
    if elements >= _MAX_ELEMENTS:
        return f"queries or keys have {elements} elements, not below 2^31"
    return ""


@jax.custom_vjp
def cudnn_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> jax.Array:
    """Computes `xla_packed` with cuDNN; outputs that cuDNN does not write are zero."""
    return _forward((query, key, value), packed, is_training=False)[0]


_Heads = tuple[jax.Array, jax.Array, jax.Array]
"""query: [R, S, num_heads, head_dim]; key and value: [R, T, num_heads, head_dim]."""


def _forward(heads: _Heads, packed: AttentionSegments, is_training: bool) -> list[jax.Array]:
    """Returns the output, shaped like the query, and in training statistics [R·S, num_heads]."""
    classes, outputs, statistics = _classes(heads, packed), [], []
    for length_class in classes:
        inputs, _, slot = _inputs(heads, packed, length_class)
        output, *by_slot = forward(inputs, is_training=is_training)
        outputs.append(_flat(output))
        statistics += [_to_tokens(part, packed.query, slot) for part in by_slot]
    output = _select_by_class(classes, packed, packed.query, outputs).reshape(heads[0].shape)
    if not is_training:
        return [output]
    return [output, _select_by_class(classes, packed, packed.query, statistics)]


def _packed_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, packed: AttentionSegments
) -> tuple[jax.Array, PyTree]:
    heads = query, key, value
    found = _forward(heads, packed, is_training=True)
    output, statistics = (checkpoint_name(each, ATTENTION_OUTPUT) for each in found)
    return output, (heads, packed, output, statistics)


def _packed_backward(saved: PyTree, grad: jax.Array) -> tuple[PyTree, ...]:
    heads, packed, output, statistics = saved
    classes, grads = _classes(heads, packed), []
    for length_class in classes:
        inputs, first, _ = _inputs(heads, packed, length_class)
        # [R·S, num_heads] → [slots, num_heads, window], which inverts `_to_tokens`.
        token = first[:, None] + jnp.arange(length_class.queries)
        token = jnp.minimum(token, len(statistics) - 1)
        found = backward(
            inputs,
            statistics[token].transpose(0, 2, 1),
            *(part.reshape(inputs.query.shape) for part in (output, grad)),
        )
        grads.append([_flat(part) for part in found])
    sides = (packed.query, packed.key, packed.key)
    parts = zip(sides, zip(*grads, strict=True), heads, strict=True)
    selected = (
        _select_by_class(classes, packed, side, by_class).reshape(like.shape)
        for side, by_class, like in parts
    )
    return (*selected, None)


cudnn_packed.defvjp(_packed_forward, _packed_backward)


def _classes(heads: _Heads, packed: AttentionSegments) -> tuple[LengthClass, ...]:
    queries, keys = ((x.shape[0], x.shape[1]) for x in heads[:2])
    return length_classes(queries, keys, packed.lengths, packed.longest_key)


def _inputs(
    heads: _Heads, packed: AttentionSegments, length_class: LengthClass
) -> tuple[CudnnInputs, jax.Array, jax.Array]:
    """What cuDNN attends with for one class of segments.

    Returns:
      The inputs; [n] int32, the first query token of each slot's segment, counted
      over all rows; [R·M] int32, the slot of each segment, meaningless for those of other classes.
    """
    query, key, value = heads
    length = packed.query.length.reshape(-1)
    belongs = (length > length_class.above) & (length <= length_class.longest)
    # The slot of each segment; the segment of each slot, and whether it has one.
    slot, count = jnp.cumsum(belongs, dtype=jnp.int32) - 1, length_class.slots
    segment = jnp.zeros(count, jnp.int32)
    segment = segment.at[jnp.where(belongs, slot, count)].set(
        jnp.arange(belongs.size, dtype=jnp.int32), mode="drop"
    )
    used, windows = jnp.arange(count) <= slot[-1], length_class.windows
    # With fewer than two slots per row, XLA treats the rows as unpacked.
    slots = max(2, -(-count // windows))
    padding = slots * windows - count
    token_shape = query.shape[-2:]
    firsts, lengths, offsets = [], [], []
    for segments, size in ((packed.query, length_class.queries), (packed.key, length_class.keys)):
        total = size * windows
        first = jnp.where(used, _first_tokens(segments)[segment], total)
        first = jnp.pad(first, (0, padding + windows), constant_values=total)
        used_length = jnp.where(used, segments.length.reshape(-1)[segment], 0)
        firsts.append(first)
        lengths.append(jnp.pad(used_length, (0, padding)).reshape(-1, slots))
        offsets.append((first * math.prod(token_shape)).reshape(-1, slots + 1))
    keys, values = (part.reshape(-1, length_class.keys, *token_shape) for part in (key, value))
    inputs = CudnnInputs(
        query.reshape(-1, length_class.queries, *token_shape),
        keys,
        values,
        (lengths[0], lengths[1]),
        (offsets[0], offsets[1]),
    )
    return inputs, firsts[0][: slots * windows], slot


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
