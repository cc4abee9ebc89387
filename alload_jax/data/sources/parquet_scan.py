"""Scans Parquet files of samples: footers, shapes and dtypes, but no latents."""

import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.sources.arrays import Layout, latent_shape, text_shape
from alload_jax.data.sources.parquet_rows import PARTS, READ_ERRORS, RowColumns
from alload_jax.data.sources.scanned import ScannedSample
from alload_jax.errors import InputError

_PROBE = 4096
_SIZES = (("frames", "num_frames"), ("height",), ("width",))
_CAPTIONS = ("caption", "prompt", "text")


def scan_file(root: Path, name: str, columns: RowColumns, layout: Layout) -> list[ScannedSample]:
    """Returns what the small columns of a file say of its rows.

    Raises:
      InputError: the file is damaged, lacks a column, or a row cannot be a sample.
    """
    path = root / name
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            present = file.schema_arrow.names
            _check_columns(path, file.schema_arrow, columns)
            table = file.read(columns=_small_columns(columns, present), use_threads=False)
            probed = {f"{name}_bytes" for name in columns.arrays(present)}
            file_mark = _file_mark(path, file.metadata, probed)
    except READ_ERRORS as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path}: is not a readable Parquet file ({str(error).splitlines()[0]}); write it "
            "again, or remove it"
        ) from error
    samples = []
    for row, values in enumerate(table.to_pylist()):
        try:
            samples.append(_scanned(name, row, values, columns, layout, file_mark))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{path}: row {row} cannot be used ({error}); remove the row, or name other "
                "columns in data.source"
            ) from error
    return samples


def caption_column(path: Path, row: int) -> str | None:
    """Returns the caption of a row; None if the file has none.

    Raises:
      READ_ERRORS: the file is damaged, or shorter than the row.
    """
    with pyarrow.parquet.ParquetFile(path) as file:
        present = [name for name in _CAPTIONS if name in file.schema_arrow.names]
        if not present:
            return None
        column = file.read(columns=present[:1])[present[0]]
    return column[row].as_py() if _is_text(column.type) else None


def _check_columns(path: Path, schema: Any, columns: RowColumns) -> None:
    wanted = columns.columns(schema.names)
    if lacking := [name for name in wanted if name not in schema.names]:
        raise InputError(
            f"{path}: lacks column {', '.join(lacking)}, and has {', '.join(schema.names[:12])}; "
            "name its columns in data.source, or move the file away"
        )
    for array in columns.arrays(schema.names):
        for part, fits in zip(PARTS, (_is_binary, _is_sizes, _is_text), strict=True):
            found = schema.field(f"{array}_{part}").type
            if not fits(found):
                raise InputError(
                    f"{path}: column {array}_{part} holds {found}; it must hold {_KINDS[part]}"
                )
    if columns.labels:
        found = schema.field(columns.labels).type
        if not (pa.types.is_integer(found) or _is_sizes(found)):
            raise InputError(
                f"{path}: column {columns.labels} holds {found}; classes must be integers, or "
                "lists of them"
            )


_KINDS = {"bytes": "bytes", "shape": "lists of integers", "dtype": "text such as float32"}


def _is_binary(found: Any) -> bool:
    return pa.types.is_binary(found) or pa.types.is_large_binary(found)


def _is_text(found: Any) -> bool:
    return pa.types.is_string(found) or pa.types.is_large_string(found)


def _is_sizes(found: Any) -> bool:
    lists = pa.types.is_list(found) or pa.types.is_large_list(found)
    return lists and pa.types.is_integer(found.value_type)


def _small_columns(columns: RowColumns, present: list[str]) -> list[str]:
    names = [name for name in columns.columns(present) if not name.endswith("_bytes")]
    return names + [name for group in _SIZES for name in group if name in present]


def _scanned(
    name: str,
    row: int,
    values: dict[str, Any],
    columns: RowColumns,
    layout: Layout,
    file_mark: int,
) -> ScannedSample:
    """What the small columns say of a row."""
    latents = latent_shape(values[f"{columns.latents}_shape"], layout)
    if columns.labels:
        labels = values[columns.labels]
        labels = labels if isinstance(labels, list) else [labels]
        length, width = len(labels), None
        if None in labels:
            raise ValueError(f"{columns.labels} is null")
    else:
        length, width = text_shape(values[f"{columns.text}_shape"])
    mark = zlib.crc32(repr((row, sorted(values.items()))).encode(), file_mark)
    sizes = [next((values[one] for one in names if one in values), 0) for names in _SIZES]
    frames, height, widths = (size if isinstance(size, int) else 0 for size in sizes)
    size = (frames, height, widths)
    return ScannedSample(name, row, latents, length, width, mark, size)


def _file_mark(path: Path, metadata: Any, probed: set[str]) -> int:
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
