"""Writes images and videos; equal frames produce equal bytes."""

import importlib.util
import io
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np
from PIL import Image

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
    if path.suffix.lower() == ".mp4":
        return _middle_of_mp4(path)
    with Image.open(path) as picture:
        # A GIF stores equal frames as one that lasts longer.
        count = getattr(picture, "n_frames", 1)
        ends = list(accumulate(_duration(picture, number) for number in range(count)))
        picture.seek(bisect_right(ends, ends[-1] / 2) if count > 1 else 0)
        return picture.convert("RGB")


def _duration(picture: Image.Image, frame: int) -> float:
    picture.seek(frame)
    return float(picture.info.get("duration") or 1)


def _middle_of_mp4(path: Path) -> Image.Image:
    import av  # of the extra `media`

    try:
        frames, _ = read_frames(path)
    except (av.FFmpegError, ValueError) as error:
        raise OSError(f"{path}: cannot be read ({error})") from error
    return frames[len(frames) // 2].convert("RGB")


def write_frames(
    path: Path, frames: Sequence[Image.Image], suffix: str, fps: float = DEFAULT_FPS
) -> None:
    """Writes frames in the format of `suffix`: .png (first frame), .gif (loops) or .mp4 (`media`).

    Raises:
      KeyError: the format is unknown.
    """
    {".png": _write_png, ".gif": _write_gif, ".mp4": _write_mp4}[suffix](path, frames, fps)


def _write_png(path: Path, frames: Sequence[Image.Image], _: float) -> None:
    frames[0].save(path, format="PNG")


def _write_gif(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    path.write_bytes(encode_gif(frames, fps))


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


def _write_mp4(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    import av  # of the extra `media`

    # The bytes must not depend on versions, dates or the machine's number of threads.
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"threads": "1"})
        # The codec supports only even sizes.
        stream.width, stream.height = (size - size % 2 for size in frames[0].size)
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            cut = frame.crop((0, 0, stream.width, stream.height))
            container.mux(stream.encode(av.VideoFrame.from_image(cut)))
        container.mux(stream.encode())
