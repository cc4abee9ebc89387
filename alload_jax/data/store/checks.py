"""Checks of samples before they are stored."""

from typing import Any

import ml_dtypes
import numpy as np

from alload_jax.planning.geometry import Geometry, Triple

_MOST_CHANNELS = 48
"""Of the VAEs that are in use; an axis of up to this length may be that of channels."""


class SampleChecks:
    """Checks samples against their sizes and against the samples before them.

    Attributes:
      channels: channels of the latents; None before the first sample.
      text_dim: width of the text; None for classes, and before the first sample.
      number: number of the next sample, which messages name.
    """

    def __init__(self, vae_stride: Triple, where: str = "", number: int = 0):
        """Begins without samples.

        Args:
          vae_stride: pixels per latent along (frames, height, width).
          where: put before the sample's number in messages.
          number: number of the first sample.
        """
        self.channels: int | None = None
        self.text_dim: int | None = None
        self.number = number
        self._where = where
        self._geometry = Geometry(vae_stride)

    def follow(self, channels: int, text_dim: int | None) -> None:
        """Sets what the next samples must have."""
        self.channels, self.text_dim = channels, text_dim

    def check(
        self, latents: np.ndarray, condition: np.ndarray, size: Triple
    ) -> tuple[np.ndarray, np.ndarray]:
        """Checks a sample; arguments as `StoreWriter.add`'s. Returns latents and condition.

        Raises:
          ValueError: the sample is refused; the message names it.
        """
        place = f"{self._where}sample {self.number}"
        latents, condition = np.asarray(latents), np.asarray(condition)
        self._check_shape(latents, size, place)
        if not _is_float(latents):
            raise ValueError(
                f"{place}: latents are {latents.dtype}; give floats, such as x / 127.5 - 1"
            )
        condition = self._checked_condition(condition, place)
        _require_finite("latents", latents, place)
        if condition.ndim == 2:
            _require_finite("text", condition, place)
        self.follow(latents.shape[-1], condition.shape[1] if condition.ndim == 2 else None)
        return latents, condition

    def _check_shape(self, latents: np.ndarray, size: Triple, place: str) -> None:
        grid = tuple(self._geometry.latent_grid(*np.asarray(size)[:, None])[0].tolist())
        channels = self.channels
        if channels is None:
            channels = latents.shape[-1] if latents.ndim else 0
        if latents.shape != (*grid, channels):
            raise ValueError(
                f"{place}: latents have shape {latents.shape}; size {size}, vae_stride "
                f"{self._geometry.vae_stride} and the previous samples give "
                f"{(*grid, channels)}{self._hint(latents, grid)}"
            )

    def _hint(self, latents: np.ndarray, grid: tuple[int, ...]) -> str:
        """What to do with latents whose channels do not stand last; empty for others."""
        for axis, order in enumerate(("[channels, frames, …]", "[frames, channels, …]")):
            if latents.ndim != 4 or np.moveaxis(latents, axis, -1).shape[:3] != grid:
                continue
            channels = latents.shape[axis]
            if channels == self.channels or (self.channels is None and channels <= _MOST_CHANNELS):
                return (
                    f"; they look like {order}, but channels last is wanted: "
                    f"np.moveaxis(latents, {axis}, -1)"
                )
        return ""

    def _checked_condition(self, condition: np.ndarray, place: str) -> np.ndarray:
        """Checks a condition against the first sample's kind; returns classes as int32."""
        shape, dtype = condition.shape, condition.dtype
        if condition.ndim not in (1, 2):
            raise ValueError(
                f"{place}: condition has shape {shape}; it must be labels [L] or text [L, width]"
            )
        if condition.ndim == 1 and len(condition) and dtype.kind not in "iu":
            raise ValueError(f"{place}: labels are {dtype}; they must be whole numbers")
        if condition.ndim == 2 and not _is_float(condition):
            raise ValueError(f"{place}: text is {dtype}; embeddings must be floats")
        text_dim = shape[1] if condition.ndim == 2 else None
        if self.channels is not None and text_dim != self.text_dim:
            raise ValueError(
                f"{place}: condition has shape {shape}; the previous samples have "
                f"{condition_name(self.text_dim)}"
            )
        return condition.astype(np.int32) if text_dim is None else condition


def condition_name(text_dim: int | None) -> str:
    """The kind of condition in words."""
    return "classes" if text_dim is None else f"text of width {text_dim}"


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16


def _require_finite(name: str, array: np.ndarray, place: str) -> None:
    finite: Any = np.isfinite(array)
    if not finite.all():
        first = [int(axis[0]) for axis in np.nonzero(~finite)]
        raise ValueError(
            f"{place}: {name} hold {array[tuple(first)]} at {first} and "
            f"{int((~finite).sum())} values in all that are NaN or infinite; leave the sample out"
        )
