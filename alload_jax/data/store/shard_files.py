"""Files of a store in work: shards, their sidecars, and how they appear at once.

The shards of FOLDER are written in FOLDER.partial. The sidecar of a shard holds its rows of the
manifest. It is written after the shard, so that a shard with a sidecar is finished.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.manifest import (
    DIGEST_KEY,
    MANIFEST_NAME,
    METADATA_KEY,
    in_row_schema,
    manifest_digest,
    manifest_metadata,
)

_SHARD = re.compile(r"shard-(\d{5,})\.arrayrecord")
_SIDECAR = re.compile(r"shard-(\d{5,})\.parquet")
_UNFINISHED = re.compile(r"(shard-\d{5,}|manifest)\.(arrayrecord|parquet)\.[0-9a-f]{8}\.unfinished")


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.arrayrecord"


def shard_number(name: str) -> int | None:
    """Number in the file name of a shard; None for other names."""
    found = _SHARD.fullmatch(name)
    return int(found[1]) if found else None


def partial_folder(folder: Path) -> Path:
    """The folder in which the shards of `folder` are written."""
    return folder.with_name(folder.name + ".partial")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the path of a file to write, which then takes the place of `path` at once.

    An error removes the file. Several processes may write the same path.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        yield unfinished
        replace_by(path, unfinished)
    finally:
        unfinished.unlink(missing_ok=True)


def replace_by(path: Path, unfinished: Path) -> None:
    """Puts a complete file in the place of `path`, on the disk before it is visible."""
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def write_rows(path: Path, rows: pa.Table, notes: dict[str, Any]) -> None:
    """Writes rows and notes as Parquet; the same bytes for the same values."""
    written = json.dumps(notes).encode()
    digest = manifest_digest(rows.schema, len(rows), written)
    rows = rows.combine_chunks().replace_schema_metadata(
        {METADATA_KEY: written, DIGEST_KEY: digest}
    )
    with replacing(path) as unfinished:
        pyarrow.parquet.write_table(
            rows, unfinished, version="2.6", compression="snappy", write_page_checksum=True
        )


@dataclass(frozen=True)
class FinishedShard:
    """A shard with its sidecar.

    Attributes:
      number: number of the shard.
      path: the shard.
      rows: its rows of the manifest, in a `row_schema`.
      notes: `vae_stride`, those of a `SampleForm`, `origin`, `shard_bytes` (a name and the size of
        the file) and `record_bytes` (the sum of all records).
    """

    number: int
    path: Path
    rows: pa.Table
    notes: dict[str, Any]


def write_sidecar(folder: Path, number: int, rows: pa.Table, notes: dict[str, Any]) -> None:
    """Declares the shard of this number in `FOLDER.partial` finished."""
    partial = partial_folder(folder)
    size = (partial / shard_name(number)).stat().st_size
    write_rows(sidecar(partial, number), rows, notes | {"shard_bytes": {shard_name(number): size}})


def sidecar(folder: Path, number: int) -> Path:
    """Path of a shard's sidecar."""
    return folder / f"shard-{number:05d}.parquet"


def finished_shard(folder: Path, number: int) -> FinishedShard | None:
    """The shard of this number in `FOLDER.partial`; None if it is not finished.

    A shard that `finish_store` has moved to FOLDER counts as long as it has a sidecar.
    """
    partial = partial_folder(folder)
    path = sidecar(partial, number)
    notes = manifest_metadata(path)
    size = notes.get("shard_bytes", {}).get(shard_name(number))
    for place in (partial, folder):
        shard = place / shard_name(number)
        if size is not None and shard.is_file() and shard.stat().st_size == size:
            return FinishedShard(number, shard, _read_sidecar(path), notes)
    return None


def _read_sidecar(path: Path) -> pa.Table:
    # ParquetFile takes this file for itself, not for a part of a data set.
    with pyarrow.parquet.ParquetFile(path) as file:
        return in_row_schema(file.read())


def finished_shards(folder: Path) -> list[FinishedShard]:
    """The finished shards in `FOLDER.partial`, in order, without those in FOLDER's manifest."""
    partial = partial_folder(folder)
    names = [path.name for path in partial.iterdir()] if partial.is_dir() else []
    numbers = {int(found[1]) for name in names if (found := _SIDECAR.fullmatch(name))}
    shards = (finished_shard(folder, n) for n in sorted(numbers - set(stored_numbers(folder))))
    return [shard for shard in shards if shard]


def stored_numbers(folder: Path) -> list[int]:
    """Numbers of the shards in the manifest of `folder`; none if there is no manifest."""
    names = manifest_metadata(folder / MANIFEST_NAME).get("shard_bytes", {})
    return [number for name in names if (number := shard_number(name)) is not None]


def is_finished(folder: str | Path, number: int) -> bool:
    """Returns whether the shard of this number is finished, or in the manifest of `folder`."""
    folder = Path(folder)
    return finished_shard(folder, number) is not None or number in stored_numbers(folder)


def remove_sidecars(folder: Path, numbers: set[int]) -> None:
    """Removes the sidecars of these shards."""
    for number in numbers:
        sidecar(folder, number).unlink(missing_ok=True)


def others(folder: Path) -> list[Path]:
    """What lies in `FOLDER.partial` and is not of a writer."""
    partial = partial_folder(folder)
    found = sorted(partial.iterdir()) if partial.is_dir() else []
    ours = (_SHARD, _SIDECAR, _UNFINISHED, re.compile(re.escape(MANIFEST_NAME)))
    return [path for path in found if not any(name.fullmatch(path.name) for name in ours)]


def remove_unfinished(folder: Path) -> None:
    """Removes what killed writers left in `FOLDER.partial`, and the folder if it is empty then.

    Finished shards and files that are not of a writer stay.
    """
    partial = partial_folder(folder)
    if not partial.is_dir():
        return
    for path in partial.iterdir():
        number = shard_number(path.name)
        lost = number is not None and not sidecar(partial, number).exists()
        if lost or _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
    if not any(partial.iterdir()):
        partial.rmdir()
