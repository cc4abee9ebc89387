"""What image-to-video models are given: pictures, and their latents and embeddings."""

from pathlib import Path

import numpy as np

from alload_jax.data.pixel_latents import fold_frames
from alload_jax.data.prepare.buckets import Bucket, Fit, covering
from alload_jax.data.prepare.images import decode_image
from alload_jax.data.prepare.sources import Source
from alload_jax.data.prepare.unusable import UnusableError
from alload_jax.errors import InputError


def read_picture(path: Path, height: int, width: int) -> np.ndarray:
    """Reads an image, turned, resized and cut around its centre to a size, as preparation does.

    Returns:
      [height, width, 3] uint8.

    Raises:
      InputError: the file is missing or no image.
    """
    bucket = Bucket(height, width)

    def fit(rows: int, columns: int) -> Fit:
        return Fit(bucket, covering(bucket, rows, columns))

    try:
        size = path.stat().st_size
        (picture,) = decode_image(Source(path, 0, size), fit)
    except (OSError, UnusableError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot be read as an image ({reason}); name another") from error
    return picture


def as_latent(picture: np.ndarray, channels: int, frames_per_latent: int) -> np.ndarray:
    """A picture as the first latent frame of a model of pixels.

    Args:
      picture: [height, width, 3] uint8.
      channels: of a latent, those of as many pixels as it has frames.
      frames_per_latent: frames of a latent.

    Returns:
      [1, height, width, channels] float32 from −1 to 1.
    """
    values = picture.astype(np.float32) / 127.5 - 1
    if channels == frames_per_latent:
        values = values.mean(axis=-1, keepdims=True)
    return fold_frames(values[None], frames_per_latent)
