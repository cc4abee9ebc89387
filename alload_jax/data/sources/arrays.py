"""Arrays of files of other trainers: their layouts, padding and checks."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, TEXT
from alload_jax.data.store import BadRecordError
from alload_jax.planning.geometry import Triple

Layout = Literal["CTHW", "TCHW", "THWC"]
"""Order of the axes of stored latents: channels, frames (time), height, width."""

_LARGEST_AXIS = 10**6
FLOATS = frozenset(
    np.dtype(one) for one in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
)
"""Dtypes that latents and text embeddings may have."""


class LatentShape(NamedTuple):
    """Shape of the latents of a sample.

    Attributes:
      grid: (frames, height, width) of the latents.
      channels: number of channels.
    """

    grid: Triple
    channels: int


def latent_shape(shape: Any, layout: Layout) -> LatentShape:
    """Returns the shape of stored latents, of a clip or of a picture without an axis of frames.

    Raises:
      ValueError: the shape has other axes, or an axis is empty or absurdly long.
    """
    sizes = dict(zip(layout, four_axes(shape, layout), strict=True))
    return LatentShape((sizes["T"], sizes["H"], sizes["W"]), sizes["C"])


def four_axes(shape: Any, layout: Layout) -> tuple[int, ...]:
    """Returns the shape with all four axes: a leading batch of 1 is dropped, one frame added.

    Raises:
      ValueError: as `latent_shape`.
    """
    axes = tuple(shape)
    if len(axes) == 5 and axes[0] == 1:
        axes = axes[1:]
    if len(axes) == 3:
        frames = layout.index("T")
        axes = (*axes[:frames], 1, *axes[frames:])
    if len(axes) != 4 or not all(1 <= size <= _LARGEST_AXIS for size in axes):
        raise ValueError(f"latents have shape {_shown(shape)}; they must be {layout}")
    return axes


def channels_last(latents: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns stored latents as [frames, height, width, channels]; a view.

    Raises:
      ValueError: as `latent_shape`.
    """
    axes = latents.reshape(four_axes(latents.shape, layout))
    return axes.transpose([layout.index(axis) for axis in "THWC"])


def text_shape(shape: Any) -> tuple[int, int]:
    """Returns (L, width) of stored text embeddings; a leading batch of 1 is dropped.

    Raises:
      ValueError: the shape has other axes, or an axis is absurdly long.
    """
    axes = tuple(shape)
    if len(axes) == 3 and axes[0] == 1:
        axes = axes[1:]
    if len(axes) != 2 or not (0 <= axes[0] <= _LARGEST_AXIS and 1 <= axes[1] <= _LARGEST_AXIS):
        raise ValueError(f"text embeddings have shape {_shown(shape)}; they must be [L, width]")
    return axes


def without_padding(text: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the tokens of a text that are no padding.

    Args:
      text: [L, width].
      mask: [L], 1 for tokens and then 0 for padding; a leading batch of 1 is dropped.

    Raises:
      ValueError: the mask has another length, or padding before a token.
    """
    kept = mask.reshape(-1).astype(bool)
    length = int(kept.sum())
    if kept.shape != text.shape[:1] or not kept[:length].all():
        raise ValueError(
            f"the mask has shape {mask.shape} and {length} tokens; it must be {len(text)} values, "
            "ones before zeros"
        )
    return text[:length]


def checked_sample(
    manifest: Manifest, sample: int, latents: np.ndarray, condition: np.ndarray, place: str
) -> dict[str, np.ndarray]:
    """Checks a sample against the manifest, and returns its arrays by name.

    Args:
      manifest: the manifest.
      sample: number of the sample.
      latents: [t, h, w, C].
      condition: [L, width] text or [L] classes.
      place: where the sample lies, for messages.

    Raises:
      BadRecordError: a shape or dtype is not as the manifest says, or a value is not finite.
    """
    shape = manifest.latent_shape(tuple(manifest.shape[sample]))
    if latents.shape != shape:
        raise BadRecordError(f"{place} holds latents of shape {latents.shape}, not {shape}")
    _require_floats("latents", latents, place)
    longest, width = int(manifest.text_length[sample]), manifest.form.text_dim
    if condition.shape[1:] != (() if width is None else (width,)) or len(condition) > longest:
        kind = "classes" if width is None else f"text of width {width}"
        raise BadRecordError(
            f"{place} holds a condition of shape {condition.shape}; it must be {kind} with at most "
            f"{longest} tokens"
        )
    if width is not None:
        _require_floats("text", condition, place)
        return {LATENTS: latents, TEXT: condition}
    if condition.dtype.kind not in "iu":
        raise BadRecordError(f"{place} holds classes of dtype {condition.dtype}, not integers")
    return {LATENTS: latents, LABELS: condition.astype(np.int32)}


def checked_given(
    manifest: Manifest, sample: int, arrays: Mapping[str, np.ndarray], place: str
) -> dict[str, np.ndarray]:
    """Checks what image-to-video models take, and returns those of the arrays by name.

    Args:
      manifest: the manifest.
      sample: number of the sample.
      arrays: the sample's arrays.
      place: where the sample lies, for messages.

    Raises:
      BadRecordError: one is missing, has another shape than the manifest says, or is not finite.
    """
    shapes = manifest.record_shapes(sample)
    found = {}
    for name in (GIVEN, IMAGE):
        if name not in shapes:
            continue
        if name not in arrays or arrays[name].shape != shapes[name]:
            shown = arrays[name].shape if name in arrays else "nothing"
            raise BadRecordError(f"{place} holds {name} of shape {shown}, not {shapes[name]}")
        _require_floats(name, arrays[name], place)
        found[name] = arrays[name]
    return found


def _require_floats(name: str, array: np.ndarray, place: str) -> None:
    if array.dtype not in FLOATS:
        raise BadRecordError(f"{place} holds {name} of dtype {array.dtype}, not floats")
    if not np.isfinite(array).all():
        raise BadRecordError(f"{place} holds {name} with NaN or infinite values")


def _shown(shape: Any) -> list[int]:
    return list(shape)[:8]
