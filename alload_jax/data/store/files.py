"""The files of a store: names, headers, and the manifest that finishes it.

The shards of FOLDER are written in FOLDER.partial. The sidecar of a shard holds its rows of the
manifest. It is written after the shard, so that a shard with a sidecar is finished.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.manifest import (
    DIGEST_KEY,
    MANIFEST_NAME,
    METADATA_KEY,
    NEXT_NUMBER,
    NUMBER,
    in_row_schema,
    manifest_digest,
    manifest_metadata,
    read_rows,
)
from alload_jax.data.record import SampleForm
from alload_jax.errors import InputError
from alload_jax.files import Json, replacing, require_local

_SHARD = re.compile(r"shard-(\d{5,})\.arrayrecord")
_SIDECAR = re.compile(r"shard-(\d{5,})\.parquet")
_UNFINISHED = re.compile(
    r"(shard-\d{5,}|manifest)\.(arrayrecord|parquet)\.[0-9a-f]{8}\.unfinished"
    r"|\.[0-9a-f]{16}\.unfinished\.(arrayrecord|parquet)"
)


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.arrayrecord"


def shard_number(name: str) -> int:
    """Number in the file name of a shard; −1 for other names."""
    found = _SHARD.fullmatch(name)
    return int(found[1]) if found else -1


def partial_folder(folder: Path) -> Path:
    """The folder in which the shards of `folder` are written.

    Raises:
      InputError: it is the address of object storage, or files cannot be moved to it.
    """
    require_local(folder)
    if not folder.name or folder.is_symlink():
        folder = folder.resolve()
    if os.path.ismount(folder):
        raise InputError(f"{folder}: is a mount point; name a folder in it")
    return folder.with_name(folder.name + ".partial")


def sync(path: Path) -> None:
    """Waits until a file that is to take the place of another is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_rows(path: Path, rows: pa.Table, notes: Json) -> None:
    """Writes rows and notes as Parquet; the same bytes for the same values."""
    written = json.dumps(notes).encode()
    digest = manifest_digest(rows.schema, len(rows), written)
    metadata = {METADATA_KEY: written, DIGEST_KEY: digest}
    rows = rows.combine_chunks().replace_schema_metadata(metadata)
    with replacing(path) as unfinished:
        pyarrow.parquet.write_table(
            rows, unfinished, version="2.6", compression="snappy", write_page_checksum=True
        )
        sync(unfinished)


class Part(NamedTuple):
    """Rows of a store and what was noted of them: a finished shard, or the manifest.

    Attributes:
      path: the shard, or the manifest.
      rows: its rows of the manifest, in a `row_schema`.
      notes: `vae_stride`, those of a `SampleForm`, `origin`, `shard_bytes` (names and sizes of the
        files); of a shard also `record_bytes`, the sum of all records.
    """

    path: Path
    rows: pa.Table
    notes: Json

    @property
    def number(self) -> int:
        """Number of the shard; −1 of a manifest."""
        return shard_number(self.path.name)


def write_sidecar(folder: Path, number: int, rows: pa.Table, notes: Json) -> None:
    """Declares the shard of this number in `FOLDER.partial` finished."""
    partial = partial_folder(folder)
    size = (partial / shard_name(number)).stat().st_size
    write_rows(sidecar(partial, number), rows, notes | {"shard_bytes": {shard_name(number): size}})


def sidecar(folder: Path, number: int) -> Path:
    """Path of a shard's sidecar."""
    return folder / f"shard-{number:05d}.parquet"


def finished_shard(folder: Path, number: int) -> Part | None:
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
            # ParquetFile takes this file for itself, not for a part of a data set.
            with pyarrow.parquet.ParquetFile(path) as file:
                return Part(shard, in_row_schema(file.read()), notes)
    return None


def finished_shards(folder: Path) -> list[Part]:
    """The finished shards in `FOLDER.partial`, in order, without those in FOLDER's manifest."""
    partial = partial_folder(folder)
    names = [path.name for path in partial.iterdir()] if partial.is_dir() else []
    numbers = {int(found[1]) for name in names if (found := _SIDECAR.fullmatch(name))}
    shards = (finished_shard(folder, n) for n in sorted(numbers - set(stored_numbers(folder))))
    return [shard for shard in shards if shard]


def stored_part(folder: Path) -> list[Part]:
    """The manifest of `folder`; nothing if there is none."""
    path = folder / MANIFEST_NAME
    return [Part(path, read_rows(folder), manifest_metadata(path))] if path.is_file() else []


def stored_numbers(folder: Path) -> list[int]:
    """Numbers of the shards in the manifest of `folder`; none if there is no manifest."""
    names = manifest_metadata(folder / MANIFEST_NAME).get("shard_bytes", {})
    return [number for number in map(shard_number, names) if number >= 0]


def is_finished(folder: str | Path, number: int) -> bool:
    """Returns whether the shard of this number is finished, or in the manifest of `folder`."""
    folder = Path(folder)
    return finished_shard(folder, number) is not None or number in stored_numbers(folder)


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
        lost = number >= 0 and not sidecar(partial, number).exists()
        if lost or _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
    if not any(partial.iterdir()):
        partial.rmdir()


