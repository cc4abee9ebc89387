"""Arrays of files of other trainers: their layouts, padding and checks."""

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
import pyarrow as pa
from typing_extensions import override

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, TEXT, SampleForm
from alload_jax.data.sources import SampleSource
from alload_jax.data.sources.files import Normalize, channels_of, normalized
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.samples import Triple
from alload_jax.processes import waits

Layout = Literal["CTHW", "TCHW", "THWC"]
"""Order of the axes of stored latents: channels, frames (time), height, width."""

_LARGEST_AXIS = 10**6
READ_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)
"""What reading a damaged file raises."""
FLOATS = frozenset(
    np.dtype(one) for one in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
)
"""Dtypes that latents and text embeddings may have."""


@dataclass(frozen=True)
class Reading:
    """How stored arrays become samples.

    Attributes:
      layout: order of the axes of the latents.
      normalize: the VAE with whose statistics latents are normalised; None if not known.
      classes: whether conditions are classes.
    """

    layout: Layout = "CTHW"
    normalize: Normalize | None = "none"
    classes: bool = False


class LatentShape(NamedTuple):
    """Shape of the latents of a sample.

    Attributes:
      grid: (frames, height, width) of the latents.
      channels: number of channels.
    """

    grid: Triple
    channels: int


def latent_shape(shape: Sequence[int], layout: Layout) -> LatentShape:
    """Returns the shape of stored latents, of a clip or of a picture without an axis of frames.

    Raises:
      ValueError: the shape has other axes, or an axis is empty or absurdly long.
    """
    sizes = dict(zip(layout, four_axes(shape, layout), strict=True))
    return LatentShape((sizes["T"], sizes["H"], sizes["W"]), sizes["C"])


def four_axes(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Returns the shape with all four axes: a leading batch of 1 is dropped, one frame added.

    Raises:
      ValueError: as `latent_shape`.
    """
    axes = tuple(shape)
    if len(axes) == 5 and axes[0] == 1:
        axes = axes[1:]
    if len(axes) == 3:
        frames = layout.index("T")
        axes = (*axes[:frames], 1, *axes[frames:])
    if len(axes) != 4 or not all(1 <= size <= _LARGEST_AXIS for size in axes):
        raise ValueError(f"latents have shape {_shown(shape)}; they must be {layout}")
    return axes


def channels_last(latents: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns stored latents as [frames, height, width, channels]; a view.

    Raises:
      ValueError: as `latent_shape`.
    """
    axes = latents.reshape(four_axes(latents.shape, layout))
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
        raise ValueError(f"text embeddings have shape {_shown(shape)}; they must be [L, width]")
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
    manifest: Manifest, sample: int, latents: np.ndarray, condition: np.ndarray, place: str
) -> dict[str, np.ndarray]:
    """Checks a sample against the manifest, and returns its arrays by name.

    Args:
      manifest: the manifest.
      sample: number of the sample.
      latents: [t, h, w, C].
      condition: [L, width] text or [L] classes.
      place: where the sample lies, for messages.

    Raises:
      BadRecordError: a shape or dtype is not as the manifest says, or a value is not finite.
    """
    shape = manifest.latent_shape(tuple(manifest.shape[sample]))
    if latents.shape != shape:
        raise BadRecordError(f"{place} holds latents of shape {latents.shape}, not {shape}")
    _require_floats("latents", latents, place)
    longest, width = int(manifest.text_length[sample]), manifest.form.text_dim
    if condition.shape[1:] != (() if width is None else (width,)) or len(condition) > longest:
        kind = "classes" if width is None else f"text of width {width}"
        raise BadRecordError(
            f"{place} holds a condition of shape {condition.shape}; it must be {kind} with at most "
            f"{longest} tokens"
        )
    if width is not None:
        _require_floats("text", condition, place)
        return {LATENTS: latents, TEXT: condition}
    if condition.dtype.kind not in "iu":
        raise BadRecordError(f"{place} holds classes of dtype {condition.dtype}, not integers")
    return {LATENTS: latents, LABELS: condition.astype(np.int32)}


def checked_given(
    manifest: Manifest, sample: int, arrays: Mapping[str, np.ndarray], place: str
) -> dict[str, np.ndarray]:
    """Checks what image-to-video models take, and returns those of the arrays by name.

    Args:
      manifest: the manifest.
      sample: number of the sample.
      arrays: the sample's arrays.
      place: where the sample lies, for messages.

    Raises:
      BadRecordError: one is missing, has another shape than the manifest says, or is not finite.
    """
    shapes = manifest.record_shapes(sample)
    found = {}
    for name in (GIVEN, IMAGE):
        if name not in shapes:
            continue
        if name not in arrays or arrays[name].shape != shapes[name]:
            shown = arrays[name].shape if name in arrays else "nothing"
            raise BadRecordError(f"{place} holds {name} of shape {shown}, not {shapes[name]}")
        _require_floats(name, arrays[name], place)
        found[name] = arrays[name]
    return found


def _require_floats(name: str, array: np.ndarray, place: str) -> None:
    if array.dtype not in FLOATS:
        raise BadRecordError(f"{place} holds {name} of dtype {array.dtype}, not floats")
    if not np.isfinite(array).all():
        raise BadRecordError(f"{place} holds {name} with NaN or infinite values")


def _shown(shape: Sequence[int]) -> list[int]:
    return list(shape)[:8]


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


@waits("for the data folder to be read")
class FileSamples(SampleSource):
    """Random access to samples in files of other trainers, which are opened for each sample."""

    def __init__(
        self,
        folder: Path,
        samples: Sequence[ScannedSample],
        reading: Reading,
        stride: Triple | None,
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
          stride: VAE stride; None takes that of the recorded sizes, or the usual one.
          file_bytes: size of each file.
          origin: provenance.

        Raises:
          InputError: there are no samples, they disagree, the stride is unknown, or the VAE that
            normalises them has other channels.
        """
        if not samples:
            raise InputError(f"{folder}: holds no samples; set data.folder to another folder")
        _require_alike(folder, samples)
        grids = np.array([sample.latents.grid for sample in samples], np.int64)
        stride = stride or _recorded_stride(samples, grids) or _usual_stride(folder, samples)
        seed = zlib.crc32(f"{reading.layout} {reading.normalize}".encode())
        marks = [zlib.crc32(sample.mark.to_bytes(4, "little"), seed) for sample in samples]
        self.reading = reading
        self.manifest = Manifest(
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
        held, expected = samples[0].latents.channels, channels_of(reading.normalize)
        if expected not in (None, held):
            raise InputError(
                f"{folder}: latents have {held} channels, but data.source.normalize is "
                f"{reading.normalize}, whose VAE has {expected}; set the VAE of the data"
            )

    @abstractmethod
    def _stored(self, sample: int) -> tuple[np.ndarray, np.ndarray, str]:
        """Latents as stored, the condition, and where the sample lies, for messages.

        Raises:
          BadRecordError: the files are damaged.
        """

    @abstractmethod
    def _caption(self, sample: int) -> str | None:
        """The caption of a sample; raises `READ_ERRORS` if it cannot be read."""

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        latents, condition, place = self._stored(sample)
        arrays = checked_sample(self.manifest, sample, latents, condition, place)
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
