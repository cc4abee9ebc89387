"""The manifest of samples in files that alload did not write."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.sample_form import SampleForm
from alload_jax.data.sources.arrays import LatentShape
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple

_USUAL_STRIDES: dict[int, Triple] = {16: (4, 8, 8), 48: (4, 16, 16)}
"""Strides of the video VAEs in use with so many channels: Wan 2.1 and others, Wan 2.2."""


class ScannedSample(NamedTuple):
    """What a scan knows of a sample.

    Attributes:
      file: file of the latents, relative to the data folder.
      row: number of the sample in the file.
      latents: shape of the latents.
      text_length: tokens of the condition, with padding.
      text_dim: width of the text; None for classes.
      mark: CRC-32 of what was read of the content.
      size: (frames, height, width) in pixels as recorded; 0 where nothing is recorded.
    """

    file: str
    row: int
    latents: LatentShape
    text_length: int
    text_dim: int | None
    mark: int
    size: Triple = (0, 0, 0)


def manifest_of(
    folder: Path,
    samples: Sequence[ScannedSample],
    stride: Triple | None,
    file_bytes: dict[str, int],
    origin: dict[str, Any],
    read_as: str = "",
) -> Manifest:
    """Returns the manifest of scanned samples.

    Sizes in pixels are those of the latents times the stride: recorded sizes are often those of
    the files before they were resized.

    Args:
      folder: the data folder.
      samples: the samples in their order.
      stride: VAE stride; None takes that of the recorded sizes, or the usual one.
      file_bytes: size of each file.
      origin: provenance.
      read_as: the settings that change what is read; part of the identity.

    Raises:
      InputError: there are no samples, they disagree, or the stride is unknown.
    """
    if not samples:
        raise InputError(f"{folder}: holds no samples; set data.folder to another folder")
    _require_alike(folder, samples)
    grids = np.array([sample.latents.grid for sample in samples], np.int64)
    stride = stride or _recorded_stride(samples, grids) or _usual_stride(folder, samples)
    seed = zlib.crc32(read_as.encode())
    marks = [zlib.crc32(sample.mark.to_bytes(4, "little"), seed) for sample in samples]
    return Manifest(
        path=folder,
        shard=np.array([sample.file for sample in samples], object),
        index=np.array([sample.row for sample in samples], np.int64),
        shape=(grids - [1, 0, 0]) * stride + [1, 0, 0],
        channels=np.array([sample.latents.channels for sample in samples], np.int32),
        text_length=np.array([sample.text_length for sample in samples], np.int32),
        checksum=np.array(marks, np.uint32),
        vae_stride=stride,
        form=SampleForm(samples[0].text_dim),
        shard_bytes=file_bytes,
        origin=origin,
    )


def _require_alike(folder: Path, samples: Sequence[ScannedSample]) -> None:
    first = samples[0]
    for number, sample in enumerate(samples):
        for what, value, expected in (
            ("channels", sample.latents.channels, first.latents.channels),
            ("text of width", sample.text_dim, first.text_dim),
        ):
            if value != expected:
                raise InputError(
                    f"{folder}: sample {number} ({sample.file}, {sample.row}) has {what} {value}, "
                    f"sample 0 has {expected}; keep samples of one kind in the folder"
                )


def _recorded_stride(samples: Sequence[ScannedSample], grids: np.ndarray) -> Triple | None:
    """The one stride that turns all recorded sizes into the latents; None if there is none.

    Some trainers record the latent's frames as frames, or swap height and width.
    """
    sizes = np.array([sample.size for sample in samples], np.int64)
    videos = grids[:, 0] > 1
    if not sizes.all() or not videos.any():
        return None
    offset = np.array([1, 0, 0])
    pairs = zip((sizes - offset).T, (grids - offset).T, strict=True)
    (frames, t), (height, h), (width, w) = pairs
    ratios = [np.unique(frames[videos] / t[videos]), np.unique(height / h), np.unique(width / w)]
    if not all(len(found) == 1 and found[0] == int(found[0]) for found in ratios):
        return None
    stride = (int(ratios[0][0]), int(ratios[1][0]), int(ratios[2][0]))
    return stride if stride[0] > 1 and stride[1] == stride[2] else None


def _usual_stride(folder: Path, samples: Sequence[ScannedSample]) -> Triple:
    channels = samples[0].latents.channels
    if channels not in _USUAL_STRIDES:
        raise InputError(
            f"{folder}: the VAE's stride is not recorded, and latents of {channels} channels have "
            "no usual one; set data.source.vae_stride, such as [4, 8, 8]"
        )
    return _USUAL_STRIDES[channels]
