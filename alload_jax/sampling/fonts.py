"""The font of labels in pictures."""

import functools
from pathlib import Path

import matplotlib
from PIL import ImageFont


@functools.cache
def label_font(size: int) -> ImageFont.FreeTypeFont:
    """A font of this size in pixels, with Latin, Greek and Cyrillic letters and accents."""
    # Pillow's own font lacks × and accents.
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(path, size)
