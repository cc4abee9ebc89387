"""Samples in safetensors files: latents in one tensor, the condition in another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.sources.arrays import (
    Layout,
    channels_last,
    checked_sample,
    latent_shape,
    text_shape,
    without_padding,
)
from alload_jax.data.sources.files import root_of, scan
from alload_jax.data.sources.scanned import ScannedSample, manifest_of
from alload_jax.data.sources.tensor_file import (
    Header,
    TensorInfo,
    content_mark,
    read_header,
    read_tensors,
)
from alload_jax.data.sources.vae_statistics import Normalize, channels_of, normalized
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple


class TensorNames(NamedTuple):
    """Where a sample's tensors lie.

    Attributes:
      latents_file: file of the latents, relative to the data folder.
      latents: name of the tensor of latents.
      condition_file: file of the condition.
      condition: name of the tensor of text embeddings or classes.
      mask: name of the text's mask in the same file; None if there is none.
    """

    latents_file: str
    latents: str
    condition_file: str
    condition: str
    mask: str | None = None


@dataclass(frozen=True)
class Reading:
    """How tensors become a sample.

    Attributes:
      layout: order of the axes of the latents.
      normalize: the VAE with whose statistics latents are normalised; None if not known.
      classes: whether conditions are classes.
    """

    layout: Layout = "CTHW"
    normalize: Normalize | None = "none"
    classes: bool = False


class TensorSamples:
    """Random access to samples in safetensors files; a `SampleSource`.

    Attributes:
      manifest: the manifest.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[TensorNames],
        reading: Reading,
        stride: Triple | None = None,
        origin: dict[str, Any] | None = None,
        caption: str = "caption",
    ):
        """Reads the headers of all files.

        Args:
          folder: the data folder.
          names: the samples, in their order.
          reading: how tensors become samples.
          stride: VAE stride; None for the usual one of the number of channels.
          origin: provenance.
          caption: name of the caption in the metadata of the condition's file.

        Raises:
          InputError: a file is damaged, or samples disagree.
        """
        self._root, self._names, self._reading = root_of(folder), list(names), reading
        self._caption = caption
        found = scan(self._scanned, self._names)
        sizes = {name: size for _, of_sample in found for name, size in of_sample.items()}
        samples = [sample for sample, _ in found]
        read_as = f"{reading.layout} {reading.normalize}"
        self.manifest: Manifest = manifest_of(folder, samples, stride, sizes, origin or {}, read_as)
        check_channels(reading.normalize, self.manifest)

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """See `SampleSource.read`."""
        names = self._names[sample]
        path = self._root / names.latents_file
        try:
            latents = read_tensors(path, [names.latents])[names.latents]
            latents = channels_last(latents, self._reading.layout)
            path = self._root / names.condition_file
            condition = self._condition(path, names)
        except (OSError, ValueError) as error:
            raise BadRecordError(f"{path} (sample {sample}) cannot be read: {error}") from error
        place = f"{self._root / names.latents_file} (sample {sample})"
        arrays = checked_sample(self.manifest, sample, latents, condition, place)
        arrays["latents"] = normalized(latents, self._reading.normalize)
        return arrays

    def _condition(self, path: Path, names: TensorNames) -> np.ndarray:
        wanted = [names.condition, *([names.mask] if names.mask else [])]
        arrays = read_tensors(path, wanted)
        condition = arrays[names.condition]
        if self._reading.classes:
            return condition.reshape(-1)
        text = condition.reshape(text_shape(condition.shape))
        return without_padding(text, arrays[names.mask]) if names.mask else text

    def captions(self, samples: Sequence[int]) -> list[str | None]:
        """See `SampleSource.captions`."""
        return [self._caption_of(self._names[sample].condition_file) for sample in samples]

    def _caption_of(self, name: str) -> str | None:
        try:
            return read_header(self._root / name).metadata.get(self._caption)
        except (OSError, ValueError):
            return None

    def require_settings(self) -> None:
        """See `SampleSource.require_settings`."""
        require_normalize(self._reading.normalize, self.manifest)

    def close(self) -> None:
        """See `SampleSource.close`; no files stay open."""

    def _scanned(self, names: TensorNames) -> tuple[ScannedSample, dict[str, int]]:
        """What the headers say of a sample, and the sizes of its files."""
        path = self._root / names.latents_file
        try:
            header = read_header(path)
            info = _info(header, names.latents)
            latents = latent_shape(info.shape, self._reading.layout)
            sizes = {names.latents_file: header.bytes}
            mark = content_mark(path, [info])
            path = self._root / names.condition_file
            if names.condition_file != names.latents_file:
                header = read_header(path)
                sizes[names.condition_file] = header.bytes
            infos = [_info(header, name) for name in (names.condition, names.mask) if name]
            length, width = (math.prod(infos[0].shape), None)
            if not self._reading.classes:
                length, width = text_shape(infos[0].shape)
            mark ^= content_mark(path, infos)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: cannot be read ({error}); write it again, or remove it"
            ) from error
        return ScannedSample(names.latents_file, 0, latents, length, width, mark), sizes


def check_channels(normalize: Normalize | None, manifest: Manifest) -> None:
    """Checks that latents have the channels of the VAE that normalises them.

    Raises:
      InputError: they have others.
    """
    found, expected = int(manifest.channels[0]), channels_of(normalize)
    if expected not in (None, found):
        raise InputError(
            f"{manifest.path}: latents have {found} channels, but data.source.normalize is "
            f"{normalize}, whose VAE has {expected}; set the VAE of the data"
        )


def require_normalize(normalize: Normalize | None, manifest: Manifest) -> None:
    """Checks that it is known whether latents are normalised.

    Raises:
      InputError: it is not.
    """
    if normalize is None:
        raise InputError(
            f"{manifest.path}: does not record whether latents are normalised; set "
            "data.source.normalize to wan2.1 or wan2.2, whose statistics then normalise them, or "
            "to none if they are"
        )


def _info(header: Header, name: str) -> TensorInfo:
    if name not in header.tensors:
        held = ", ".join(sorted(header.tensors)[:8]) or "nothing"
        raise ValueError(f"it lacks the tensor {name}, and holds {held}")
    return header.tensors[name]
