"""Files of other trainers: finding them, and the layouts, statistics and checks of their arrays.

Statistics of Wan 2.1 are the defaults of diffusers' `AutoencoderKLWan`; those of Wan 2.2 (5B) are
of the VAE of Wan's repository.
"""

import os
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import pyarrow as pa
from typing_extensions import override

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import LABELS, LATENTS, TEXT, SampleForm
from alload_jax.data.sources import SampleSource
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError, first_line
from alload_jax.files import Json, visible_files
from alload_jax.planning.samples import Triple
from alload_jax.processes import waits

_PICKLES = (".pt", ".pth", ".pkl", ".ckpt", ".bin")
_THREADS = 16  # scanning waits for the file system

T = TypeVar("T")
S = TypeVar("S")


def find_files(folder: Path, suffix: str) -> list[str]:
    """Returns the files of a folder and the folders in it whose names end in `suffix`.

    Hidden files and folders are left out. Paths are relative, sorted by their bytes.

    Raises:
      InputError: a file is a link out of the folder, or no file.
    """
    root = Path(os.path.realpath(folder))
    if root.is_file():
        return [folder.name] if folder.name.endswith(suffix) else []
    found = sorted((name for name in visible_files(root) if name.endswith(suffix)), key=os.fsencode)
    for name in found:
        path = root / name  # folders that are links are not walked
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise InputError(f"{folder / name}: is a link out of the folder; copy the file here")
        if not path.is_file():
            raise InputError(f"{folder / name}: is not a file; remove it")
    return found


def find_pickle(folder: Path) -> str | None:
    """Returns the first file of PyTorch's pickle format in a folder; None if there is none."""
    if folder.is_file():
        return folder.name if folder.suffix in _PICKLES else None
    return min((name for name in visible_files(folder) if name.endswith(_PICKLES)), default=None)


def root_of(folder: Path) -> Path:
    """Returns the folder to which the names of `find_files` are relative."""
    return folder.parent if folder.is_file() else folder


def scan(function: Callable[[T], S], items: Sequence[T]) -> list[S]:
    """Applies a function that reads a little of a file to each item, several at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


Normalize = Literal["wan2.1", "wan2.2", "none"]
"""The VAE whose statistics latents must be normalised with; `none` for normalised latents."""

# fmt: off
_STATISTICS = {
    "wan2.1": (
        (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
         0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
        (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
         3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    ),
    "wan2.2": (
        (-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
         -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
         -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
         -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
         -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
         0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
        (0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
         0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
         0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
         0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
         0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
         0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ),
}
# fmt: on


def normalized(latents: np.ndarray, normalize: Normalize | None) -> np.ndarray:
    """Subtracts the mean of each channel and divides by its standard deviation.

    Args:
      latents: [..., C] floats.
      normalize: the VAE; None and `none` leave the latents as they are.

    Returns:
      [..., C] float32, or `latents` themselves.
    """
    if normalize not in _STATISTICS:
        return latents
    mean, deviation = np.array(_STATISTICS[normalize], np.float32)
    return (latents.astype(np.float32) - mean) / deviation


Layout = Literal["CTHW", "TCHW", "THWC"]
"""Order of the axes of stored latents: channels, frames (time), height, width."""

_LARGEST_AXIS = 10**6
READ_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)
"""What reading a damaged file raises."""
FLOATS = frozenset(map(np.dtype, (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)))
"""Dtypes that latents and text embeddings may have."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How stored arrays become samples.

    Attributes:
      labels: name of what holds integers, or lists of them: classes, which then take the place of
        text.
      layout: order of the axes of latents.
      normalize: the VAE whose statistics normalise the latents; none for normalised latents.
      vae_stride: pixels per latent along frames, height and width; null for the recorded one, or
        the usual one of latents with 16 or 48 channels.
    """

    labels: str | None = None
    layout: Layout = "CTHW"
    normalize: Normalize | None = None
    vae_stride: Triple | None = None


def latent_shape(shape: Sequence[int], layout: Layout) -> tuple[int, int, int, int]:
    """Returns (frames, height, width, channels) of stored latents.

    Raises:
      ValueError: the shape has other axes, or an axis is empty or absurdly long.
    """
    axes = _four_axes(shape, layout)
    frames, height, width, channels = (axes[layout.index(axis)] for axis in "THWC")
    return frames, height, width, channels


def _four_axes(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The shape with all four axes: a leading batch of 1 is dropped, a picture is one frame."""
    axes = tuple(shape)
    if len(axes) == 5 and axes[0] == 1:
        axes = axes[1:]
    if len(axes) == 3:
        frames = layout.index("T")
        axes = (*axes[:frames], 1, *axes[frames:])
    if len(axes) != 4 or not all(1 <= size <= _LARGEST_AXIS for size in axes):
        raise ValueError(f"latents have shape {list(shape)[:8]}; they must be {layout}")
    return axes


