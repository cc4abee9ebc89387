"""Writes a store sample by sample, and merges several into one."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
import pyarrow as pa
from array_record.python import array_record_module
from typing_extensions import override

from alload_jax.data import manifest as manifests
from alload_jax.data import record as records
from alload_jax.data.record import SampleForm
from alload_jax.data.store import files
from alload_jax.data.store.shard import SampleWriter, ShardWriter
from alload_jax.errors import InputError
from alload_jax.files import Json, replacing
from alload_jax.planning.samples import Triple

WriterMode = Literal["new", "resume", "append"]


class StoreWriter(SampleWriter):
    """Writes a data folder: it appears when the writer closes without an error.

    Use as a context manager::

        with StoreWriter(folder, vae_stride=(4, 8, 8)) as writer:
            writer.add(latents, condition, size=(81, 480, 832))

    Until then the shards are in FOLDER.partial. After an exception this folder holds every sample,
    after a kill every finished shard. A writer with mode "resume" goes on from there::

        with StoreWriter(folder, vae_stride=(4, 8, 8), mode="resume") as writer:
            for latents, condition, size in clips[writer.written :]:
                writer.add(latents, condition, size)

    It then writes the same bytes as a writer that was never interrupted. Samples are added by
    `SampleWriter.add`.

    Attributes:
      written: number of samples in the store, with those from before.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vae_stride: Triple,
        origin: Json | None = None,
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
          TypeError: the origin is no dict, or has no form in JSON.
        """
        self.folder = Path(folder)
        self._limits = samples_per_shard, bytes_per_shard
        require_free(self.folder, mode)
        self._kept, stored = files.finished_shards(self.folder), files.stored_part(self.folder)
        first = self._kept[0].number if stored and self._kept else 0
        for expected, shard in enumerate(self._kept, first):
            if shard.number != expected:  # the samples of the missing one cannot be counted
                raise InputError(
                    f"{files.partial_folder(self.folder)}: holds shard {shard.number}, but shard "
                    f"{expected} is not finished; write it with ShardWriter, or remove the folder "
                    "to begin again"
                )
        super().__init__(vae_stride, origin)
        self._shard: ShardWriter | None = None
        self._follow([*stored, *self._kept])
        numbers = files.stored_numbers(self.folder) + [shard.number for shard in self._kept]
        numbers += [files.shard_number(path.name) for path in self.folder.glob("*.arrayrecord")]
        self._next_number = max(numbers, default=-1) + 1

    def __enter__(self) -> Self:
        files.remove_unfinished(self.folder)
        last = self._kept[-1] if self._kept else None
        if last is None or self._is_full(len(last.rows), last.notes["record_bytes"]):
            return self
        # An exception ended this shard before it was full: its records are written again.
        self._shard = self._open_shard(last.number)
        reader = array_record_module.ArrayRecordReader(str(last.path))
        for row in last.rows.to_pylist():
            (data,) = reader.read([row["index"]])
            if records.checksum(data) != row["checksum"]:
                self._shard.discard()
                raise InputError(
                    f"{last.path}: record {row['index']} is damaged; remove this shard, to go on "
                    "before it"
                )
            self._shard.add_record(data, row)
        reader.close()
        return self

    @override
    def add_record(self, data: bytes, row: Json) -> None:
        if self._shard is None:
            self._shard = self._open_shard(self._next_number)
            self._next_number += 1
        self._shard.add_record(data, row)
        self.written += 1
        if self._is_full(self._shard.written, self._shard.record_bytes):
            self._finish_shard()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._keep(error)
            return
        try:
            if self._shard is None and self._next_number == 0:
                self._shard = self._open_shard(0)
            self._finish_shard()
            files.finish_store(self.folder)
        except OSError as failure:
            self._keep(failure)
            raise

    def _follow(self, parts: list[files.Part]) -> None:
        """Takes form, origin and number of samples from what is there."""
        given = {"vae_stride": list(self._stride)}
        given |= {} if self._origin is None else {"origin": self._origin}
        there = ((str(path), files.form_of(rows, notes)) for path, rows, notes in parts)
        own = files.form_of(pa.table({}), given)
        files.require_alike([("this writer", own), *there], "name another folder or remove it")
        for _, rows, notes in parts:
            self._origin = notes["origin"]
            self.written += len(rows)
            if len(rows):
                self.channels, self.form = rows["channels"][0].as_py(), SampleForm.from_notes(notes)

    def _is_full(self, samples: int, record_bytes: int) -> bool:
        return samples >= self._limits[0] or record_bytes >= self._limits[1]

    def _open_shard(self, number: int) -> ShardWriter:
        shard = ShardWriter(self.folder, number, vae_stride=self._stride, origin=self._origin)
        shard.form = self.form
        return shard

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
                self.written -= shard.written
        files.remove_unfinished(self.folder)
        if files.finished_shards(self.folder):
            mode = "append" if (self.folder / manifests.MANIFEST_NAME).is_file() else "resume"
            error.add_note(
                f"{self.folder}: {self.written} samples are kept, the new ones in "
                f"{files.partial_folder(self.folder)}; StoreWriter with mode={mode!r} goes on "
                "after them"
            )


def require_free(folder: Path, mode: WriterMode = "new") -> None:
    """Checks that a store can be written, and continued where the mode says so.

    Raises:
      InputError: something is in the way, or there is no such mode.
    """
    if mode not in get_args(WriterMode):
        raise InputError(f"mode is {mode!r}; choose one of {', '.join(get_args(WriterMode))}")
    is_store = (folder / manifests.MANIFEST_NAME).is_file()
    moved = {shard.path for shard in files.finished_shards(folder)}  # until a kill
    is_empty = folder.is_dir() and moved.issuperset(folder.iterdir())
    if folder.exists() and not is_empty and not (mode == "append" and is_store):
        raise InputError(f"{folder}: exists already; name another folder or remove it")
    if mode != "new":
        return
    if kept := files.finished_shards(folder):
        samples = sum(len(shard.rows) for shard in kept)
        raise InputError(
            f"{files.partial_folder(folder)}: holds {samples} samples of an interrupted writer; go "
            'on with mode="resume", or remove it'
        )
    if found := files.others(folder):
        raise InputError(
            f"{found[0]}: would be overwritten, because {folder} is first written there; "
            "move it away or name another folder"
        )


_ENCODERS = (manifests.VAE, "text")
"""Names in the origin that must agree."""
_LONGEST_VALUE = 40


def merge_stores(
    sources: Sequence[str | Path], out: str | Path, *, add_names: bool = False
) -> Path:
    """Writes a store with the samples of several, in their order. The sources stay as they are.

    Shards are hard links if both folders are on one file system, copies otherwise.

    Args:
      sources: two data folders or more.
      out: data folder to create. Its origin is that of the sources if they agree; otherwise it
        lists theirs under `merged`, beside the encoders and the frames per second of the videos.
      add_names: begin the paths of samples with the name of their source, as `portraits/clip.mp4`,
        so that `data.weights` can tell the sources apart.

    Returns:
      The path of the new manifest.

    Raises:
      InputError: a source is not a store or is given twice, the sources differ in VAE, stride,
        channels, kind of condition or the frames per second of their videos, or `out` exists.
    """
    out = Path(out)
    stores = [manifests.read_manifest(source) for source in sources]
    if len(stores) < 2:
        raise InputError(f"{len(stores)} stores to merge; give at least two")
    folders = [manifest.folder.resolve() for manifest in stores]
    for number, manifest in enumerate(stores):
        if folders[number] in folders[:number]:
            raise InputError(f"{manifest.folder}: is given twice; leave one out")
    forms = ((str(manifest.folder), _form(manifest)) for manifest in stores)
    files.require_alike(forms, "only stores that agree can be merged")
    require_free(out)
    files.remove_unfinished(out)
    partial = files.partial_folder(out)
    partial.mkdir(parents=True)
    notes = stores[0].notes() | {"origin": _merged_origin(stores), "record_bytes": None}
    try:
        # The folders' names, with as many of the folders above as tell them apart.
        depth = 1
        while len({folder.parts[-depth:] for folder in folders}) < len(folders):
            depth += 1
        names = ["/".join(folder.parts[-depth:]) if add_names else None for folder in folders]
        named = zip(stores, names, strict=True)
        shards = (shard for manifest, name in named for shard in _shards(manifest, name))
        for number, (path, rows) in enumerate(shards):
            try:
                os.link(path, partial / files.shard_name(number))
            except OSError:  # another file system, or one without links
                with replacing(partial / files.shard_name(number)) as unfinished:
                    shutil.copyfile(path, unfinished)
                    files.sync(unfinished)
            shard = pa.array([files.shard_name(number)] * len(rows), pa.string())
            column = rows.column_names.index("shard")
            files.write_sidecar(out, number, rows.set_column(column, "shard", shard), notes)
        return files.finish_store(out)
    except BaseException:
        # It holds only links and copies.
        shutil.rmtree(partial, ignore_errors=True)
        raise


def origin_differences(sources: Mapping[str, Json]) -> list[str]:
    """What the origins of stores disagree about, for people to read.

    It does not keep stores from being merged: `area (480p in a, 720p in b)`.

    Args:
      sources: the origin of each store, by its name.
    """
    origins: dict[str, Json] = {}
    for source, origin in sources.items():
        flat = origins.setdefault(source, {})  # inner values as `media.area`
        for name, value in origin.items():
            is_inner = isinstance(value, dict)
            flat |= {f"{name}.{k}": v for k, v in value.items()} if is_inner else {name: value}
    names = dict.fromkeys(name for origin in origins.values() for name in origin)
    found = []
    for name in names:
        first, *rest = ((origin.get(name), place) for place, origin in origins.items())
        if other := next((one for one in rest if one[0] != first[0]), None):
            words = ", ".join(f"{_words(value)} in {place}" for value, place in (first, other))
            found.append(f"{name} ({words})")
    return found


def _words(value: object) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def _form(manifest: manifests.Manifest) -> Json:
    form = files.form_of(manifests.read_rows(manifest.folder), manifest.notes())
    form |= {f"the origin's {name}": manifest.origin.get(name) for name in _ENCODERS}
    if _has_videos(manifest) and manifest.fps:
        form["fps of its videos"] = manifest.fps
    return form


def _has_videos(manifest: manifests.Manifest) -> bool:
    return bool((manifest.shape[:, 0] > 1).any())


def _merged_origin(stores: list[manifests.Manifest]) -> Json:
    origins = [manifest.origin for manifest in stores]
    if all(origin == origins[0] for origin in origins):
        return origins[0]
    shared = {name: origins[0][name] for name in _ENCODERS if name in origins[0]}
    # Images have no rate; of videos without one the rate is not known.
    timed = [manifest for manifest in stores if _has_videos(manifest)] or stores
    if all(manifest.fps == timed[0].fps for manifest in timed) and timed[0].fps:
        shared[manifests.FPS] = timed[0].origin[manifests.FPS]
    return shared | {"merged": origins}


def _shards(manifest: manifests.Manifest, name: str | None) -> Iterator[tuple[Path, pa.Table]]:
    """Path and rows of each shard, in the manifest's order; samples' paths get the name."""
    rows = manifests.read_rows(manifest.folder)
    if manifests.NUMBER in rows.column_names:  # which are those of this store alone
        rows = rows.drop_columns(manifests.NUMBER)
    if name is not None:
        paths = [None] * len(rows)
        if manifests.PATH in rows.column_names:
            paths = rows[manifests.PATH].to_pylist()
            rows = rows.drop_columns(manifests.PATH)
        column = pa.array([f"{name}/{path}" if path else name for path in paths], pa.string())
        rows = manifests.in_row_schema(rows.append_column(manifests.PATH, column))
    order = np.argsort(manifest.shard, kind="stable")
    names = manifest.shard[order]
    for shard in manifest.shard_bytes:
        begin, end = np.searchsorted(names, shard), np.searchsorted(names, shard, side="right")
        yield manifest.folder / shard, rows.take(order[begin:end])
