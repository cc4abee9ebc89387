"""Conversion of latents to tokens and back."""

from typing import TypeVar

import jax
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)


def patchify(latents: Array, patch: tuple[int, int, int]) -> Array:
    """Splits latents into patches, in (t, h, w) order.

    Args:
      latents: [B, frames, height, width, C], each size a multiple of its patch size.
      patch: (frames, height, width) of one patch.

    Returns:
      [B, S, patch volume · C].
    """
    batch, frames, height, width, channels = latents.shape
    pt, ph, pw = patch
    split = latents.reshape(
        batch, frames // pt, pt, height // ph, ph, width // pw, pw, channels
    ).transpose(0, 1, 3, 5, 2, 4, 6, 7)
    return split.reshape(batch, -1, pt * ph * pw * channels)


def unpatchify(tokens: Array, shape: tuple[int, ...], patch: tuple[int, int, int]) -> Array:
    """Inverts `patchify`.

    Args:
      tokens: [B, S, patch volume · C].
      shape: shape of the latents, (B, frames, height, width, C).
      patch: (frames, height, width) of one patch.

    Returns:
      [B, frames, height, width, C].
    """
    batch, frames, height, width, channels = shape
    pt, ph, pw = patch
    split = tokens.reshape(
        batch, frames // pt, height // ph, width // pw, pt, ph, pw, channels
    ).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return split.reshape(shape)
