"""Writes one sample to a file: an image, a video or its latents.

Equal samples produce equal bytes. Files are written atomically.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from PIL import Image

from alload_jax.errors import InputError
from alload_jax.files import replacing
from alload_jax.sampling.frames import DEFAULT_FPS, has_mp4, to_bytes, write_frames

PICTURES = (".png", ".gif", ".mp4")
LATENTS = ".safetensors"

_GIF_SIDE = 2**16 - 1


def check_format(place: str, path: Path, size: tuple[int, int, int], channels: int | None) -> None:
    """Checks that a sample can be written in the format of a path.

    Args:
      place: source of the path, for the message.
      path: path of the file; its suffix selects the format.
      size: (frames, height, width) of the picture, in pixels.
      channels: number of channels of the picture; None if the sample is latents that need a
        decoder.

    Raises:
        InputError: the format does not support the sample.
    """
    frames, height, width = size
    suffix = path.suffix.lower()
    if suffix == LATENTS:
        return
    if suffix not in PICTURES:
        known = ", ".join((*PICTURES, LATENTS))
        raise InputError(f"{place}: {path} has none of the suffixes {known}; give it one")
    if channels not in (1, 3):
        raise InputError(
            f"{place}: {path} is a picture, but this model generates latents that need a decoder; "
            f"give --vae, a local folder of its VAE, or the suffix {LATENTS}"
        )
    if suffix == ".png" and frames > 1:
        raise InputError(
            f"{place}: {path} holds one frame, but the sample has {frames}; choose .gif or .mp4"
        )
    if suffix == ".gif" and max(height, width) > _GIF_SIDE:
        raise InputError(
            f"{place}: {path} would have {height}×{width} pixels, but GIF supports sides up to "
            f"{_GIF_SIDE}; choose .mp4 or a smaller size"
        )
    if suffix == ".mp4" and not has_mp4():
        raise InputError(
            f"{place}: {path} needs the package av; install alload-jax[media], or choose .gif"
        )
    if suffix == ".mp4" and (height % 2 or width % 2):
        raise InputError(
            f"{place}: {path} would have {height}×{width} pixels, but MP4 needs even sizes; "
            "choose .gif, or --zoom 2"
        )


def write_clip(
    path: Path, clip: np.ndarray, notes: dict[str, Any], zoom: int = 1, fps: float | None = None
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
      KeyError: the format is unknown; see `check_format`.
    """
    if not np.isfinite(clip).all():
        raise InputError(
            f"{path}: the generated sample is not finite; choose another checkpoint, or a guidance "
            "closer to 1"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, clip, notes, zoom, fps or DEFAULT_FPS)
    except OSError as error:  # often lacks the file name, for example if the disk is full
        reason = error.strerror or str(error) or type(error).__name__
        raise InputError(
            f"{path}: cannot be written ({reason}); free disk space or name another path"
        ) from error


def pixels(clip: np.ndarray, zoom: int = 1) -> list[Image.Image]:
    """Converts [frames, height, width, 1 or 3], −1 to 1 or uint8, to images, enlarged sharply."""
    values = clip if clip.dtype == np.uint8 else to_bytes(clip)
    values = values.repeat(zoom, axis=1).repeat(zoom, axis=2)
    values = values[..., 0] if values.shape[-1] == 1 else values
    return [Image.fromarray(np.ascontiguousarray(frame)) for frame in values]


def _write_atomically(
    path: Path, clip: np.ndarray, notes: dict[str, Any], zoom: int, fps: float
) -> None:
    suffix = path.suffix.lower()
    with replacing(path) as partial:
        if suffix == LATENTS:
            # A single note, because the library writes several notes in random order.
            note = {"sampling": json.dumps(notes, sort_keys=True, ensure_ascii=False)}
            content = {"latents": np.ascontiguousarray(clip, np.float32)}
            partial.write_bytes(safetensors.numpy.save(content, note))
        else:
            write_frames(partial, pixels(clip, zoom), suffix, fps)
