"""Decodes images: upright, without transparency, cut to a bucket."""

import struct
import warnings
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from alload_jax.data.prepare.sources import Fit, Source, UnusableError, opened, short

BACKGROUND = 255
"""Grey level that transparent pixels get: white."""
MOST_PIXELS = 2**27
"""Most pixels of a picture; more is taken for a decompression bomb."""
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError),
    *(OverflowError, MemoryError, NotImplementedError, struct.error, zlib.error),
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow's decoders raise for damaged files."""


def decode_image(source: Source, choose: Callable[[int, int], Fit]) -> np.ndarray:
    """Decodes an image: turned as its EXIF data say, on white, scaled to 8 bits, resized and cut.

    Args:
      source: the file.
      choose: gives the fit for (height, width) in pixels.

    Returns:
      [1, height, width, 3] uint8.

    Raises:
      UnusableError: it is damaged, no image, too large or too small.
    """
    with opened(source) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            stored = Image.open(file)
            check_pixels(stored.height, stored.width)
            stored.load()
            image = to_rgb(ImageOps.exif_transpose(stored))
        except UnusableError:
            raise
        except UnidentifiedImageError as error:
            raise UnusableError("not an image, or of an unknown format") from error
        except _DAMAGE as error:
            raise UnusableError(f"damaged image ({short(error)})") from error
    wanted = choose(image.height, image.width)
    height, width = wanted.resized
    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    return cut(np.asarray(resized), wanted)[None]


def check_pixels(height: int, width: int) -> None:
    """Refuses a decompression bomb before its pixels are decoded.

    Raises:
      UnusableError: the picture has more than `MOST_PIXELS`.
    """
    if height * width > MOST_PIXELS:
        raise UnusableError(
            f"{width}×{height} pixels are more than {MOST_PIXELS:,}: a decompression bomb?"
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as 8-bit RGB, on white where it is transparent.

    Raises:
      UnusableError: its values are floats, whose range is not known.
    """
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip, not scale
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise UnusableError("image of floats, whose range is not known")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (BACKGROUND, BACKGROUND, BACKGROUND, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def cut(picture: np.ndarray, wanted: Fit) -> np.ndarray:
    """Cuts [height, width, 3] to the bucket around its centre."""
    top = (picture.shape[0] - wanted.bucket.height) // 2
    left = (picture.shape[1] - wanted.bucket.width) // 2
    return picture[top : top + wanted.bucket.height, left : left + wanted.bucket.width]
