"""LayerNorm-Modulate, the public functions: segments prepared once, checks, implementations."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.implementations import REGISTRY
from pallas_kernels.layernorm_modulate.operands import NormOperands, normalise
from pallas_kernels.op import call_of, is_explicit


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "prepared"),
    meta_fields=("table_rows", "contiguous"),
)
@dataclass(frozen=True)
class Segmentation:
    """`segment_ids` together with what implementations derive from them for one width.

    Attributes:
      ids: [B, S] int32.
      prepared: by name of the implementation, its `prepare_segments`.
      table_rows: M.
      contiguous: whether kernels can serve the segments; XLA serves all.
    """

    ids: jax.Array
    prepared: dict[str, PyTree]
    table_rows: int
    contiguous: bool = True


def segmentation(
    segment_ids: jax.Array,
    table_rows: int,
    width: int,
    sharding: NamedSharding | None = None,
    *,
    contiguous: bool = True,
) -> Segmentation:
    """Prepares segment ids for many calls, such as those of a transformer's layers.

    Finding where segments end takes a dozen small kernels, which every call would otherwise start.

    Args:
      segment_ids: [B, S] signed integers, as `layernorm_modulate` takes them.
      table_rows: M, rows of the tables of scale, shift and gate.
      width: D.
      sharding: of x, if rows are split over a mesh of Auto axes.
      contiguous: False for segments that lie scattered in a row, which then run through XLA.
    """
    ids = segment_ids.astype(jnp.int32)
    if not contiguous:
        return Segmentation(ids, {}, table_rows, contiguous)
    prepared = {
        each.name: each.prepare_segments(ids, table_rows, width, sharding) for each in REGISTRY
    }
    return Segmentation(ids, prepared, table_rows)


def layernorm_modulate(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    *,
    segment_ids: jax.Array | Segmentation | None = None,
    eps: float = 1e-6,
    implementation: str = "auto",
    interpret: bool = False,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """y = LayerNorm(x)·(1 + scale) + shift, the adaptive norm of DiT blocks.

    LayerNorm has no affine parameters of its own. Statistics and modulation are float32; the
    result is rounded once (adaLN of Peebles & Xie, arXiv 2212.09748; the fused kernel after
    AdaptiveLoad, arXiv 2605.17923). Differentiable once in x, scale and shift, in reverse mode.

    Args:
      x: [B, S, D] or [T, D], bfloat16, float16 or float32.
      scale: float32 or x's dtype, one of
        [B, D]: one row for each row of the batch ([1, D] for an x of [T, D]);
        x's shape: one row for each token (Wan 2.2's 5B model);
        [M, D] or [B, M, D] with `segment_ids`: token t takes row `segment_ids[t]`, of a table that
        all rows of the batch share or of its own.
      shift: shaped like scale, float32 or x's dtype.
      segment_ids: x's shape without D, signed integers. Segments are contiguous in a row; negative
        is padding (−1), whose output and gradients are zero. Where segments are not contiguous, or
        not below M, the kernel may give NaN. Where many calls share them, prepare them once with
        `segmentation`, for tables of M rows of width D.
      eps: added to the variance.
      implementation: "triton" (the kernels), "mosaic" (on Hopper GPUs: other kernels where they
        are faster), "xla" (XLA's fusion), the name of one that was registered, or
        "auto": whichever was measured as faster for this device, width and size; XLA where
        nothing was measured.
      interpret: run the kernels ("auto" means "triton" then) in Pallas's interpreter, which is slow
        and needs no GPU.
      sharding: how x is split over a mesh whose axes are Auto, where tracing cannot see it: over
        batch and sequence, D whole. Explicit axes need no such help.

    Returns:
      x's shape and dtype.

    Raises:
      ValueError: a shape or dtype does not fit, or the kernels cannot know how x is split.
      NotImplementedError: this device or this sharding cannot run the kernels.
    """
    _, out = _run(
        "layernorm_modulate",
        NormOperands(x, scale, shift),
        segment_ids,
        implementation,
        sharding,
        eps=eps,
        residual_dtype=None,
        interpret=interpret,
    )
    return out


def residual_layernorm_modulate(
    x: jax.Array,
    y: jax.Array | None,
    gate: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array,
    *,
    residual_dtype: jnp.dtype | None = None,
    segment_ids: jax.Array | Segmentation | None = None,
    eps: float = 1e-6,
    implementation: str = "auto",
    interpret: bool = False,
    sharding: NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h = x + gate·y, then LayerNorm(h)·(1 + scale) + shift: where two halves of a block meet.

    Forward and backward read and write each tensor once. The sum is float32 and rounded once, to
    `residual_dtype`; the norm is that of the rounded h. Without y, h is x: where a residual stream
    begins a block, its two gradients are then added in the norm's backward.

    Args:
      x: [B, S, D] or [T, D], the residual stream; bfloat16, float16 or float32.
      y: x's shape, a branch's output; any of these dtypes. None for h = x.
      gate: shaped like scale, float32 or x's or y's dtype; None for h = x + y, or without y.
      scale: as in `layernorm_modulate`, float32 or x's or y's dtype.
      shift: shaped like scale, float32 or x's or y's dtype.
      residual_dtype: dtype of h, x's or float32; None for x's.
      segment_ids: as in `layernorm_modulate`; a sum h is zero in padding too, and x's gradient is.
      eps: added to the variance.
      implementation: as in `layernorm_modulate`.
      interpret: as in `layernorm_modulate`.
      sharding: as in `layernorm_modulate`.

    Returns:
      h in `residual_dtype` and the modulated value in y's dtype (x's without y), both of x's shape.

    Raises:
      ValueError: a shape or dtype does not fit, or the kernels cannot know how x is split.
      NotImplementedError: this device or this sharding cannot run the kernels.
    """
    h, out = _run(
        "residual_layernorm_modulate",
        NormOperands(x, scale, shift, y=y, gate=gate),
        segment_ids,
        implementation,
        sharding,
        eps=eps,
        residual_dtype=residual_dtype,
        returns_x=True,
        interpret=interpret,
    )
    assert h is not None
    return h, out


def _run(
    function: str,
    operands: NormOperands,
    segments: jax.Array | Segmentation | None,
    implementation: str,
    sharding: NamedSharding | None,
    **static: PyTree,
) -> tuple[jax.Array | None, jax.Array]:
    """h and the modulated value of x's shape; the static arguments are those of `normalise`."""
    if not isinstance(segments, Segmentation):
        operands = operands._replace(segment_ids=segments)
    elif segments.table_rows != operands.scale.shape[-2]:
        raise ValueError(
            f"{function}: segment_ids were prepared for tables of {segments.table_rows} rows, and "
            f"scale has {operands.scale.shape[-2]}; prepare them for these"
        )
    else:
        operands = operands._replace(segment_ids=segments.ids, prepared=segments.prepared or None)
    shape = jnp.shape(operands.x)
    operands, options = normalise(function, operands, **static)
    if sharding is not None and not isinstance(sharding, NamedSharding):
        raise ValueError(f"sharding is {sharding!r}; it must be a jax.sharding.NamedSharding")
    if sharding is not None and len(shape) == 2:
        sharding = NamedSharding(sharding.mesh, jax.P(None, *sharding.spec))
    call = call_of(operands.x, options, sharding)
    chosen = REGISTRY.choose(function, implementation, operands, call, interpret=options.interpret)
    scattered = isinstance(segments, Segmentation) and not segments.contiguous
    if scattered or not operands.x.size:
        chosen = REGISTRY.reference
    prepared = operands.prepared and operands.prepared.get(chosen.name)
    if devices.mesh_axes(call.sharding, 1) or is_explicit(call.sharding):
        # Segments are prepared anew: what tracing sees of an Explicit mesh says how ids lie.
        prepared = None
    h, out = chosen.run(operands._replace(prepared=prepared), call)
    return None if h is None else h.reshape(shape), out.reshape(shape)
