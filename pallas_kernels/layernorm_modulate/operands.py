"""The operands of both functions in one form, the checks that bring them into it; the reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.op import DTYPES, Call, Implementation, on_shards, placed

ModulationLayout = Literal["row", "token", "segment"]
"""Which rows share scale, shift and gate: a batch row, one token, or a segment of a packed row."""


class NormOperands(NamedTuple):
    """Arrays of one call.

    Attributes:
      x: [B, S, D] bfloat16, float16 or float32.
      scale: [B, D] (layout "row"), [B, S, D] ("token") or [B, M, D] ("segment").
      shift: like `scale`.
      y: [B, S, D], added to x before the norm; None where there is no residual.
      gate: like `scale`, multiplies y; None for a plain sum.
      segment_ids: [B, S] int32 (layout "segment"), negative for padding; else None.
      prepared: what the implementation derived from segment_ids beforehand, a pytree of arrays
        [B, ...]; None where it did not.
    """

    x: jax.Array
    scale: jax.Array
    shift: jax.Array
    y: jax.Array | None = None
    gate: jax.Array | None = None
    segment_ids: jax.Array | None = None
    prepared: PyTree = None


class NormResiduals(NamedTuple):
    """What the backward pass needs of a call; named as in `NormOperands`.

    Attributes:
      h: [B, S, D] the norm's input: x, or x + gate·y.
      statistics: what the implementation keeps of h's rows, [B, S, K]; or None.
      scale: as it was.
      shift: [0] of shift's dtype: its values are not needed.
      y: None without a gate.
      gate: None for a plain sum.
      segment_ids: [B, S] int32 or None.
      prepared: as in `NormOperands`.
    """

    h: jax.Array
    statistics: jax.Array | None
    scale: jax.Array
    shift: jax.Array
    y: jax.Array | None
    gate: jax.Array | None
    segment_ids: jax.Array | None
    prepared: PyTree = None


Gradients = tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]
"""What a backward gives: those of x and y (None without) [B, S, D]; the rest as one float32 array
[K, *scale.shape], in the order scale, shift and, where there is one, gate, or in the layout "token"
as K arrays of the operands' dtypes."""


@dataclass(frozen=True)
class NormOptions:
    """What is static in a call on one device.

    Attributes:
      layout: which rows share scale, shift and gate.
      eps: added to the variance.
      x_dtype: dtype of x.
      residual_dtype: dtype of h = x + gate·y; of x where there is no residual.
      out_dtype: dtype of the modulated value.
      h: what the result h is: the residual sum, or x itself; None where it is no result.
      interpret: run kernels in an interpreter, which needs no GPU.
    """

    layout: ModulationLayout
    eps: float
    x_dtype: jnp.dtype
    residual_dtype: jnp.dtype
    out_dtype: jnp.dtype
    h: Literal["sum", "x"] | None = None
    interpret: bool = False


def normalise(
    function: str,
    operands: NormOperands,
    *,
    eps: float,
    residual_dtype: jnp.dtype | None,
    returns_x: bool = False,
    interpret: bool = False,
) -> tuple[NormOperands, NormOptions]:
    """Checks what a user gave and brings it into the form of `NormOperands`.

    Args:
      function: its name, for messages.
      operands: as given.
      eps, residual_dtype, interpret: as in the public functions.
      returns_x: whether x is a result h where there is no y.

    Raises:
      ValueError: a shape or a dtype does not fit; the message names it.
    """
    # It is static: a kernel is made for each of its values.
    if isinstance(eps, bool) or not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ValueError(f"{function}: eps is {eps!r}; it must be a finite number, 0 or more")
    for name in ("x", "scale", "shift"):
        if getattr(operands, name) is None:
            raise ValueError(f"{function}: {name} is None; give an array")
    operands = jax.tree.map(jnp.asarray, operands)
    x, y = operands.x, operands.y
    if x.ndim not in (2, 3):
        raise ValueError(f"{function}: x must be [B, S, D] or [T, D], got shape {x.shape}")
    if x.shape[-1] == 0:
        raise ValueError(f"{function}: x has no elements to normalise, its shape is {x.shape}")
    for name, value in (("x", x), ("y", y)):
        if value is not None and value.dtype not in DTYPES:
            raise ValueError(
                f"{function}: {name} is {value.dtype}; it must be bfloat16, float16 or float32"
            )
    if y is not None and y.shape != x.shape:
        raise ValueError(f"{function}: y must have x's shape {x.shape}, got {y.shape}")
    if y is None and operands.gate is not None:
        raise ValueError(f"{function}: a gate is given, but y is None; give y, or no gate")
    layout = _layout(function, operands)
    _check_modulation(function, operands, layout)
    ids = operands.segment_ids
    if ids is not None and ids.shape != x.shape[:-1]:
        raise ValueError(
            f"{function}: segment_ids must be {x.shape[:-1]} for x {x.shape}, got {ids.shape}"
        )
    if ids is not None and not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        raise ValueError(f"{function}: segment_ids are {ids.dtype}; they must be signed integers")
    out_dtype = x.dtype if y is None else y.dtype
    h_dtype = jnp.dtype(x.dtype if residual_dtype is None else residual_dtype)
    if h_dtype not in (x.dtype, jnp.float32):
        raise ValueError(
            f"{function}: residual_dtype is {h_dtype}; it must be x's ({x.dtype}) or float32"
        )
    if y is None and h_dtype != x.dtype:
        raise ValueError(
            f"{function}: residual_dtype is {h_dtype}, but without y h is x, which is {x.dtype}"
        )
    dtypes = (x.dtype, h_dtype, jnp.dtype(out_dtype))
    h: Literal["sum", "x"] | None = "sum" if y is not None else "x" if returns_x else None
    options = NormOptions(layout, eps, *dtypes, h, interpret)
    return _three_dimensional(operands, layout), options


