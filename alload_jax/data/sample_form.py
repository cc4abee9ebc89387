"""What all samples of a data folder have in common beside the channels of their latents."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from alload_jax.data.record import GIVEN, IMAGE, LABELS, NAMED, TEXT


class SampleForm(NamedTuple):
    """The arrays of a sample beside its latents.

    Attributes:
      text_dim: width of the text embeddings; None for classes.
      given_channels: channels that an image-to-video model takes beside the noisy latents; 0 if
        none are stored.
      image_shape: (tokens, width) of the image embeddings; None if none are stored.
      parts: (name, width) of further kinds of condition tokens, by name.
    """

    text_dim: int | None = None
    given_channels: int = 0
    image_shape: tuple[int, int] | None = None
    parts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> Self:
        """The form that a manifest's notes describe; what they lack is not stored."""
        shape = notes.get("image_shape")
        return cls(
            notes.get("text_dim"),
            notes.get("given_channels", 0),
            (shape[0], shape[1]) if shape else None,
            tuple(sorted(notes.get("parts", {}).items())),
        )

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The form of the arrays of one record."""
        image = arrays.get(IMAGE)
        return cls(
            arrays[TEXT].shape[1] if TEXT in arrays else None,
            arrays[GIVEN].shape[-1] if GIVEN in arrays else 0,
            (image.shape[0], image.shape[1]) if image is not None else None,
            tuple((name, arrays[name].shape[1]) for name in part_names(arrays)),
        )

    def notes(self) -> dict[str, Any]:
        """The form as JSON values; what is not stored is left out, but for the kind of text."""
        notes: dict[str, Any] = {"text_dim": self.text_dim}
        if self.given_channels:
            notes["given_channels"] = self.given_channels
        if self.image_shape:
            notes["image_shape"] = list(self.image_shape)
        if self.parts:
            notes["parts"] = dict(self.parts)
        return notes

    def shapes(
        self, latents: tuple[int, ...], text_length: int, part_lengths: Sequence[int] = ()
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of a record's arrays beside the latents.

        Args:
          latents: (frames, height, width, channels) of the latents.
          text_length: number of condition tokens.
          part_lengths: number of tokens of each of `parts`.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        if self.text_dim is None:
            shapes[LABELS] = (text_length,)
        else:
            shapes[TEXT] = (text_length, self.text_dim)
        if self.given_channels:
            shapes[GIVEN] = (*latents[:3], self.given_channels)
        if self.image_shape:
            shapes[IMAGE] = self.image_shape
        for (name, width), length in zip(self.parts, part_lengths, strict=True):
            shapes[name] = (length, width)
        return shapes

    def described(self) -> dict[str, str]:
        """The form in words, by name."""
        image = self.image_shape
        return {
            "condition": "classes" if self.text_dim is None else f"text of width {self.text_dim}",
            "given": f"{self.given_channels} channels" if self.given_channels else "none",
            "image": f"{image[0]} embeddings of width {image[1]}" if image else "none",
            "parts": ", ".join(f"{name} of width {width}" for name, width in self.parts) or "none",
        }


def part_names(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the arrays of a record that are condition tokens of further kinds, sorted."""
    return sorted(name for name in arrays if name not in NAMED and "." not in name)
