"""LayerNorm-Modulate, the public functions: check the arguments and pick the implementation."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels import devices
from pallas_kernels.layernorm_modulate.implementations import REGISTRY
from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands, normalise
from pallas_kernels.layernorm_modulate.segmentation import Segmentation


def layernorm_modulate(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    *,
    segment_ids: jax.Array | Segmentation | None = None,
    segment_block: int | None = None,
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
      segment_block: promises that segments begin at multiples of it, which saves finding them.
      eps: added to the variance.
      implementation: "triton" (the kernels), "mosaic" (on Hopper GPUs: the same, but for another
        kernel in the backward), "xla" (XLA's fusion), the name of one that was registered, or
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
    name = "layernorm_modulate"
    operands, options = normalise(
        name,
        _with_segments(name, Operands(x, scale, shift), segment_ids, segment_block),
        eps=eps,
        residual_dtype=None,
        segment_block=segment_block,
        interpret=interpret,
    )
    _, out = _run(name, implementation, operands, CallConfig(options, _three_axes(x, sharding)))
    return out.reshape(x.shape)


def residual_layernorm_modulate(
    x: jax.Array,
    y: jax.Array | None,
    gate: jax.Array | None,
    scale: jax.Array,
    shift: jax.Array,
    *,
    residual_dtype: jnp.dtype | None = None,
    segment_ids: jax.Array | Segmentation | None = None,
    segment_block: int | None = None,
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
      segment_block: as in `layernorm_modulate`.
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
    name = "residual_layernorm_modulate"
    operands, options = normalise(
        name,
        _with_segments(name, Operands(x, scale, shift, y=y, gate=gate), segment_ids, segment_block),
        eps=eps,
        residual_dtype=residual_dtype,
        segment_block=segment_block,
        returns_x=True,
        interpret=interpret,
    )
    h, out = _run(name, implementation, operands, CallConfig(options, _three_axes(x, sharding)))
    assert h is not None
    return h.reshape(x.shape), out.reshape(x.shape)


def _with_segments(
    name: str,
    operands: Operands,
    segments: jax.Array | Segmentation | None,
    segment_block: int | None,
) -> Operands:
    """Operands with ids, and what all implementations prepared of them."""
    if not isinstance(segments, Segmentation):
        return operands._replace(segment_ids=segments)
    if segments.table_rows != operands.scale.shape[-2]:
        raise ValueError(
            f"{name}: segment_ids were prepared for tables of {segments.table_rows} rows, and "
            f"scale has {operands.scale.shape[-2]}; prepare them for these"
        )
    if segment_block is not None:
        raise ValueError(f"{name}: prepared segment_ids take no segment_block; leave it out")
    return operands._replace(segment_ids=segments.ids, prepared=segments.prepared)


def _run(
    function: str, implementation: str, operands: Operands, config: CallConfig
) -> tuple[jax.Array | None, jax.Array]:
    options = config.options
    chosen = REGISTRY.choose(
        function, implementation, operands, config, interpret=options.interpret
    )
    if not operands.x.size:
        chosen = REGISTRY.reference
    if devices.mesh_axes(config.sharding, 1):
        # A shard may begin where no segment block does.
        options = dataclasses.replace(options, segment_block=None)
        operands = operands._replace(prepared=None)
    prepared = operands.prepared and operands.prepared.get(chosen.name)
    return chosen.run(
        operands._replace(prepared=prepared), dataclasses.replace(config, options=options)
    )


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