def _layout(function: str, operands: NormOperands) -> ModulationLayout:
    x, scale = operands.x, operands.scale
    if operands.segment_ids is not None:
        return "segment"
    if scale.shape == x.shape:
        return "token"
    rows = x.shape[0] if x.ndim == 3 else 1
    if scale.shape == (rows, x.shape[-1]):
        return "row"
    wanted = (
        f"[B, D] = {(rows, x.shape[-1])} or [B, S, D] = {x.shape}"
        if x.ndim == 3
        else f"[1, D] = {(1, x.shape[-1])} or [T, D] = {x.shape}"
    )
    raise ValueError(
        f"{function}: scale must be {wanted} for x {x.shape}, or a table of rows with "
        f"segment_ids; got {scale.shape}"
    )


def _check_modulation(function: str, operands: NormOperands, layout: ModulationLayout) -> None:
    x, scale = operands.x, operands.scale
    if layout == "segment":
        tables: list[tuple[int, ...]] = [(scale.shape[-2] if scale.ndim > 1 else 0, x.shape[-1])]
        if x.ndim == 3:
            tables.append((x.shape[0], *tables[0]))
        if scale.shape not in tables or scale.shape[-2] == 0:
            raise ValueError(
                f"{function}: with segment_ids, scale must be [M, D] with M of at least 1"
                f"{' or [B, M, D]' if x.ndim == 3 else ''} for x {x.shape}, got {scale.shape}"
            )
    dtypes = {x.dtype, jnp.dtype(jnp.float32)} | (
        {operands.y.dtype} if operands.y is not None else set()
    )
    for name in ("scale", "shift", "gate"):
        value = getattr(operands, name)
        if value is None:
            continue
        if value.shape != scale.shape:
            raise ValueError(
                f"{function}: {name} must have scale's shape {scale.shape}, got {value.shape}"
            )
        if value.dtype not in dtypes:
            names = " or ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(f"{function}: {name} is {value.dtype}; it must be {names}")


def _three_dimensional(operands: NormOperands, layout: ModulationLayout) -> NormOperands:
    """[T, D] as one batch row; a table that all batch rows share, once for each."""
    flat = operands.x.ndim == 2
    rows = 1 if flat else operands.x.shape[0]

    def modulation(value: PyTree) -> PyTree:
        if value is None:
            return None
        if layout == "segment" and value.ndim == 2:
            return jnp.broadcast_to(value, (rows, *value.shape))
        return value[None] if flat and layout == "token" else value

    def stream(value: PyTree) -> PyTree:
        return value[None] if flat and value is not None else value

    ids = stream(operands.segment_ids)
    return operands._replace(
        **{name: stream(getattr(operands, name)) for name in ("x", "y")},
        **{name: modulation(getattr(operands, name)) for name in ("scale", "shift", "gate")},
        segment_ids=None if ids is None else ids.astype(jnp.int32),
    )


def operand_specs(call: Call[NormOptions]) -> NormOperands:
    """How the operands of a call are split; of `prepared`, each array."""
    spec = () if call.sharding is None else tuple(call.sharding.spec)
    batch, sequence, *_ = (*spec, None, None)
    stream = P(batch, sequence, None)
    table = {"row": P(batch, None), "token": stream, "segment": P(batch, None, None)}
    of_table = table[call.options.layout]
    ids, prepared = P(batch, sequence), P(batch)
    return NormOperands._make((stream, of_table, of_table, stream, of_table, ids, prepared))


