"""Writes a store sample by sample."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from array_record.python import array_record_module

from alload_jax.data import record as records
from alload_jax.data.manifest import MANIFEST_NAME, manifest_metadata, read_rows
from alload_jax.data.sample_form import SampleForm
from alload_jax.data.store.checks import Alternative, SampleChecks
from alload_jax.data.store.finish import finish_store, form_of, require_alike
from alload_jax.data.store.shard import ShardWriter
from alload_jax.data.store.shard_files import (
    FinishedShard,
    finished_shards,
    others,
    partial_folder,
    remove_unfinished,
    shard_number,
    stored_numbers,
)
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple

WriterMode = Literal["new", "resume", "append"]


class StoreWriter:
    """Writes a data folder: it appears when the writer closes without an error.

    Use as a context manager::

        with StoreWriter(folder, vae_stride=(4, 8, 8)) as writer:
            writer.add(latents, condition, size=(81, 480, 832))

    Until then the shards are in FOLDER.partial. After an exception this folder holds every sample,
    after a kill every finished shard. A writer with mode "resume" goes on from there::

        with StoreWriter(folder, vae_stride=(4, 8, 8), mode="resume") as writer:
            for latents, condition, size in clips[writer.written :]:
                writer.add(latents, condition, size)

    It then writes the same bytes as a writer that was never interrupted.

    Attributes:
      written: number of samples in the store, with those from before.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vae_stride: Triple,
        origin: dict[str, Any] | None = None,
        samples_per_shard: int = 4096,
        bytes_per_shard: int = 2**28,
        mode: WriterMode = "new",
    ):
        """Opens a writer.

        Args:
          folder: data folder to create.
          vae_stride: pixels per latent along (frames, height, width); 1, 1, 1 without a VAE.
          origin: provenance of the data, JSON values that the manifest stores. None takes the
            origin of a store that is continued.
          samples_per_shard: maximum number of samples per shard.
          bytes_per_shard: a shard with this many bytes of records is full.
          mode: "new" creates the folder; "resume" also goes on after an interrupted writer;
            "append" also adds to a folder that exists.

        Raises:
          InputError: the folder or FOLDER.partial is in the way, or what is there has another
            origin or vae_stride.
          TypeError: the origin has no form in JSON.
        """
        self.folder = Path(folder)
        self._mode = mode
        self._limits = samples_per_shard, bytes_per_shard
        self._stride = vae_stride
        require_free(self.folder, mode)
        self._kept = _without_gaps(self.folder, finished_shards(self.folder))
        self._origin = json.loads(json.dumps(origin)) if origin is not None else None
        self._checks = SampleChecks(vae_stride)
        self._shard: ShardWriter | None = None
        self._follow_what_is_there()
        self._next_number = max(self._numbers(), default=-1) + 1

    @property
    def written(self) -> int:  # noqa: D102  an attribute for users
        return self._checks.number

    def __enter__(self) -> Self:
        remove_unfinished(self.folder)
        if self._kept and not self._is_full(
            len(self._kept[-1].rows), self._kept[-1].notes["record_bytes"]
        ):
            self._reopen(self._kept[-1])
        return self

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
        """Appends a sample.

        Args:
          latents: [frames, height, width, channels] finite floats.
          condition: [L] integers, the classes; or [L, width] finite floats, the text embeddings.
            All samples of a folder have the same kind and width.
          size: (frames, height, width) in pixels.
          caption: the text in words, for people to read.
          given: [frames, height, width, G] finite floats, what an image-to-video model takes beside
            the noisy latents: a mask and the latents of the given frames.
          image: [N, width] finite floats, embeddings of the given image.
          alternatives: further texts of the sample, each as a condition and a caption, like the
            first, and where the text has tokens of further kinds, these as `parts`. Training takes
            one of all in each epoch.
          parts: [L, width] finite floats by name, condition tokens of further kinds, such as those
            of a second text encoder. All samples of a folder have the same names and widths; a
            sample may have no tokens of a kind.
          path: where the sample comes from, such as `portraits/clip.mp4`, for the patterns of
            `data.weights`.

        Raises:
          ValueError: the shape of the latents does not match `size` and the VAE's stride, the
            channels or the kind of condition differ from the previous samples, a value is an
            integer, NaN or infinite, a class is negative, or a caption or the path is no text. The
            sample is left out; the writer can go on.
          OSError: the disk is full.
        """
        extra: dict[str, Any] = {"alternatives": alternatives, "parts": parts, "path": path}
        if self._shard is None:
            self._shard = self._open_shard(self._next_number)
            self._next_number += 1
        self._shard.add(latents, condition, size, caption, given=given, image=image, **extra)
        if self._is_full(self._shard.written, self._shard.record_bytes):
            self._finish_shard()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if error is not None:
            self._keep(error)
            return
        try:
            if self._shard is None and self._next_number == 0:
                self._shard = self._open_shard(0)
            self._finish_shard()
            finish_store(self.folder)
        except OSError as failure:
            self._keep(failure)
            raise

    def _follow_what_is_there(self) -> None:
        """Takes form, origin and number of samples from the shards that are there."""
        forms = [(str(s.path), s.rows, s.notes) for s in self._kept]
        manifest = self.folder / MANIFEST_NAME
        if manifest.is_file():
            forms.insert(0, (str(manifest), read_rows(self.folder), manifest_metadata(manifest)))
        given: dict[str, Any] = {"vae_stride": tuple(self._stride)}
        if self._origin is not None:
            given["origin"] = self._origin
        there = [
            (place, form_of(rows, notes) | {"origin": notes["origin"]})
            for place, rows, notes in forms
        ]
        require_alike([("this writer", given), *there], "name another folder or remove it")
        for _, rows, notes in forms:
            self._origin = notes["origin"]
            self._checks.number += len(rows)
            if len(rows):
                self._checks.follow(rows["channels"][0].as_py(), SampleForm.from_notes(notes))

    def _numbers(self) -> list[int]:
        """Numbers that shards have, in the store and beside it."""
        files = self.folder.glob("*.arrayrecord")
        there = [n for path in files if (n := shard_number(path.name)) is not None]
        kept = [shard.number for shard in finished_shards(self.folder)]
        return [*stored_numbers(self.folder), *there, *kept]

    def _is_full(self, samples: int, record_bytes: int) -> bool:
        return samples >= self._limits[0] or record_bytes >= self._limits[1]

    def _open_shard(self, number: int) -> ShardWriter:
        return ShardWriter(
            self.folder,
            number,
            vae_stride=self._stride,
            origin=self._origin,
            checks=self._checks,
        )

    def _reopen(self, shard: FinishedShard) -> None:
        """Opens the last shard again, which an exception ended before it was full."""
        self._checks.number -= len(shard.rows)
        self._shard = self._open_shard(shard.number)
        reader = array_record_module.ArrayRecordReader(str(shard.path))
        for row in shard.rows.to_pylist():
            (data,) = reader.read([row["index"]])
            if records.checksum(data) != row["checksum"]:
                self._shard.discard()
                raise InputError(
                    f"{shard.path}: record {row['index']} is damaged; remove this shard, to go on "
                    "before it"
                )
            self._shard.add_record(data, row)
        reader.close()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            shard.finish()

    def _keep(self, error: BaseException) -> None:
        """Keeps the samples so far and says in a note of the error how to go on."""
        shard, self._shard = self._shard, None
        if shard is not None:
            try:
                shard.finish()
            except OSError:  # a full disk: the shards before this one stay
                self._checks.number -= shard.written
        remove_unfinished(self.folder)
        if finished_shards(self.folder):
            mode = "append" if (self.folder / MANIFEST_NAME).is_file() else "resume"
            error.add_note(
                f"{self.folder}: {self.written} samples are kept, the new ones in "
                f"{partial_folder(self.folder)}; StoreWriter with mode={mode!r} goes on after them"
            )


