"""Parquet files of precomputed latents and embeddings, a row for each sample.

FastVideo's preprocessing writes such files: each array has a column of bytes, of shapes and of
dtypes, such as vae_latent_bytes, vae_latent_shape and vae_latent_dtype. Its latents are those of
the VAE, before they are normalised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.sources.arrays import (
    Layout,
    channels_last,
    checked_sample,
    text_shape,
    without_padding,
)
from alload_jax.data.sources.files import find_files, root_of, scan
from alload_jax.data.sources.parquet_rows import READ_ERRORS, RowColumns, array_of, read_row
from alload_jax.data.sources.parquet_scan import caption_column, scan_file
from alload_jax.data.sources.scanned import manifest_of
from alload_jax.data.sources.tensor_samples import check_channels, require_normalize
from alload_jax.data.sources.vae_statistics import Normalize, normalized
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple

SUFFIX = ".parquet"


@dataclass(frozen=True)
class Parquet:
    """Rows of latents and text embeddings; see `SourceConfig`. The defaults are FastVideo's.

    An array NAME has three columns: NAME_bytes, NAME_shape and NAME_dtype.

    Attributes:
      name: `parquet`.
      latents: name of the array of latents.
      text: name of the array of text embeddings.
      mask: name of the text's mask: 1 for tokens, then 0 for padding; null for
        text_attention_mask where the files have it.
      labels: a column of integers, or lists of them, which then takes the place of text.
      layout: order of the axes of latents.
      normalize: the VAE whose statistics normalise the latents; none for normalised latents.
      vae_stride: pixels per latent along frames, height and width; null for the recorded one, or
        the usual one of latents with 16 or 48 channels.
    """

    name: Literal["parquet"] = "parquet"
    latents: str = "vae_latent"
    text: str = "text_embedding"
    mask: str | None = None
    labels: str | None = None
    layout: Layout = "CTHW"
    normalize: Normalize | None = None
    vae_stride: Triple | None = None

    def open(self, folder: str) -> "ParquetSamples":
        """See `SourceConfig.open`.

        Raises:
          InputError: a file is damaged, or lacks a column.
        """
        return ParquetSamples(Path(folder), self)


class ParquetSamples:
    """Random access to rows of Parquet files; a `SampleSource`.

    Attributes:
      manifest: the manifest.
    """

    def __init__(self, folder: Path, config: Parquet):
        """Reads the footers, and the columns of shapes and dtypes, of all files.

        Raises:
          InputError: a file is damaged or lacks a column, or rows disagree.
        """
        self._root, self._config = root_of(folder), config
        self._columns = RowColumns(config.latents, config.text, config.mask, config.labels)
        names = find_files(folder, SUFFIX) if folder.exists() else []
        if not names:
            raise InputError(f"{folder}: holds no {SUFFIX} files; set data.folder to their folder")
        found = scan(lambda name: scan_file(self._root, name, self._columns, config.layout), names)
        samples = [sample for of_file in found for sample in of_file]
        sizes = {name: (self._root / name).stat().st_size for name in names}
        read_as = f"{config.layout} {config.normalize}"
        self.manifest: Manifest = manifest_of(
            folder, samples, config.vae_stride, sizes, {"format": "parquet"}, read_as
        )
        check_channels(config.normalize, self.manifest)

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """See `SampleSource.read`."""
        name, row = self.manifest.shard[sample], int(self.manifest.index[sample])
        place = f"{self._root / name}: row {row} (sample {sample})"
        try:
            values = read_row(self._root / name, row, self._columns)
            latents = channels_last(array_of(values, self._config.latents), self._config.layout)
            condition = self._condition(values)
        except READ_ERRORS as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadRecordError(f"{place} cannot be read: {reason}") from error
        arrays = checked_sample(self.manifest, sample, latents, condition, place)
        arrays["latents"] = normalized(latents, self._config.normalize)
        return arrays

    def _condition(self, values: dict[str, Any]) -> np.ndarray:
        if self._config.labels:
            labels = values[self._config.labels]
            return np.array(labels if isinstance(labels, list) else [labels])
        text = array_of(values, self._config.text)
        text = text.reshape(text_shape(text.shape))
        mask = self._columns.mask_in(list(values))
        return without_padding(text, array_of(values, mask)) if mask else text

    def captions(self, samples: Sequence[int]) -> list[str | None]:
        """See `SampleSource.captions`."""
        return [self._caption(sample) for sample in samples]

    def _caption(self, sample: int) -> str | None:
        path = self._root / self.manifest.shard[sample]
        try:
            return caption_column(path, int(self.manifest.index[sample]))
        except READ_ERRORS:
            return None

    def require_settings(self) -> None:
        """See `SampleSource.require_settings`."""
        require_normalize(self._config.normalize, self.manifest)

    def close(self) -> None:
        """See `SampleSource.close`; no files stay open."""
