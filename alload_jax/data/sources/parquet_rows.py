"""Reads single rows of Parquet files whose arrays are bytes, shapes and dtypes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet

_BUFFER = 1 << 20
_DTYPES = {
    name: np.dtype(name)
    for name in ("float64", "float32", "float16", "int64", "int32", "int8", "uint8", "bool")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
PARTS = ("bytes", "shape", "dtype")
"""Endings of the names of an array's columns."""
USUAL_MASK = "text_attention_mask"
READ_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)
"""What reading a damaged file raises."""


@dataclass(frozen=True)
class RowColumns:
    """Names of the columns of a sample; see `Parquet`."""

    latents: str
    text: str
    mask: str | None
    labels: str | None

    def mask_in(self, present: list[str]) -> str | None:
        """Returns the name of the mask in files with these columns; None if there is none."""
        usual = USUAL_MASK if f"{USUAL_MASK}_bytes" in present else None
        return None if self.labels else self.mask or usual

    def arrays(self, present: list[str]) -> list[str]:
        """Returns the names of the arrays to read from files with these columns."""
        mask = self.mask_in(present)
        text = [] if self.labels else [self.text]
        return [self.latents, *text, *([mask] if mask else [])]

    def columns(self, present: list[str]) -> list[str]:
        """Returns the names of the columns to read from files with these columns."""
        parts = [f"{name}_{part}" for name in self.arrays(present) for part in PARTS]
        return [*parts, *([self.labels] if self.labels else [])]


def read_row(path: Path, row: int, columns: RowColumns) -> dict[str, Any]:
    """Reads the columns of one row; returns its values by name.

    Parquet has no access to single rows: the rows before it in its row group are decoded, one after
    another.

    Raises:
      READ_ERRORS: the file is damaged, or shorter than the row.
    """
    with pyarrow.parquet.ParquetFile(
        path, buffer_size=_BUFFER, page_checksum_verification=True
    ) as file:
        group, before = _row_group(file.metadata, row)
        names = columns.columns(file.schema_arrow.names)
        rows = file.iter_batches(1, row_groups=[group], columns=names, use_threads=False)
        for number, batch in enumerate(rows):
            if number == row - before:
                return {name: batch[name][0].as_py() for name in names}
    raise ValueError("its row group is shorter than the footer says")


def array_of(values: dict[str, Any], name: str) -> np.ndarray:
    """Returns the array of that name from the values of a row.

    Raises:
      ValueError: bytes, shape and dtype do not fit together.
    """
    data, shape, dtype = (values[f"{name}_{part}"] for part in PARTS)
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


def _row_group(metadata: Any, row: int) -> tuple[int, int]:
    """The row group of a row, and the number of rows before the group."""
    before = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if row < before + rows:
            return group, before
        before += rows
    raise ValueError(f"it has {before} rows")
