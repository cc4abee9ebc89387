"""What all samples of a data folder have in common beside the channels of their latents."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from alload_jax.data.record import GIVEN, IMAGE, LABELS, TEXT


class SampleForm(NamedTuple):
    """The arrays of a sample beside its latents.

    Attributes:
      text_dim: width of the text embeddings; None for classes.
      given_channels: channels that an image-to-video model takes beside the noisy latents; 0 if
        none are stored.
      image_shape: (tokens, width) of the image embeddings; None if none are stored.
    """

    text_dim: int | None = None
    given_channels: int = 0
    image_shape: tuple[int, int] | None = None

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> Self:
        """The form that a manifest's notes describe; what they lack is not stored."""
        shape = notes.get("image_shape")
        return cls(
            notes.get("text_dim"),
            notes.get("given_channels", 0),
            (shape[0], shape[1]) if shape else None,
        )

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The form of the arrays of one record."""
        image = arrays.get(IMAGE)
        return cls(
            arrays[TEXT].shape[1] if TEXT in arrays else None,
            arrays[GIVEN].shape[-1] if GIVEN in arrays else 0,
            (image.shape[0], image.shape[1]) if image is not None else None,
        )

    def notes(self) -> dict[str, Any]:
        """The form as JSON values; what is not stored is left out, but for the kind of text."""
        notes: dict[str, Any] = {"text_dim": self.text_dim}
        if self.given_channels:
            notes["given_channels"] = self.given_channels
        if self.image_shape:
            notes["image_shape"] = list(self.image_shape)
        return notes

    def shapes(self, latents: tuple[int, ...], text_length: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a record's arrays beside the latents.

        Args:
          latents: (frames, height, width, channels) of the latents.
          text_length: number of condition tokens.
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
        return shapes

    def described(self) -> dict[str, str]:
        """The form in words, by name."""
        image = self.image_shape
        return {
            "condition": "classes" if self.text_dim is None else f"text of width {self.text_dim}",
            "given": f"{self.given_channels} channels" if self.given_channels else "none",
            "image": f"{image[0]} embeddings of width {image[1]}" if image else "none",
        }
