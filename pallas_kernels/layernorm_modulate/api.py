"""LayerNorm-Modulate, the public functions: check the arguments and pick the implementation."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels.layernorm_modulate import devices, tuning
from pallas_kernels.layernorm_modulate.differentiable import Static, fused, on_shards, placed
from pallas_kernels.layernorm_modulate.operands import Operands, Options, normalise
from pallas_kernels.layernorm_modulate.pieces import Segmentation
from pallas_kernels.layernorm_modulate.reference import reference

Implementation = Literal["auto", "triton", "xla"]


def layernorm_modulate(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    *,
    segment_ids: jax.Array | Segmentation | None = None,
    segment_block: int | None = None,
    eps: float = 1e-6,
    implementation: Implementation = "auto",
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
      segment_block: promises that segments begin at multiples of it, which saves finding them.
      eps: added to the variance.
      implementation: "triton" (the kernels), "xla" (XLA's fusion), or "auto": whichever was
        measured as faster for this device, width and size; XLA where nothing was measured.
      sharding: how x is split over a mesh whose axes are Auto, where tracing cannot see it: over
        batch and sequence, D whole. Explicit axes need no such help.

    Returns:
      x's shape and dtype.

    Raises:
      ValueError: a shape or dtype does not fit, or the kernels cannot know how x is split.
      NotImplementedError: this device or this sharding cannot run the kernels.
    """
    name = "layernorm_modulate"
    operands, options = normalise(
        name,
        _with_segments(name, Operands(x, scale, shift), segment_ids, segment_block),
        eps=eps,
        residual_dtype=None,
        segment_block=segment_block,
    )
    _, out = _run(name, operands, options, implementation, _three_axes(x, sharding))
    return out.reshape(x.shape)


def residual_layernorm_modulate(
    x: jax.Array,
    y: jax.Array,
    gate: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array,
    *,
    residual_dtype: jnp.dtype | None = None,
    segment_ids: jax.Array | Segmentation | None = None,
    segment_block: int | None = None,
    eps: float = 1e-6,
    implementation: Implementation = "auto",
    sharding: NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h = x + gate·y, then LayerNorm(h)·(1 + scale) + shift: where two halves of a block meet.

    Forward and backward read and write each tensor once. The sum is float32 and rounded once, to
    `residual_dtype`; the norm is that of the rounded h.

    Args:
      x: [B, S, D] or [T, D], the residual stream; bfloat16, float16 or float32.
      y: x's shape, a branch's output; any of these dtypes.
      gate: shaped like scale, float32 or x's or y's dtype; None for h = x + y.
      scale: as in `layernorm_modulate`, float32 or x's or y's dtype.
      shift: shaped like scale, float32 or x's or y's dtype.
      residual_dtype: dtype of h, x's or float32; None for x's.
      segment_ids: as in `layernorm_modulate`; h is zero in padding too.
      segment_block: as in `layernorm_modulate`.
      eps: added to the variance.
      implementation: as in `layernorm_modulate`.
      sharding: as in `layernorm_modulate`.

    Returns:
      h in `residual_dtype` and the modulated value in y's dtype, both of x's shape.

    Raises:
      ValueError: a shape or dtype does not fit, or the kernels cannot know how x is split.
      NotImplementedError: this device or this sharding cannot run the kernels.
    """
    name = "residual_layernorm_modulate"
    operands, options = normalise(
        name,
        _with_segments(name, Operands(x, scale, shift, y=y, gate=gate), segment_ids, segment_block),
        eps=eps,
        residual_dtype=residual_dtype,
        segment_block=segment_block,
    )
    h, out = _run(name, operands, options, implementation, _three_axes(x, sharding))
    assert h is not None
    return h.reshape(x.shape), out.reshape(x.shape)


def _with_segments(
    name: str,
    operands: Operands,
    segments: jax.Array | Segmentation | None,
    segment_block: int | None,
) -> Operands:
    if not isinstance(segments, Segmentation):
        return operands._replace(segment_ids=segments)
    if segments.table_rows != operands.scale.shape[-2]:
        raise ValueError(
            f"{name}: segment_ids were prepared for tables of {segments.table_rows} rows, and "
            f"scale has {operands.scale.shape[-2]}; prepare them for these"
        )
    if segment_block is not None:
        raise ValueError(f"{name}: prepared segment_ids take no segment_block; leave it out")
    return operands._replace(segment_ids=segments.ids, pieces=segments.pieces)


def _run(
    name: str,
    operands: Operands,
    options: Options,
    implementation: Implementation,
    sharding: NamedSharding | None,
) -> tuple[jax.Array | None, jax.Array]:
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"{name}: implementation={implementation!r} is unknown; "
            f"choose one of {', '.join(get_args(Implementation))}"
        )
    obstacle = devices.obstacle(operands.x, sharding)
    if implementation == "triton" and obstacle is not None:
        raise type(obstacle)(f"{name}: the Triton kernels cannot run, {obstacle}")
    shape = operands.x.shape
    faster = implementation == "auto" and tuning.kernel_is_faster(
        devices.device_kind(),
        options.layout,
        operands.x.size // (devices.shards_of(sharding, 0) * devices.shards_of(sharding, 1)),
        shape[-1],
    )
    wanted = implementation == "triton" or faster
    if devices.mesh_axes(sharding, 1):
        # A shard may begin where no segment block does.
        options = dataclasses.replace(options, segment_block=None)
        operands = operands._replace(pieces=None)
    static = Static(options, sharding)
    if wanted and obstacle is None and operands.x.size:
        return fused(static, placed(static, operands))
    whole = sharding is None or devices.sharding_obstacle(operands.x, sharding) is not None
    if options.layout != "segment" or whole:
        return reference(operands, options)
    return on_shards(static, reference, placed(static, operands._replace(pieces=None)))


def _three_axes(x: jax.Array, sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding of x as [B, S, D]: as given, or as an Explicit mesh shows it."""
    if sharding is not None and not isinstance(sharding, NamedSharding):
        raise ValueError(f"sharding is {sharding!r}; it must be a jax.sharding.NamedSharding")
    if sharding is None:
        sharding = devices.visible_sharding(x)
    elif sharding.mesh.size == 1:
        return None
    if sharding is None or x.ndim == 3:
        return sharding
    return NamedSharding(sharding.mesh, jax.P(None, *sharding.spec))
