"""Grids of stills and clips as PNG and GIF."""

import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ClipFormat = Literal["gif", "mp4"]

_TARGET_WIDTH = 900
_GAP = 4
_HEADER = 30
_PAPER, _INK = (24, 26, 32), (220, 224, 232)
_FRAME_MILLISECONDS = 110


def write_grid(
    path: Path, clips: np.ndarray, headers: list[str], clip_format: ClipFormat = "gif"
) -> None:
    """Writes stills as a PNG, clips as a GIF that loops or as an MP4.

    Args:
      path: without suffix.
      clips: [rows, columns, frames, height, width, 1 or 3], −1 (black) to 1 (white).
      headers: one for each column.
      clip_format: of clips; MP4 needs the extra `media`.
    """
    frames = [_grid(clips[:, :, n], headers) for n in range(clips.shape[2])]
    if len(frames) == 1:
        frames[0].save(path.with_suffix(".png"))
        return
    if clip_format == "mp4":
        _write_mp4(path.with_suffix(".mp4"), frames)
        return
    frames[0].save(
        path.with_suffix(".gif"),
        save_all=True,
        append_images=frames[1:],
        duration=_FRAME_MILLISECONDS,
        loop=0,
    )


def has_mp4() -> bool:
    """Whether the extra `media` is installed."""
    return importlib.util.find_spec("av") is not None


def _write_mp4(path: Path, frames: list[Image.Image]) -> None:
    import av  # of the extra `media`

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=round(1000 / _FRAME_MILLISECONDS))
        # The codec takes even sizes only.
        stream.width, stream.height = (size - size % 2 for size in frames[0].size)
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            cut = frame.crop((0, 0, stream.width, stream.height))
            container.mux(stream.encode(av.VideoFrame.from_image(cut)))
        container.mux(stream.encode())


def _grid(images: np.ndarray, headers: list[str]) -> Image.Image:
    """[rows, columns, height, width, channels] as one picture, pixels enlarged but not blurred."""
    rows, columns, height, width, channels = images.shape
    zoom = max(1, (_TARGET_WIDTH // columns - _GAP) // width)
    cell_height, cell_width = height * zoom + _GAP, width * zoom + _GAP
    page = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _HEADER), _PAPER)
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=20)
    for column, header in enumerate(headers):
        centre = (_GAP + column * cell_width + (cell_width - _GAP) / 2, _HEADER / 2)
        draw.text(centre, header, fill=_INK, font=font, anchor="mm")
    pixels = np.clip((images + 1) * 127.5, 0, 255).astype(np.uint8)
    pixels = np.broadcast_to(pixels, (*pixels.shape[:-1], 3)) if channels == 1 else pixels
    for row in range(rows):
        for column in range(columns):
            cell = Image.fromarray(np.ascontiguousarray(pixels[row, column]))
            cell = cell.resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            page.paste(cell, (_GAP + column * cell_width, _HEADER + row * cell_height))
    return page
