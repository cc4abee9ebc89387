"""Writes one shard of a store; many processes may each write their own."""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from array_record.python import array_record_module

from alload_jax.data import record as records
from alload_jax.data.manifest import CAPTION, CAPTIONS, PART_LENGTHS, PATH, row_schema
from alload_jax.data.sample_form import SampleForm, part_names
from alload_jax.data.sample_texts import texts_of
from alload_jax.data.store.checks import Alternative, SampleChecks
from alload_jax.data.store.shard_files import (
    finished_shard,
    partial_folder,
    replace_by,
    shard_name,
    sidecar,
    write_sidecar,
)
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple


class ShardWriter:
    """Writes a shard of a store. It appears with its sidecar when it is complete, or not at all.

    Shards of one store may be written in any order, by any process. The same samples give the same
    bytes. `finish_store` makes the store of them::

        for number, clips in enumerate(parts):
            if not is_finished(folder, number):
                with ShardWriter(folder, number, vae_stride=(4, 8, 8)) as shard:
                    for latents, condition, size in clips:
                        shard.add(latents, condition, size)
        finish_store(folder, shards=len(parts))

    A shard may hold no samples.

    Attributes:
      written: number of samples so far.
      record_bytes: sum of the sizes of their records.
    """

    def __init__(
        self,
        folder: str | Path,
        number: int,
        *,
        vae_stride: Triple,
        origin: dict[str, Any] | None = None,
        checks: SampleChecks | None = None,
    ):
        """Opens a shard in FOLDER.partial, which is made if it does not exist.

        Args:
          folder: the store; the same for all of its shards.
          number: number of the shard, from 0.
          vae_stride: pixels per latent along (frames, height, width); 1, 1, 1 without a VAE.
          origin: provenance of the data, as JSON values; the same for all shards.
          checks: checks that go on from another shard; by default samples count from 0.

        Raises:
          TypeError: the origin has no form in JSON.
          InputError: the number is negative.
        """
        if number < 0:
            raise InputError(f"{folder}: number of a shard is {number}; it must be 0 or more")
        self.written = 0
        self.record_bytes = 0
        self._folder, self._number = Path(folder), number
        self._stride, self._origin = vae_stride, json.loads(json.dumps(origin or {}))
        self._checks = checks or SampleChecks(vae_stride, f"shard {number}: ")
        self._rows: list[dict[str, Any]] = []
        self._path = partial_folder(self._folder) / shard_name(number)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = self._path.with_name(
            f"{self._path.name}.{secrets.token_hex(4)}.unfinished"
        )
        # One record per group: training reads single samples in random order.
        self._writer = array_record_module.ArrayRecordWriter(str(self._unfinished), "group_size:1")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def add(
        self,
        latents: np.ndarray,
        condition: np.ndarray,
        size: Triple,
        caption: str | None = None,
        *,
        given: np.ndarray | None = None,
        image: np.ndarray | None = None,
        alternatives: Sequence[Alternative] = (),
        parts: Mapping[str, np.ndarray] | None = None,
        path: str | None = None,
    ) -> None:
        """Appends a sample; arguments and errors as `StoreWriter.add`'s."""
        if path is not None and not isinstance(path, str):
            raise ValueError(f"path is {path!r}; give text, or None where there is none")
        alternatives = list(alternatives)
        arrays = self._checks.check(
            latents, condition, size, caption, given, image, alternatives, parts
        )
        latents = arrays[records.LATENTS]
        data = records.encode(arrays)
        frames, height, width = (int(value) for value in size)
        row = {
            "frames": frames,
            "height": height,
            "width": width,
            "channels": latents.shape[-1],
            "text_length": max(map(len, texts_of(arrays))),
            CAPTION: caption,
        }
        if alternatives:
            row[CAPTIONS] = [caption, *(words for _, words, *_ in alternatives)]
        if path is not None:
            row[PATH] = path
        if names := part_names(arrays):
            row[PART_LENGTHS] = [max(map(len, texts_of(arrays, name))) for name in names]
        self.add_record(data, row)

    def add_record(self, data: bytes, row: dict[str, Any]) -> None:
        """Appends an encoded sample.

        Args:
          data: the record.
          row: its row of the manifest; place and checksum are filled in.

        Raises:
          OSError: the disk is full, or the file cannot be written.
        """
        self._writer.write(data)
        if not self._writer.ok():
            self._close()
        place = {"shard": self._path.name, "index": self.written}
        self._rows.append(row | place | {"checksum": records.checksum(data)})
        self.written += 1
        self._checks.number += 1
        self.record_bytes += len(data)

    def finish(self) -> None:
        """Closes the shard and writes its sidecar; a shard of this number is replaced.

        Raises:
          OSError: the disk is full, or the file cannot be written.
        """
        held = {name for row in self._rows for name, value in row.items() if value is not None}
        rows, notes = pa.Table.from_pylist(self._rows, schema=row_schema(held)), self._notes()
        try:
            self._close()
            there = finished_shard(self._folder, self._number)
            # A late writer of equal samples must not disturb those who read the shard by now.
            if there and there.rows.equals(rows) and notes.items() <= there.notes.items():
                return
            # The shard that is replaced must not pass for finished by the old sidecar.
            sidecar(self._path.parent, self._number).unlink(missing_ok=True)
            replace_by(self._path, self._unfinished)
            write_sidecar(self._folder, self._number, rows, notes)
        finally:
            self._unfinished.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what was written."""
        try:
            self._close()
        except OSError:
            pass  # what cannot be closed is removed all the same
        finally:
            self._unfinished.unlink(missing_ok=True)

    def _close(self) -> None:
        try:
            self._writer.close()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise OSError(
                f"{self._path}: cannot be written ({reason}); is the disk full?"
            ) from None

    def _notes(self) -> dict[str, Any]:
        return {
            "vae_stride": list(self._stride),
            **(self._checks.form if self._rows else SampleForm()).notes(),
            "origin": self._origin,
            "record_bytes": self.record_bytes,
        }
