"""Writes grids of stills and clips as PNG, GIF or MP4."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from alload_jax.sampling.frames import to_bytes, write_frames

ClipFormat = Literal["gif", "mp4"]

_TARGET_WIDTH = 900
_GAP = 4
_HEADER = 30
_PAPER, _INK = (24, 26, 32), (220, 224, 232)


class Picture(NamedTuple):
    """A picture or clip that is drawn but not written.

    Attributes:
      path: its file.
      write: writes it; raises InputError or OSError if that fails.
    """

    path: Path
    write: Callable[[], None]


def clip_suffix(frames: int, clip_format: ClipFormat) -> str:
    """The suffix of a file of so many frames: PNG for stills, else `clip_format`."""
    return ".png" if frames == 1 else f".{clip_format}"


def write_grid(path: Path, clips: np.ndarray, headers: list[str]) -> None:
    """Writes stills as a PNG, clips as a looping GIF or as an MP4.

    Args:
      path: path with one of these suffixes; MP4 needs the extra `media`.
      clips: [rows, columns, frames, height, width, 1 or 3], −1 (black) to 1 (white).
      headers: one for each column.
    """
    frames = [_grid(clips[:, :, n], headers) for n in range(clips.shape[2])]
    write_frames(path, frames, path.suffix)


Box = tuple[int, int, int, int]
"""(left, top, right, bottom) of a part of a picture, in pixels."""


def cell_box(row: int, column: int, columns: int, height: int, width: int) -> Box:
    """The place of a sample of height × width pixels in a grid of so many columns."""
    zoom = _zoom(columns, width)
    left, top = _GAP + column * (width * zoom + _GAP), _HEADER + row * (height * zoom + _GAP)
    return (left, top, left + width * zoom, top + height * zoom)


def _zoom(columns: int, width: int) -> int:
    return max(1, (_TARGET_WIDTH // columns - _GAP) // width)


def _grid(images: np.ndarray, headers: list[str]) -> Image.Image:
    """Draws [rows, columns, height, width, channels] as one picture, enlarged without blur."""
    rows, columns, height, width, channels = images.shape
    zoom = _zoom(columns, width)
    cell_height, cell_width = height * zoom + _GAP, width * zoom + _GAP
    page = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _HEADER), _PAPER)
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=20)
    for column, header in enumerate(headers):
        centre = (_GAP + column * cell_width + (cell_width - _GAP) / 2, _HEADER / 2)
        draw.text(centre, header, fill=_INK, font=font, anchor="mm")
    pixels = to_bytes(images)
    pixels = np.broadcast_to(pixels, (*pixels.shape[:-1], 3)) if channels == 1 else pixels
    for row in range(rows):
        for column in range(columns):
            cell = Image.fromarray(np.ascontiguousarray(pixels[row, column]))
            cell = cell.resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            page.paste(cell, cell_box(row, column, columns, height, width)[:2])
    return page
