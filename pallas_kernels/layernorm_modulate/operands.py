"""The operands of both functions in one form, and the checks that bring them into it."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

ModulationLayout = Literal["row", "token", "segment"]
"""Which rows share scale, shift and gate: a batch row, one token, or a segment of a packed row."""

X_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class Operands(NamedTuple):
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
    prepared: Any = None


class Residuals(NamedTuple):
    """What the backward pass needs of a call; named as in `Operands`.

    Attributes:
      h: [B, S, D] the norm's input: x, or x + gate·y.
      statistics: what the implementation keeps of h's rows, [B, S, K]; or None.
      scale: as it was.
      shift: [0] of shift's dtype: its values are not needed.
      y: None without a gate.
      gate: None for a plain sum.
      segment_ids: [B, S] int32 or None.
      prepared: as in `Operands`.
    """

    h: jax.Array
    statistics: jax.Array | None
    scale: jax.Array
    shift: jax.Array
    y: jax.Array | None
    gate: jax.Array | None
    segment_ids: jax.Array | None
    prepared: Any = None


@dataclass(frozen=True)
class Options:
    """What is static in a call on one device.

    Attributes:
      layout: which rows share scale, shift and gate.
      eps: added to the variance.
      x_dtype: dtype of x.
      residual_dtype: dtype of h = x + gate·y; of x where there is no residual.
      out_dtype: dtype of the modulated value.
      h: what the result h is: the residual sum, or x itself; None where it is no result.
      segment_block: segments begin at multiples of it; None for anywhere.
      interpret: run kernels in an interpreter, which needs no GPU.
    """

    layout: ModulationLayout
    eps: float
    x_dtype: jnp.dtype
    residual_dtype: jnp.dtype
    out_dtype: jnp.dtype
    h: Literal["sum", "x"] | None = None
    segment_block: int | None = None
    interpret: bool = False


@dataclass(frozen=True)
class CallConfig:
    """What is static in a call.

    Attributes:
      options: of the function.
      sharding: of x [B, S, D]; None on one device.
    """

    options: Options
    sharding: NamedSharding | None


def normalise(
    function: str,
    operands: Operands,
    *,
    eps: float,
    residual_dtype: jnp.dtype | None,
    segment_block: int | None,
    returns_x: bool = False,
    interpret: bool = False,
) -> tuple[Operands, Options]:
    """Checks what a user gave and brings it into the form of `Operands`.

    Args:
      function: its name, for messages.
      operands: as given.
      eps, residual_dtype, segment_block, interpret: as in the public functions.
      returns_x: whether x is a result h where there is no y.

    Raises:
      ValueError: a shape or a dtype does not fit; the message names it.
    """
    _check_scalars(function, eps, segment_block)
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
        if value is not None and value.dtype not in X_DTYPES:
            raise ValueError(
                f"{function}: {name} is {value.dtype}; it must be bfloat16, float16 or float32"
            )
    if y is not None and y.shape != x.shape:
        raise ValueError(f"{function}: y must have x's shape {x.shape}, got {y.shape}")
    if y is None and operands.gate is not None:
        raise ValueError(f"{function}: a gate is given, but y is None; give y, or no gate")
    layout = _layout(function, operands)
    _check_modulation(function, operands, layout)
    _check_segments(function, operands, segment_block)
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
    options = Options(layout, eps, *dtypes, h, segment_block, interpret)
    return _three_dimensional(operands, layout), options


def _check_scalars(function: str, eps: float, segment_block: int | None) -> None:
    # Both are static: a kernel is made for each of their values.
    if isinstance(eps, bool) or not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ValueError(f"{function}: eps is {eps!r}; it must be a finite number, 0 or more")
    if segment_block is not None and not isinstance(segment_block, int):
        raise ValueError(f"{function}: segment_block is {segment_block!r}; it must be an int")


def _layout(function: str, operands: Operands) -> ModulationLayout:
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


def _check_modulation(function: str, operands: Operands, layout: ModulationLayout) -> None:
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


def _check_segments(function: str, operands: Operands, segment_block: int | None) -> None:
    ids = operands.segment_ids
    if segment_block is not None and ids is None:
        raise ValueError(f"{function}: segment_block={segment_block} needs segment_ids")
    if segment_block is not None and segment_block < 1:
        raise ValueError(f"{function}: segment_block is {segment_block}; it must be at least 1")
    if ids is None:
        return
    if ids.shape != operands.x.shape[:-1]:
        raise ValueError(
            f"{function}: segment_ids must be {operands.x.shape[:-1]} for x {operands.x.shape}, "
            f"got {ids.shape}"
        )
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        raise ValueError(f"{function}: segment_ids are {ids.dtype}; they must be signed integers")


def _three_dimensional(operands: Operands, layout: ModulationLayout) -> Operands:
    """[T, D] as one batch row; a table that all batch rows share, once for each."""
    flat = operands.x.ndim == 2
    rows = 1 if flat else operands.x.shape[0]

    def modulation(value: Any) -> Any:
        if value is None:
            return None
        if layout == "segment" and value.ndim == 2:
            return jnp.broadcast_to(value, (rows, *value.shape))
        return value[None] if flat and layout == "token" else value

    def stream(value: Any) -> Any:
        return value[None] if flat and value is not None else value

    ids = stream(operands.segment_ids)
    return Operands(
        x=stream(operands.x),
        scale=modulation(operands.scale),
        shift=modulation(operands.shift),
        y=stream(operands.y),
        gate=modulation(operands.gate),
        segment_ids=None if ids is None else ids.astype(jnp.int32),
        prepared=operands.prepared,
    )
