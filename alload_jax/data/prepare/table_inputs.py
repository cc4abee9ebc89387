"""Media that a table lists: .csv, .jsonl or .parquet."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.prepare.captions import (
    CAPTION_COLUMNS,
    PATH_COLUMNS,
    as_caption,
    find_column,
    require_column,
)
from alload_jax.data.prepare.sources import MEDIA, Item, checked_source, readable_name
from alload_jax.data.prepare.unusable import UnusableError, short
from alload_jax.errors import InputError

TABLES = (".csv", ".jsonl", ".parquet")
"""Suffixes of tables."""

_LONGEST_FIELD = 2**24
_Row = dict[str, Any]


def table_items(table: Path, path_column: str | None, caption_column: str | None) -> list[Item]:
    """The media of a table in the order of its rows; paths are relative to the table's folder.

    Raises:
      InputError: the table cannot be read, or has no column of paths, or lacks a column asked for.
    """
    read = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    try:
        rows = list(read[table.suffix.lower()](table, {path_column, caption_column}))
    except (OSError, ValueError, csv.Error, pa.ArrowException, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        kind = table.suffix[1:].upper()
        raise InputError(f"{table}: cannot be read as {kind} ({short(error)}); fix it") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    place = str(table)
    path = require_column(place, names, PATH_COLUMNS, path_column, "--path-column")
    if caption_column is not None:
        require_column(place, names, CAPTION_COLUMNS, caption_column, "--caption-column")
    caption = find_column([n for n in names if n != path], CAPTION_COLUMNS, caption_column)
    root = table.parent.resolve()
    return [_item(root, row.get(path), row.get(caption) if caption else None) for row in rows]


def _item(root: Path, path: Any, caption: Any) -> Item:
    name = readable_name(as_caption(path) or "")
    try:
        if not name:
            raise UnusableError("row without a path")
        if PurePosixPath(name).suffix.lower() not in MEDIA:
            suffix = PurePosixPath(name).suffix or "missing"
            raise UnusableError(f"suffix {suffix}: not an image or video")
        return Item(name, checked_source(root, name), as_caption(caption))
    except UnusableError as error:
        return Item(name, None, reason=str(error))


def _csv_rows(table: Path, _: set[str | None]) -> Iterator[_Row]:
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row:
                    raise InputError(
                        f"{table}: line {reader.line_num} has more fields than the header; put "
                        'values with commas in quotes, such as "a red flower, close up"'
                    )
                yield {name: value for name, value in row.items() if name}
    finally:
        csv.field_size_limit(before)


def _jsonl_rows(table: Path, _: set[str | None]) -> Iterator[_Row]:
    with table.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{table}: line {number} is not valid JSON ({short(error)}); fix it"
                ) from error
            if not isinstance(row, dict):
                raise InputError(f"{table}: line {number} is not a JSON object; fix it")
            yield row


def _parquet_rows(table: Path, asked: set[str | None]) -> Iterator[_Row]:
    with pyarrow.parquet.ParquetFile(table) as file:
        # Tables of datasets often hold the media's bytes as well, which nobody wants in memory.
        known = {*PATH_COLUMNS, *CAPTION_COLUMNS, *(name.lower() for name in asked if name)}
        names = [name for name in file.schema_arrow.names if name.lower() in known]
        if not names:
            require_column(str(table), file.schema_arrow.names, PATH_COLUMNS, None, "--path-column")
        for batch in file.iter_batches(columns=names):
            yield from batch.to_pylist()
