"""Makes a store of finished shards."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from alload_jax.data.manifest import (
    MANIFEST_NAME,
    in_row_schema,
    manifest_metadata,
    read_rows,
)
from alload_jax.data.sample_form import SampleForm
from alload_jax.data.store.shard_files import (
    FinishedShard,
    finished_shards,
    partial_folder,
    remove_sidecars,
    remove_unfinished,
    stored_numbers,
    write_rows,
)
from alload_jax.errors import InputError


def finish_store(folder: str | Path, shards: int | None = None) -> Path:
    """Makes a store of the shards that `ShardWriter` has written for it.

    The folder appears at once. Shards for a store that exists are added to it: its own shards stay
    as they are, and readers of its old manifest are not disturbed. A call after a kill goes on.

    Args:
      folder: the store, as given to `ShardWriter`.
      shards: number of shards that the store must have, with those that it had before.

    Returns:
      The path of the manifest.

    Raises:
      InputError: there are no shards, a shard is missing, or shards disagree about the VAE's
        stride, the channels, the kind of condition or the origin.
    """
    folder = Path(folder)
    stored, new = set(stored_numbers(folder)), finished_shards(folder)
    _require_complete(folder, stored | {shard.number for shard in new}, shards)
    exists = (folder / MANIFEST_NAME).is_file()
    if new:
        _require_agreement(folder, new, exists)
        rows, notes = _manifest_of(folder, new, exists)
        if exists:
            for shard in new:
                shard.path.replace(folder / shard.path.name)
            write_rows(folder / MANIFEST_NAME, rows, notes)
        else:
            remove_unfinished(folder)
            write_rows(partial_folder(folder) / MANIFEST_NAME, rows, notes)
            partial_folder(folder).rename(folder)
    _clean(folder)
    return folder / MANIFEST_NAME


def _clean(folder: Path) -> None:
    """Removes sidecars of shards that the manifest names, and what killed writers left."""
    stored = set(stored_numbers(folder))
    for place in (folder, partial_folder(folder)):
        remove_sidecars(place, stored)
    remove_unfinished(folder)


def _require_complete(folder: Path, numbers: set[int], shards: int | None) -> None:
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


def _manifest_of(
    folder: Path, new: list[FinishedShard], exists: bool
) -> tuple[pa.Table, dict[str, Any]]:
    """Rows and notes of the store's manifest with the new shards."""
    tables = [shard.rows for shard in new]
    old: dict[str, Any] = {}
    if exists:
        tables.insert(0, read_rows(folder))
        old = manifest_metadata(folder / MANIFEST_NAME)
    sizes = dict(old.get("shard_bytes", {}))
    for shard in new:
        sizes |= shard.notes["shard_bytes"]
    forms = [SampleForm.from_notes(shard.notes) for shard in new if len(shard.rows)]
    notes = {
        "vae_stride": new[0].notes["vae_stride"],
        **[SampleForm.from_notes(old), *forms][-1].notes(),
        "shard_bytes": sizes,
        "origin": new[0].notes["origin"],
    }
    return in_row_schema(pa.concat_tables(tables, promote_options="default")), notes


def _require_agreement(folder: Path, new: list[FinishedShard], exists: bool) -> None:
    forms = [
        (str(shard.path), form_of(shard.rows, shard.notes) | {"origin": shard.notes["origin"]})
        for shard in new
    ]
    if exists:
        path = folder / MANIFEST_NAME
        notes = manifest_metadata(path)
        form = form_of(read_rows(folder), notes) | {"origin": notes["origin"]}
        forms.insert(0, (str(path), form))
    require_alike(forms, "write it again, or to another store")


def form_of(rows: pa.Table, notes: Mapping[str, Any]) -> dict[str, Any]:
    """What all samples of a store have in common, by name; less if there are no rows.

    Args:
      rows: rows of a manifest.
      notes: `vae_stride` and those of a `SampleForm`.
    """
    form: dict[str, Any] = {"vae_stride": tuple(notes["vae_stride"])}
    if len(rows):
        form["channels"] = rows["channels"][0].as_py()
        form |= SampleForm.from_notes(notes).described()
    return form


def require_alike(forms: Iterable[tuple[str, dict[str, Any]]], remedy: str) -> None:
    """Checks that places have equal values under the names that they share.

    Args:
      forms: for each place, the values by name.
      remedy: what to do, for the message.

    Raises:
      InputError: two places differ.
    """
    known: dict[str, tuple[str, Any]] = {}
    for place, form in forms:
        for name, value in form.items():
            first, expected = known.setdefault(name, (place, value))
            if value != expected:
                raise InputError(f"{place}: {name} is {value}, but {expected} in {first}; {remedy}")
