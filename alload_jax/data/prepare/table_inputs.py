"""Media that a table lists: .csv, .jsonl or .parquet."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.prepare.captions import (
    CAPTION_COLUMNS,
    PATH_COLUMNS,
    CaptionRule,
    as_caption,
    require_column,
)
from alload_jax.data.prepare.sources import MEDIA, Item, checked_source, readable_name, suffix_of
from alload_jax.data.prepare.unusable import UnusableError, short
from alload_jax.errors import InputError
from alload_jax.files import parse_json, require_regular

TABLES = (".csv", ".jsonl", ".parquet")
"""Suffixes of tables."""

_LONGEST_FIELD = 2**24
_Row = dict[str, Any]


def table_items(table: Path, path_column: str | None, rule: CaptionRule) -> list[Item]:
    """The media of a table in the order of its rows; paths are relative to the table's folder.

    Raises:
      InputError: the table cannot be read, or has no column of paths, or lacks a column asked for.
    """
    read = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    require_regular(table)
    try:
        rows = list(read[table.suffix.lower()](table, path_column, rule))
    except (OSError, ValueError, csv.Error, pa.ArrowException, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        kind = table.suffix[1:].upper()
        raise InputError(f"{table}: cannot be read as {kind} ({short(error)}); fix it") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    place = str(table)
    path = require_column(place, names, PATH_COLUMNS, path_column, "--path-column")
    captions = rule.columns(name for name in names if name != path)
    if rule.column is not None and not captions:
        require_column(place, names, CAPTION_COLUMNS, rule.column, "--caption-column")
    _require_once(table, names, (path, *captions))
    root = table.parent.resolve()
    return [
        _item(root, row.get(path), rule.of_values(row.get(name) for name in captions))
        for row in rows
    ]


def _require_once(table: Path, names: Iterable[str], used: Iterable[str]) -> None:
    """Refuses a table in which a column that is used has the name of another in other letters."""
    names = list(names)
    for column in used:
        same = [name for name in names if name.strip().lower() == column.strip().lower()]
        if len(same) > 1:
            raise InputError(
                f"{table}: has the columns {same[0]!r} and {same[1]!r}, whose names are the same "
                "but for case and spaces; rename or remove one"
            )


def _item(root: Path, path: Any, captions: list[str]) -> Item:
    name = readable_name(as_caption(path) or "")
    try:
        if not name:
            raise UnusableError("row without a path")
        if (suffix := suffix_of(name)) not in MEDIA:
            raise UnusableError(f"suffix {suffix or 'missing'}: not an image or video")
        return Item.captioned(name, checked_source(root, name), captions)
    except UnusableError as error:
        return Item(name, None, reason=str(error))


def _csv_rows(table: Path, _: str | None, __: CaptionRule) -> Iterator[_Row]:
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            fields = [name for name in reader.fieldnames or () if name]
            _require_once(table, fields, fields)
            for row in reader:
                if None in row:
                    raise InputError(
                        f"{table}: line {reader.line_num} has more fields than the header; put "
                        'values with commas in quotes, such as "a red flower, close up"'
                    )
                yield {name: value for name, value in row.items() if name}
    finally:
        csv.field_size_limit(before)


def _jsonl_rows(table: Path, _: str | None, __: CaptionRule) -> Iterator[_Row]:
    with table.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = parse_json(line, f"{table}: line {number}", "fix it", finite=False)
            if not isinstance(row, dict):
                raise InputError(f"{table}: line {number} is not a JSON object; fix it")
            yield row


def _parquet_rows(table: Path, path_column: str | None, rule: CaptionRule) -> Iterator[_Row]:
    with pyarrow.parquet.ParquetFile(table) as file:
        # Tables of datasets often hold the media's bytes as well, which nobody wants in memory.
        asked = (name.lower() for name in (path_column, rule.column) if name)
        known = {*PATH_COLUMNS, *CAPTION_COLUMNS, *asked}
        held = file.schema_arrow.names
        _require_once(table, held, held)
        captions = rule.columns(held)
        names = [name for name in held if name.lower() in known or name in captions]
        if not names:
            require_column(str(table), held, PATH_COLUMNS, None, "--path-column")
        for batch in file.iter_batches(columns=names):
            yield from batch.to_pylist()
