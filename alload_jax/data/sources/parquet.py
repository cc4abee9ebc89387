"""Parquet files of precomputed latents and embeddings, a row for each sample.

FastVideo's preprocessing writes such files: each array has a column of bytes, of shapes and of
dtypes, such as vae_latent_bytes, vae_latent_shape and vae_latent_dtype. Its latents are those of
the VAE, before they are normalised.
"""

import math
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from typing_extensions import override

from alload_jax.data.record import DTYPES
from alload_jax.data.sources import arrays
from alload_jax.errors import InputError, first_line
from alload_jax.files import Json
from alload_jax.processes import waits

_BUFFER = 1 << 20
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, DTYPES.values())}
_PROBE = 4096
_SIZES = (("frames", "num_frames"), ("height",), ("width",))
_CAPTIONS = ("caption", "prompt", "text")
_USUAL_MASK = "text_attention_mask"


def _is_text(found: pa.DataType) -> bool:
    return pa.types.is_string(found) or pa.types.is_large_string(found)


def _is_sizes(found: pa.DataType) -> bool:
    lists = pa.types.is_list(found) or pa.types.is_large_list(found)
    return lists and pa.types.is_integer(found.value_type)


_PARTS: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "bytes": (lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t), "bytes"),
    "shape": (_is_sizes, "lists of integers"),
    "dtype": (_is_text, "text such as float32"),
}
"""By the ending of the names of an array's columns: which types they may have, also in words."""


@dataclass(frozen=True)
class Parquet(arrays.Reading):
    """Rows of latents and text embeddings; see `SourceConfig`. The defaults are FastVideo's.

    An array NAME has three columns: NAME_bytes, NAME_shape and NAME_dtype.

    Attributes:
      name: `parquet`.
      latents: name of the array of latents.
      text: name of the array of text embeddings.
      mask: name of the text's mask: 1 for tokens, then 0 for padding; null for
        text_attention_mask where the files have it.
    """

    name: Literal["parquet"] = "parquet"
    latents: str = "vae_latent"
    text: str = "text_embedding"
    mask: str | None = None

    def open(self, folder: str) -> "ParquetSamples":
        """See `SourceConfig.open`.

        Raises:
          InputError: a file is damaged, or lacks a column.
        """
        return ParquetSamples(Path(folder), self)

    def mask_in(self, present: Collection[str]) -> str | None:
        """Returns the name of the mask in files with these columns; None if there is none."""
        usual = _USUAL_MASK if f"{_USUAL_MASK}_bytes" in present else None
        return None if self.labels else self.mask or usual

    def arrays(self, present: Collection[str]) -> list[str]:
        """Returns the names of the arrays to read from files with these columns."""
        names = (self.latents, None if self.labels else self.text, self.mask_in(present))
        return [name for name in names if name]

    def columns(self, present: Collection[str]) -> list[str]:
        """Returns the names of the columns to read from files with these columns."""
        parts = [f"{name}_{part}" for name in self.arrays(present) for part in _PARTS]
        return [*parts, *([self.labels] if self.labels else [])]


@waits("for the data folder to be read")
class ParquetSamples(arrays.FileSamples):
    """Random access to rows of Parquet files; see `SampleSource`."""

    def __init__(self, folder: Path, config: Parquet):
        """Reads the footers, and the columns of shapes and dtypes, of all files.

        Raises:
          InputError: a file is damaged or lacks a column, or rows disagree.
        """
        self._root, self._config = arrays.root_of(folder), config
        names = arrays.find_files(folder, ".parquet") if folder.exists() else []
        if not names:
            raise InputError(f"{folder}: holds no .parquet files; set data.folder to their folder")
        samples = [sample for of_file in arrays.scan(self._scanned, names) for sample in of_file]
        sizes = {name: (self._root / name).stat().st_size for name in names}
        super().__init__(folder, samples, config, sizes, {"format": "parquet"})

    @override
    def _place(self, sample: int) -> str:
        path = self._root / self.manifest.shard[sample]
        return f"{path}: row {self.manifest.index[sample]} (sample {sample})"

    @override
    def _stored(self, sample: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        config, path = self._config, self._root / self.manifest.shard[sample]
        values = _read_row(path, int(self.manifest.index[sample]), config)
        if config.labels:
            return array_of(values, config.latents), np.array(values[config.labels]), None
        mask = config.mask_in(values)
        kept = array_of(values, mask) if mask else None
        return array_of(values, config.latents), array_of(values, config.text), kept

    @override
    def _caption(self, sample: int) -> str | None:
        with pyarrow.parquet.ParquetFile(self._root / self.manifest.shard[sample]) as file:
            present = [name for name in _CAPTIONS if name in file.schema_arrow.names]
            if not present:
                return None
            column = file.read(columns=present[:1])[present[0]]
        text = column[int(self.manifest.index[sample])].as_py()
        return text if _is_text(column.type) else None

    def _scanned(self, name: str) -> list[arrays.ScannedSample]:
        """What the small columns of a file say of its rows."""
        path, config = self._root / name, self._config
        try:
            with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
                present = file.schema_arrow.names
                _check_columns(path, file.schema_arrow, config)
                small = [each for each in config.columns(present) if not each.endswith("_bytes")]
                small += [each for names in _SIZES for each in names if each in present]
                table = file.read(columns=small, use_threads=False)
                probed = {f"{array}_bytes" for array in config.arrays(present)}
                file_mark = _file_mark(path, file.metadata, probed)
        except arrays.READ_ERRORS as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{path}: is not a readable Parquet file ({first_line(error)}); write it again, "
                "or remove it"
            ) from error
        samples = []
        for row, values in enumerate(table.to_pylist()):
            try:
                samples.append(_scanned_row(name, row, values, config, file_mark))
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"{path}: row {row} cannot be used ({error}); remove the row, or name other "
                    "columns in data.source"
                ) from error
        return samples