def channels_last(latents: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns stored latents as [frames, height, width, channels]; a view.

    Raises:
      ValueError: as `latent_shape`.
    """
    axes = latents.reshape(_four_axes(latents.shape, layout))
    return axes.transpose([layout.index(axis) for axis in "THWC"])


def text_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns (L, width) of stored text embeddings; a leading batch of 1 is dropped.

    Raises:
      ValueError: the shape has other axes, or an axis is absurdly long.
    """
    axes = tuple(shape)
    if len(axes) == 3 and axes[0] == 1:
        axes = axes[1:]
    if len(axes) != 2 or not (0 <= axes[0] <= _LARGEST_AXIS and 1 <= axes[1] <= _LARGEST_AXIS):
        raise ValueError(f"text embeddings have shape {list(shape)[:8]}; they must be [L, width]")
    return axes


def text_tokens(text: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Returns stored text embeddings as [L, width], without padding.

    Args:
      text: as `text_shape` takes them.
      mask: [L], 1 for tokens and then 0 for padding; a leading batch of 1 is dropped. None if there
        is no padding.

    Raises:
      ValueError: the text has other axes, or the mask has another length, or padding before a
        token.
    """
    text = text.reshape(text_shape(text.shape))
    if mask is None:
        return text
    kept = mask.reshape(-1).astype(bool)
    length = int(kept.sum())
    if kept.shape != text.shape[:1] or not kept[:length].all():
        raise ValueError(
            f"the mask has shape {mask.shape} and {length} tokens; it must be {len(text)} values, "
            "ones before zeros"
        )
    return text[:length]


def checked_sample(
    manifest: Manifest, sample: int, arrays: Mapping[str, np.ndarray], place: str
) -> dict[str, np.ndarray]:
    """Checks a sample against the manifest, and returns the arrays that the manifest names.

    Args:
      manifest: the manifest.
      sample: number of the sample.
      arrays: the sample's arrays by name. Its condition may be shorter than the manifest says.
      place: where the sample lies, for messages.

    Raises:
      BadRecordError: one is missing, its shape or dtype is not as the manifest says, or a value is
        not finite.
    """
    found = {}
    for name, shape in manifest.record_shapes(sample).items():
        if name not in arrays:
            raise BadRecordError(f"{place} holds no {name}")
        array, is_condition = arrays[name], name in (TEXT, LABELS)
        is_shorter = is_condition and array.shape[:1] < shape[:1]
        if array.shape[1:] != shape[1:] or (array.shape[:1] != shape[:1] and not is_shorter):
            most = f", with at most {shape[0]} tokens" if is_condition else ""
            raise BadRecordError(f"{place} holds {name} of shape {array.shape}, not {shape}{most}")
        if name == LABELS:
            if array.dtype.kind not in "iu":
                raise BadRecordError(f"{place} holds classes of dtype {array.dtype}, not integers")
            array = array.astype(np.int32)
        elif array.dtype not in FLOATS:
            raise BadRecordError(f"{place} holds {name} of dtype {array.dtype}, not floats")
        elif not np.isfinite(array).all():
            raise BadRecordError(f"{place} holds {name} with NaN or infinite values")
        found[name] = array
    return found


_USUAL_STRIDES: dict[int, Triple] = {16: (4, 8, 8), 48: (4, 16, 16)}
"""Strides of the video VAEs in use with so many channels: Wan 2.1 and others, Wan 2.2."""


class ScannedSample(NamedTuple):
    """What a scan knows of a sample.

    Attributes:
      file: file of the latents, relative to the data folder.
      row: number of the sample in the file.
      latents: (frames, height, width, channels) of the latents.
      text_length: tokens of the condition, with padding.
      text_dim: width of the text; None for classes.
      mark: CRC-32 of what was read of the content.
      size: (frames, height, width) in pixels as recorded; 0 where nothing is recorded.
    """

    file: str
    row: int
    latents: tuple[int, int, int, int]
    text_length: int
    text_dim: int | None
    mark: int
    size: Triple = (0, 0, 0)


@waits("for the data folder to be read")
class FileSamples(SampleSource):
    """Random access to samples in files of other trainers, which are opened for each sample."""

    def __init__(
        self,
        folder: Path,
        samples: Sequence[ScannedSample],
        reading: Reading,
        file_bytes: dict[str, int],
        origin: Json,
    ):
        """Makes the manifest.

        Sizes in pixels are those of the latents times the stride: recorded sizes are often those of
        the files before they were resized.

        Args:
          folder: the data folder.
          samples: the samples in their order.
          reading: how they are read; layout and normalisation are part of the identity.
          file_bytes: size of each file.
          origin: provenance.

        Raises:
          InputError: there are no samples, they disagree, the stride is unknown, or the VAE that
            normalises them has other channels.
        """
        if not samples:
            raise InputError(f"{folder}: holds no samples; set data.folder to another folder")
        latents = np.array([sample.latents for sample in samples], np.int64)
        grids, channels = latents[:, :3], latents[:, 3].tolist()
        widths = [sample.text_dim for sample in samples]
        for what, values in (("channels", channels), ("text of width", widths)):
            wrong = next((n for n, value in enumerate(values) if value != values[0]), None)
            if wrong is not None:
                file, row = samples[wrong][:2]
                raise InputError(
                    f"{folder}: sample {wrong} ({file}, {row}) has {what} {values[wrong]}, "
                    f"sample 0 has {values[0]}; keep samples of one kind in the folder"
                )
        stride = reading.vae_stride or _recorded_stride(samples, grids)
        stride = stride or _USUAL_STRIDES.get(channels[0])
        if stride is None:
            raise InputError(
                f"{folder}: the VAE's stride is not recorded, and latents of {channels[0]} "
                "channels have no usual one; set data.source.vae_stride, such as [4, 8, 8]"
            )
        seed = zlib.crc32(f"{reading.layout} {reading.normalize}".encode())
        marks = [zlib.crc32(sample.mark.to_bytes(4, "little"), seed) for sample in samples]
        self.reading = reading
        self.manifest = Manifest(
            path=folder,
            shard=np.array([sample.file for sample in samples], object),
            index=np.array([sample.row for sample in samples], np.int64),
            shape=(grids - [1, 0, 0]) * stride + [1, 0, 0],
            channels=np.array(channels, np.int32),
            text_length=np.array([sample.text_length for sample in samples], np.int32),
            checksum=np.array(marks, np.uint32),
            vae_stride=stride,
            form=SampleForm(widths[0]),
            shard_bytes=file_bytes,
            origin=origin,
        )
        statistics = _STATISTICS.get(str(reading.normalize))
        if statistics and len(statistics[0]) != channels[0]:
            raise InputError(
                f"{folder}: latents have {channels[0]} channels, but data.source.normalize is "
                f"{reading.normalize}, whose VAE has {len(statistics[0])}; set the VAE of the data"
            )

    @abstractmethod
    def _stored(self, sample: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Latents, condition and the text's mask as stored; raises `READ_ERRORS`."""

    @abstractmethod
    def _place(self, sample: int) -> str:
        """Where a sample lies, for messages."""

    @abstractmethod
    def _caption(self, sample: int) -> str | None:
        """The caption of a sample; raises `READ_ERRORS` if it cannot be read."""

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        place, name = self._place(sample), LABELS if self.reading.labels else TEXT
        try:
            latents, condition, mask = self._stored(sample)
            latents = channels_last(latents, self.reading.layout)
            condition = condition.reshape(-1) if name == LABELS else text_tokens(condition, mask)
        except READ_ERRORS as error:
            raise BadRecordError(f"{place} cannot be read: {first_line(error)}") from error
        stored = {LATENTS: latents, name: condition}
        arrays = checked_sample(self.manifest, sample, stored, place)
        return arrays | {LATENTS: normalized(latents, self.reading.normalize)}

    @override
    def captions(self, samples: Sequence[int]) -> list[str | None]:
        def caption(sample: int) -> str | None:
            try:
                return self._caption(sample)
            except READ_ERRORS:
                return None

        return [caption(sample) for sample in samples]

    @override
    def require_settings(self) -> None:
        if self.reading.normalize is None:
            raise InputError(
                f"{self.manifest.path}: does not record whether latents are normalised; set "
                "data.source.normalize to wan2.1 or wan2.2, whose statistics then normalise them, "
                "or to none if they are"
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