def unsupported_sharding(x: jax.Array, sharding: NamedSharding | None) -> Exception | None:
    """Why x [B, S, D] cannot be computed shard by shard; None if it can."""
    advice = ", and a row's statistics need all of it; split batch or sequence, or use 'xla'"
    return devices.unsupported_sharding(x, sharding, whole={2: ("width is", advice)})


class NormImplementation(Implementation[NormOperands, NormOptions]):
    """A way to compute both functions, chosen by name.

    `run` returns h (None if it is no result) and the modulated value [B, S, D]. One with a forward
    and a backward of its own derives from `FusedImplementation`.
    """

    def prepare_segments(
        self, segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None
    ) -> PyTree:
        """What many calls can share, derived from their segment_ids (see `segmentation`).

        Args:
          segment_ids: [B, S] int32.
          table_rows: M, rows of the tables of scale, shift and gate.
          width: D.
          sharding: of x, where tracing cannot see it.

        Returns:
          A pytree of arrays [B, ...], which calls get as `NormOperands.prepared`; None for nothing.
        """
        return None


# ---------------------------------------------------------------- the reference


class NormReference(NormImplementation):
    """`reference`, fused and differentiated by XLA and JAX: for every device and sharding."""

    name = "xla"

    @override
    def run(
        self, operands: NormOperands, call: Call[NormOptions]
    ) -> tuple[jax.Array | None, jax.Array]:
        """The reference; with segments on each shard, where x can be computed shard by shard."""
        sharding = call.sharding
        whole = sharding is None or unsupported_sharding(operands.x, sharding) is not None
        if call.options.layout != "segment" or whole:
            return reference(operands, call.options)
        run, specs = partial(reference, options=call.options), operand_specs(call)
        on_each = on_shards(call, run, (specs,), (specs.x, specs.x), check=True)
        return on_each(placed(operands._replace(prepared=None), specs, sharding))


def reference(operands: NormOperands, options: NormOptions) -> tuple[jax.Array | None, jax.Array]:
    """h = x + gate·y, then LayerNorm(h)·(1 + scale) + shift; float32 inside.

    h is rounded once to `residual_dtype`, and the norm is that of the rounded h; the modulated
    value is rounded once. Without y, h is x, and only its gradient is zero in padding (segment −1);
    else both are.

    Returns:
      h [B, S, D] (None if it is no result) and the modulated value [B, S, D].
    """
    per_token = partial(_per_token, operands=operands, options=options)
    scale, shift = per_token(operands.scale), per_token(operands.shift)
    gate = None if operands.gate is None else per_token(operands.gate)
    padding = None if operands.segment_ids is None else operands.segment_ids[..., None] < 0
    wide = operands.x.astype(jnp.float32)
    if operands.y is not None:
        # Cleared first: what padding holds must not reach the gate's gradient.
        y = _cleared(operands.y.astype(jnp.float32), padding)
        wide = wide + (y if gate is None else gate * y)
    # Cast from float32 also where it is x, so that its gradients add up in that.
    h = _cleared(wide, padding)
    if options.h == "x":  # whose gradient alone is zero in padding
        h = wide if padding is None else jnp.where(padding, jax.lax.stop_gradient(wide), wide)
    h = h.astype(options.residual_dtype)
    wide = _cleared(wide, padding)
    if operands.y is not None:
        wide = _rounded(wide, options.residual_dtype)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + options.eps)
    out = _cleared(normed * (1.0 + scale) + shift, padding).astype(options.out_dtype)
    return (None if options.h is None else h), out


def _per_token(value: jax.Array, operands: NormOperands, options: NormOptions) -> jax.Array:
    """Float32 that broadcasts against [B, S, D]."""
    value = value.astype(jnp.float32)
    if options.layout == "row":
        return value[:, None, :]
    if options.layout == "token":
        return value
    assert operands.segment_ids is not None
    rows, ids = jnp.arange(value.shape[0])[:, None], operands.segment_ids
    # Segments beyond the table give NaN (a gather's "fill"), as in the kernel.
    return value.at[rows, jnp.maximum(ids, 0)].get(mode="fill", fill_value=jnp.nan)


def _rounded(value: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 rounded to the digits of `dtype`; the gradient passes unrounded.

    XLA may leave out a cast to `dtype` and back, and differentiating one would round the gradient
    before it is added up.
    """
    kind = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(value, kind.nexp, kind.nmant)
    return value + jax.lax.stop_gradient(rounded - value)


def _cleared(value: jax.Array, padding: jax.Array | None) -> jax.Array:
    return value if padding is None else jnp.where(padding, 0.0, value)