def _read_row(path: Path, row: int, config: Parquet) -> Json:
    """Reads the columns of one row; returns its values by name.

    Parquet has no access to single rows: the rows before it in its row group are decoded, one after
    another.

    Raises:
      READ_ERRORS: the file is damaged, or shorter than the row.
    """
    with pyarrow.parquet.ParquetFile(
        path, buffer_size=_BUFFER, page_checksum_verification=True
    ) as file:
        names = config.columns(file.schema_arrow.names)
        for group in range(file.metadata.num_row_groups):
            if row >= (rows := file.metadata.row_group(group).num_rows):
                row -= rows
                continue
            batches = file.iter_batches(1, row_groups=[group], columns=names, use_threads=False)
            for number, batch in enumerate(batches):
                if number == row:
                    return {name: batch[name][0].as_py() for name in names}
            raise ValueError("its row group is shorter than the footer says")
        raise ValueError(f"it has {file.metadata.num_rows} rows")


def array_of(values: Json, name: str) -> np.ndarray:
    """Returns the array of that name from the values of a row.

    Raises:
      ValueError: bytes, shape and dtype do not fit together.
    """
    data, shape, dtype = (values[f"{name}_{part}"] for part in _PARTS)
    if data is None or shape is None:
        raise ValueError(f"{name} is null")
    known = _DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise ValueError(f"{name} is {dtype!r}; supported are {', '.join(_DTYPES)}")
    if any(size is None or size < 0 for size in shape):
        raise ValueError(f"{name} has shape {shape[:8]}")
    if math.prod(shape) * known.itemsize != len(data):
        raise ValueError(f"{name} has {len(data)} bytes, not those of {known} {shape[:8]}")
    return np.frombuffer(data, known).reshape(shape)


def _check_columns(path: Path, schema: pa.Schema, config: Parquet) -> None:
    wanted = config.columns(schema.names)
    if lacking := [name for name in wanted if name not in schema.names]:
        raise InputError(
            f"{path}: lacks column {', '.join(lacking)}, and has {', '.join(schema.names[:12])}; "
            "name its columns in data.source, or move the file away"
        )
    for array in config.arrays(schema.names):
        for part, (fits, words) in _PARTS.items():
            found = schema.field(f"{array}_{part}").type
            if not fits(found):
                raise InputError(f"{path}: column {array}_{part} holds {found}, not {words}")
    if config.labels:
        found = schema.field(config.labels).type
        if not (pa.types.is_integer(found) or _is_sizes(found)):
            raise InputError(
                f"{path}: column {config.labels} holds {found}; classes must be integers, or "
                "lists of them"
            )


def _scanned_row(
    name: str, row: int, values: Json, config: Parquet, file_mark: int
) -> arrays.ScannedSample:
    """What the small columns say of a row."""
    latents = arrays.latent_shape(values[f"{config.latents}_shape"], config.layout)
    if config.labels:
        labels = values[config.labels]
        labels = labels if isinstance(labels, list) else [labels]
        length, width = len(labels), None
        if None in labels:
            raise ValueError(f"{config.labels} is null")
    else:
        length, width = arrays.text_shape(values[f"{config.text}_shape"])
    mark = zlib.crc32(repr((row, sorted(values.items()))).encode(), file_mark)
    sizes = [next((values[one] for one in names if one in values), 0) for names in _SIZES]
    frames, height, widths = (size if isinstance(size, int) else 0 for size in sizes)
    return arrays.ScannedSample(name, row, latents, length, width, mark, (frames, height, widths))


def _file_mark(path: Path, metadata: pyarrow.parquet.FileMetaData, probed: set[str]) -> int:
    """A CRC-32 of sizes and both ends of these columns' chunks; each row group has one of each."""
    mark = 0
    with path.open("rb") as file:
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for number in range(row_group.num_columns):
                chunk = row_group.column(number)
                if chunk.path_in_schema not in probed:
                    continue
                mark = zlib.crc32(str(chunk.total_compressed_size).encode(), mark)
                begin = chunk.dictionary_page_offset or chunk.data_page_offset
                for place in (begin, begin + max(0, chunk.total_compressed_size - _PROBE)):
                    file.seek(max(0, place))
                    mark = zlib.crc32(file.read(_PROBE), mark)
    return mark
