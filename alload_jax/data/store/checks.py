"""Checks of samples before they are stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, NAMED, TEXT
from alload_jax.data.sample_form import SampleForm
from alload_jax.data.sample_texts import with_alternatives
from alload_jax.planning.geometry import Geometry, Triple

Alternative = (
    tuple[np.ndarray, str | None] | tuple[np.ndarray, str | None, Mapping[str, np.ndarray]]
)
"""A further text of a sample: the condition, the caption in words, and its tokens of further kinds
by name if they differ from those of the first text."""

_MOST_CHANNELS = 48
"""Of the VAEs that are in use; an axis of up to this length may be that of channels."""
_LARGEST_LABEL = 2**31 - 1


class SampleChecks:
    """Checks samples against their sizes and against the samples before them.

    Attributes:
      channels: channels of the latents; None before the first sample.
      form: what samples hold beside latents; empty before the first sample.
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
        self.form = SampleForm()
        self.number = number
        self._where = where
        self._geometry = Geometry(vae_stride)

    def follow(self, channels: int, form: SampleForm) -> None:
        """Sets what the next samples must have."""
        self.channels, self.form = channels, form

    def check(
        self,
        latents: np.ndarray,
        condition: np.ndarray,
        size: Triple,
        caption: str | None = None,
        given: np.ndarray | None = None,
        image: np.ndarray | None = None,
        alternatives: Sequence[Alternative] = (),
        parts: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Checks a sample; arguments as `StoreWriter.add`'s. Returns the arrays of its record.

        Raises:
          ValueError: the sample is refused; the message names it.
        """
        place = f"{self._where}sample {self.number}"
        for words in (caption, *(words for _, words, *_ in alternatives)):
            if words is not None and not isinstance(words, str):
                raise ValueError(
                    f"{place}: caption is {words!r}; give text, or None where there is none"
                )
        latents, condition = np.asarray(latents), np.asarray(condition)
        self._check_shape(latents, size, place)
        if not is_float(latents):
            raise ValueError(
                f"{place}: latents are {latents.dtype}; give floats, such as x / 127.5 - 1"
            )
        condition = _checked_condition(condition, place)
        arrays = {LATENTS: latents, (LABELS if condition.ndim == 1 else TEXT): condition}
        arrays |= _checked_image(latents, given, image, place)
        arrays |= _checked_parts(parts or {}, place)
        others = [_checked_condition(np.asarray(other), place) for other, *_ in alternatives]
        for other in others:
            if other.shape[1:] != condition.shape[1:]:
                raise ValueError(
                    f"{place}: one of its texts has shape {other.shape}, the first has "
                    f"{condition.shape}; all must be labels [L], or text of one width"
                )
        others_parts = [
            _checked_parts(kinds[0], place) if kinds else {} for _, _, *kinds in alternatives
        ]
        for kinds in others_parts:
            _require_alike(kinds, arrays, place)
        arrays = with_alternatives(arrays, others, others_parts)
        for name, array in arrays.items():
            if not name.startswith(LABELS):
                _require_finite(name, array, place)
        form = SampleForm.of(arrays)
        self._require_form(form, place)
        self.follow(latents.shape[-1], form)
        return arrays

    def _require_form(self, form: SampleForm, place: str) -> None:
        if self.channels is None or form == self.form:
            return
        found, expected = form.described(), self.form.described()
        name = next(name for name in found if found[name] != expected[name])
        raise ValueError(
            f"{place}: {name} is {found[name]}; the previous samples have {expected[name]}"
        )

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


def _checked_condition(condition: np.ndarray, place: str) -> np.ndarray:
    """Checks the kind of a condition; returns classes as int32."""
    shape, dtype = condition.shape, condition.dtype
    if condition.ndim not in (1, 2):
        raise ValueError(
            f"{place}: condition has shape {shape}; it must be labels [L] or text [L, width]"
        )
    if condition.ndim == 1 and len(condition) and dtype.kind not in "iu":
        raise ValueError(f"{place}: labels are {dtype}; they must be whole numbers")
    if condition.ndim == 1 and len(condition):
        lowest, highest = int(condition.min()), int(condition.max())
        if lowest < 0 or highest > _LARGEST_LABEL:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"{place}: a label is {wrong}; labels are from 0 to {_LARGEST_LABEL}")
    if condition.ndim == 2 and not is_float(condition):
        raise ValueError(f"{place}: text is {dtype}; embeddings must be floats")
    return condition.astype(np.int32) if condition.ndim == 1 else condition


def _checked_image(
    latents: np.ndarray, given: np.ndarray | None, image: np.ndarray | None, place: str
) -> dict[str, np.ndarray]:
    """Checks what image-to-video models take; returns what there is of it by name."""
    found: dict[str, np.ndarray] = {}
    for name, array in ((GIVEN, given), (IMAGE, image)):
        if array is None:
            continue
        found[name] = array = np.asarray(array)
        if not is_float(array):
            raise ValueError(f"{place}: {name} is {array.dtype}; give floats")
    if given is not None and (
        found[GIVEN].ndim != 4 or found[GIVEN].shape[:3] != latents.shape[:3]
    ):
        raise ValueError(
            f"{place}: given has shape {found[GIVEN].shape}; it must be "
            f"{latents.shape[:3]} and channels, as the latents"
        )
    if image is not None and found[IMAGE].ndim != 2:
        raise ValueError(
            f"{place}: image has shape {found[IMAGE].shape}; it must be [tokens, width]"
        )
    return found


def _checked_parts(parts: Mapping[str, np.ndarray], place: str) -> dict[str, np.ndarray]:
    """Checks condition tokens of further kinds."""
    found = {name: np.asarray(array) for name, array in parts.items()}
    for name, array in found.items():
        if name in NAMED or not name.isidentifier():
            raise ValueError(f"{place}: {name!r} cannot name condition tokens; use another word")
        if array.ndim != 2 or not is_float(array):
            raise ValueError(
                f"{place}: {name} has shape {array.shape} of {array.dtype}; it must be "
                "[tokens, width] of floats"
            )
    return found


def _require_alike(
    kinds: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray], place: str
) -> None:
    """Refuses further kinds of tokens of an alternative that the first text has not, or wider."""
    for name, array in kinds.items():
        known = first.get(name)
        if known is None or known.shape[1] != array.shape[1]:
            held = "none" if known is None else f"a width of {known.shape[1]}"
            raise ValueError(
                f"{place}: {name} of one of its texts has a width of {array.shape[1]}, the first "
                f"has {held}; all must be alike"
            )


def is_float(array: np.ndarray) -> bool:
    """Whether an array holds floats, bfloat16 too."""
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16


def _require_finite(name: str, array: np.ndarray, place: str) -> None:
    finite: Any = np.isfinite(array)
    if not finite.all():
        first = [int(axis[0]) for axis in np.nonzero(~finite)]
        raise ValueError(
            f"{place}: {name} hold {array[tuple(first)]} at {first} and "
            f"{int((~finite).sum())} values in all that are NaN or infinite; leave the sample out"
        )