def finish_store(
    folder: str | Path,
    shards: int | None = None,
    rows: pa.Table | None = None,
    next_number: int = 0,
) -> Path:
    """Makes a store of the shards that `ShardWriter` has written for it.

    The folder appears at once; in an empty one the manifest is the last file that does. Shards for
    a store that exists are added to it: its own shards stay as they are, and readers of its old
    manifest are not disturbed. A call after a kill goes on.

    Args:
      folder: the store, as given to `ShardWriter`.
      shards: number of shards that the store must have, with those that it had before.
      rows: all rows of the manifest, of what the store had before and of new shards; None for all
        of both. Shards that they do not name stay in the folder.
      next_number: number that the next new sample gets, where rows have numbers.

    Returns:
      The path of the manifest.

    Raises:
      InputError: there are no shards, a shard is missing, or shards disagree about the VAE's
        stride, the channels, the kind of condition or the origin.
    """
    folder = Path(folder)
    stored, new = set(stored_numbers(folder)), finished_shards(folder)
    numbers = stored | {shard.number for shard in new}
    if not numbers:
        raise InputError(f"{folder}: there is no finished shard of it; write one with ShardWriter")
    expected = set(range(shards)) if shards is not None else numbers
    if missing := sorted(expected - numbers):
        raise InputError(
            f"{folder}: shard {missing[0]} is not finished ({len(missing)} of {shards} are "
            "missing); write it again"
        )
    if beyond := sorted(numbers - expected):
        raise InputError(
            f"{folder}: holds shard {beyond[0]}, but {shards} shards are expected; remove "
            f"{partial_folder(folder)}, or correct the number"
        )
    if new or rows is not None:
        before = stored_part(folder)
        found, notes = _manifest_of([*before, *new])
        if rows is not None:
            found, named = rows, set(rows["shard"].to_pylist())
            sizes = notes["shard_bytes"]
            notes["shard_bytes"] = {name: sizes[name] for name in sizes if name in named}
            notes |= {NEXT_NUMBER: next_number} if NUMBER in rows.column_names else {}
        if before:
            for shard in new:
                if shard.path.name in notes["shard_bytes"]:
                    shard.path.replace(folder / shard.path.name)
            write_rows(folder / MANIFEST_NAME, found, notes)
        else:
            remove_unfinished(folder)
            write_rows(manifest := partial_folder(folder) / MANIFEST_NAME, found, notes)
            if folder.is_dir():  # an empty one, perhaps the current one of a process
                for path in (*(shard.path for shard in new), manifest):
                    path.replace(folder / path.name)
            else:
                partial_folder(folder).rename(folder.resolve())
    for number in stored_numbers(folder):
        for place in (folder, partial_folder(folder)):
            sidecar(place, number).unlink(missing_ok=True)
    if rows is not None:
        shutil.rmtree(partial_folder(folder), ignore_errors=True)
    remove_unfinished(folder)
    return folder / MANIFEST_NAME


def _manifest_of(parts: list[Part]) -> tuple[pa.Table, Json]:
    """Rows and notes of the manifest of all parts, which must agree."""
    there = ((str(path), form_of(rows, notes)) for path, rows, notes in parts)
    require_alike(there, "write it again, or to another store")
    sizes: dict[str, int] = {}
    for part in parts:
        sizes |= part.notes["shard_bytes"]
    forms = [SampleForm.from_notes(part.notes) for part in parts if len(part.rows)]
    notes = {
        "vae_stride": parts[-1].notes["vae_stride"],
        **(forms or [SampleForm()])[-1].notes(),
        "shard_bytes": sizes,
        "origin": parts[-1].notes["origin"],
    }
    rows = pa.concat_tables([part.rows for part in parts], promote_options="default")
    if NUMBER in rows.column_names:  # rows that are added have none yet
        first = int(parts[0].notes.get(NEXT_NUMBER, len(rows)))
        new = itertools.count(first)
        numbers = [next(new) if n is None else n for n in rows[NUMBER].to_pylist()]
        rows = rows.set_column(rows.column_names.index(NUMBER), NUMBER, pa.array(numbers))
        notes[NEXT_NUMBER] = next(new)
    return in_row_schema(rows), notes


def form_of(rows: pa.Table, notes: Json) -> Json:
    """What all samples of a store have in common, by name; less if there are no rows.

    Args:
      rows: rows of a manifest.
      notes: `vae_stride`, those of a `SampleForm`, and `origin` where it matters.
    """
    form: Json = {"vae_stride": tuple(notes["vae_stride"])}
    if len(rows):
        form["channels"] = rows["channels"][0].as_py()
        form |= SampleForm.from_notes(notes).described()
    return form | {name: notes[name] for name in ("origin",) if name in notes}


def require_alike(forms: Iterable[tuple[str, Json]], remedy: str) -> None:
    """Checks that places have equal values under the names that they share.

    Args:
      forms: for each place, the values by name.
      remedy: what to do, for the message.

    Raises:
      InputError: two places differ.
    """
    known: Json = {}
    for place, form in forms:
        for name, value in form.items():
            first, expected = known.setdefault(name, (place, value))
            if value != expected:
                raise InputError(f"{place}: {name} is {value}, but {expected} in {first}; {remedy}")
