"""Writes grids of stills and clips as PNG, GIF or MP4.

Equal samples produce equal bytes. Files are written atomically.
"""

import importlib.util
import io
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import safetensors.numpy
from PIL import Image, ImageDraw, ImageFont, ImageSequence

from alload_jax.errors import InputError
from alload_jax.files import replacing, require_local

DEFAULT_FPS = 9.0
"""Frames per second where nothing says another number."""


def has_mp4() -> bool:
    """Returns whether the extra `media` is installed."""
    return importlib.util.find_spec("av") is not None


def to_bytes(values: np.ndarray) -> np.ndarray:
    """Converts values from −1 (black) to 1 (white) to uint8 of the same shape."""
    return np.rint(np.clip((values + 1) * 127.5, 0, 255)).astype(np.uint8)


def read_frames(path: Path) -> tuple[list[Image.Image], float]:
    """Reads the frames of an .mp4 (extra `media`), and its frames per second."""
    import av  # of the extra `media`

    with av.open(str(path)) as container:
        (stream,) = container.streams.video
        frames = [frame.to_image() for frame in container.decode(stream)]
        return frames, float(stream.average_rate or DEFAULT_FPS)


def middle_frame(path: Path) -> Image.Image:
    """Reads a picture, or the frame in the middle of a clip (.mp4 needs the extra `media`).

    Raises:
      OSError: the file is missing or damaged.
    """
    try:
        if path.suffix.lower() == ".mp4":
            frames, _ = read_frames(path)
            return frames[len(frames) // 2].convert("RGB")
        with Image.open(path) as picture:
            # A GIF stores equal frames as one that lasts longer.
            shown = ImageSequence.Iterator(picture)
            ends = list(accumulate(float(frame.info.get("duration") or 1) for frame in shown))
            picture.seek(bisect_right(ends, ends[-1] / 2) if len(ends) > 1 else 0)
            return picture.convert("RGB")
    except Exception as error:  # decoders raise anything for damaged files
        raise OSError(f"{path}: cannot be read ({error})") from error


def write_frames(
    path: Path, frames: Sequence[Image.Image], suffix: str, fps: float = DEFAULT_FPS
) -> None:
    """Writes frames in the format of `suffix`: .png (first frame), .gif (loops) or .mp4 (`media`).

    Raises:
      ValueError: the format is unknown.
    """
    if suffix == ".png":
        frames[0].save(path, format="PNG")
    elif suffix == ".gif":
        path.write_bytes(encode_gif(frames, fps))
    elif suffix == ".mp4":
        _write_mp4(path, frames, fps)
    else:
        raise ValueError(f"{path}: {suffix} is no format of pictures; see `check_format`")


def encode_gif(frames: Sequence[Image.Image], fps: float = DEFAULT_FPS) -> bytes:
    """Returns the bytes of a GIF that loops."""
    content = io.BytesIO()
    frames[0].save(
        content,
        format="GIF",
        save_all=True,
        append_images=frames[1:],
        duration=10 * max(1, round(100 / fps)),  # GIF counts hundredths of a second
        loop=0,
    )
    return content.getvalue()


_BT709, _LIMITED = 1, 1
"""Colours and range by H.273, as players assume of HD files. Others they guess by size."""
_CONVERSION = {"dst_colorspace": _BT709, "dst_color_range": _LIMITED, "threads": 1}


def _write_mp4(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    import av  # of the extra `media`

    # The bytes must not depend on versions, dates or the machine's number of threads. With
    # AVX-512 x264's mbtree takes values from memory that nothing has set.
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        options = {"threads": "1", "mbtree": "0"}
        stream = container.add_stream("libx264", rate=rate, options=options)
        # The codec supports only even sizes.
        stream.width, stream.height = (size - size % 2 for size in frames[0].size)
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED
        for frame in frames:
            cut = av.VideoFrame.from_image(frame.crop((0, 0, stream.width, stream.height)))
            container.mux(stream.encode(cut.reformat(format="yuv420p", **_CONVERSION)))
        container.mux(stream.encode())


PICTURES = (".png", ".gif", ".mp4")
LATENTS = ".safetensors"

_SIDES = {".gif": 2**16 - 1, ".mp4": 2**14}
"""Pixels of the longest side that a format has, or its encoder takes."""


def too_large(suffix: str, height: int, width: int) -> str | None:
    """Why a picture of this size cannot be written in a format; None if it can."""
    if max(height, width) <= (most := _SIDES.get(suffix, math.inf)):
        return None
    name = suffix[1:].upper()
    return (
        f"would have {height}×{width} pixels, but {name} supports sides up to {most}; choose a "
        "smaller size"
    )


def check_format(place: str, path: Path, size: tuple[int, int, int], channels: int | None) -> None:
    """Checks that a sample can be written in the format of a path.

    Args:
      place: source of the path, for the message.
      path: path of the file; its suffix selects the format.
      size: (frames, height, width) of the picture, in pixels.
      channels: number of channels of the picture; None if the sample is latents that need a
        decoder.

    Raises:
        InputError: the format does not support the sample, or the path is in object storage.
    """
    require_local(path)
    frames, height, width = size
    suffix = path.suffix.lower()
    if suffix == LATENTS:
        return
    reason = None
    if suffix not in PICTURES:
        reason = f"has none of the suffixes {', '.join((*PICTURES, LATENTS))}; give it one"
    elif channels not in (1, 3):
        reason = (
            "is a picture, but this model generates latents that need a decoder; give --vae, a "
            f"local folder of its VAE, or the suffix {LATENTS}"
        )
    elif suffix == ".png" and frames > 1:
        reason = f"holds one frame, but the sample has {frames}; choose .gif or .mp4"
    elif (large := too_large(suffix, height, width)) is not None:
        reason = large
    elif suffix == ".mp4" and not has_mp4():
        reason = "needs the package av; install alload-jax[media], or choose .gif"
    elif suffix == ".mp4" and (height % 2 or width % 2):
        reason = (
            f"would have {height}×{width} pixels, but MP4 needs even sizes; choose .gif, or "
            "--zoom 2"
        )
    if reason is not None:
        raise InputError(f"{place}: {path} {reason}")


def write_clip(
    path: Path,
    clip: np.ndarray,
    notes: Mapping[str, object],
    zoom: int = 1,
    fps: float | None = None,
) -> None:
    """Writes a sample in the format of the suffix and creates missing folders.

    Args:
      path: .png (one frame), .gif (loops), .mp4, or .safetensors.
      clip: [frames, height, width, channels] float32. Pictures have 1 or 3 channels, −1 (black)
        to 1 (white), or are uint8.
      notes: how the sample was generated, JSON values; only .safetensors stores them, in its
        metadata as `sampling`.
      zoom: scale factor of pictures, in pixels per pixel of the sample.
      fps: frames per second of .gif and .mp4; None for 9.

    Raises:
      InputError: a value is not finite, or the file cannot be written.
      ValueError: the format is unknown; see `check_format`.
    """
    if not np.isfinite(clip).all():
        raise InputError(
            f"{path}: the generated sample is not finite; choose another checkpoint, or a guidance "
            "closer to 1"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            if (suffix := path.suffix.lower()) == LATENTS:
                # A single note, because the library writes several notes in random order.
                note = {"sampling": json.dumps(notes, sort_keys=True, ensure_ascii=False)}
                content = {"latents": np.ascontiguousarray(clip, np.float32)}
                unfinished.write_bytes(safetensors.numpy.save(content, note))
            else:
                values = clip if clip.dtype == np.uint8 else to_bytes(clip)
                values = values.repeat(zoom, axis=1).repeat(zoom, axis=2)  # enlarged sharply
                values = values[..., 0] if values.shape[-1] == 1 else values
                images = [Image.fromarray(np.ascontiguousarray(frame)) for frame in values]
                write_frames(unfinished, images, suffix, fps or DEFAULT_FPS)
    except OSError as error:  # often lacks the file name, for example if the disk is full
        reason = error.strerror or str(error) or type(error).__name__
        raise InputError(
            f"{path}: cannot be written ({reason}); free disk space or name another path"
        ) from error


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
    with replacing(path) as unfinished:
        write_frames(unfinished, frames, path.suffix)


Box = tuple[int, int, int, int]
"""(left, top, right, bottom) of a part of a picture, in pixels."""


def cell_box(row: int, column: int, columns: int, height: int, width: int) -> Box:
    """The place of a sample of height × width pixels in a grid of so many columns."""
    zoom = _zoom(columns, width)
    left, top = _GAP + column * (width * zoom + _GAP), _HEADER + row * (height * zoom + _GAP)
    return (left, top, left + width * zoom, top + height * zoom)


def page_size(rows: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """(width, height) of the picture of a grid, in pixels."""
    _, _, right, bottom = cell_box(rows - 1, columns - 1, columns, height, width)
    return right + _GAP, bottom + _GAP


def _zoom(columns: int, width: int) -> int:
    return max(1, (_TARGET_WIDTH // columns - _GAP) // width)


def _grid(images: np.ndarray, headers: list[str]) -> Image.Image:
    """Draws [rows, columns, height, width, channels] as one picture, enlarged without blur."""
    rows, columns, height, width, channels = images.shape
    zoom = _zoom(columns, width)
    page = Image.new("RGB", page_size(rows, columns, height, width), _PAPER)
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=20)
    for column, header in enumerate(headers):
        left, _, right, _ = cell_box(0, column, columns, height, width)
        centre = ((left + right) / 2, _HEADER / 2)
        draw.text(centre, header, fill=_INK, font=font, anchor="mm")
    pixels = to_bytes(images)
    pixels = np.broadcast_to(pixels, (*pixels.shape[:-1], 3)) if channels == 1 else pixels
    for row in range(rows):
        for column in range(columns):
            cell = Image.fromarray(np.ascontiguousarray(pixels[row, column]))
            cell = cell.resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            page.paste(cell, cell_box(row, column, columns, height, width)[:2])
    return page