def _without_gaps(folder: Path, kept: list[FinishedShard]) -> list[FinishedShard]:
    """Refuses shards of which one in the middle is missing: their samples cannot be counted."""
    first = kept[0].number if (folder / MANIFEST_NAME).is_file() and kept else 0
    for expected, shard in enumerate(kept, first):
        if shard.number != expected:
            raise InputError(
                f"{partial_folder(folder)}: holds shard {shard.number}, but shard {expected} is "
                "not finished; write it with ShardWriter, or remove the folder to begin again"
            )
    return kept


def require_free(folder: Path, mode: WriterMode = "new") -> None:
    """Checks that a store can be written, and continued where the mode says so.

    Raises:
      InputError: something is in the way.
    """
    is_store = (folder / MANIFEST_NAME).is_file()
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (mode == "append" and is_store):
        raise InputError(f"{folder}: exists already; name another folder or remove it")
    if mode != "new":
        return
    if kept := finished_shards(folder):
        samples = sum(len(shard.rows) for shard in kept)
        raise InputError(
            f"{partial_folder(folder)}: holds {samples} samples of an interrupted writer; go on "
            'with mode="resume", or remove it'
        )
    if found := others(folder):
        raise InputError(
            f"{found[0]}: would be overwritten, because {folder} is first written there; "
            "move it away or name another folder"
        )
