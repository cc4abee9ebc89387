"""Checks samples and writes one shard of a store; many processes may each write their own."""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import ml_dtypes
import numpy as np
from array_record.python import array_record_module
from typing_extensions import override

from alload_jax.data import manifest
from alload_jax.data import record as records
from alload_jax.data.store import files
from alload_jax.errors import InputError, first_line
from alload_jax.files import Json
from alload_jax.planning.samples import Geometry, Triple

Alternative = (
    tuple[np.ndarray, str | None] | tuple[np.ndarray, str | None, Mapping[str, np.ndarray]]
)
"""A further text of a sample: the condition, the caption in words, and its tokens of further kinds
by name if they differ from those of the first text."""

_MOST_CHANNELS = 48
"""Of the VAEs that are in use; an axis of up to this length may be that of channels."""
_LARGEST_LABEL = 2**31 - 1


class SampleWriter(ABC):
    """Checks samples against their sizes and against those before them, and encodes them.

    Attributes:
      written: number of samples so far.
      channels: channels of the latents; None before the first sample.
      form: what samples hold beside latents; empty before the first sample.
    """

    def __init__(self, vae_stride: Triple, origin: Json | None, where: str = ""):
        """Begins without samples.

        Args:
          vae_stride: pixels per latent along (frames, height, width).
          origin: provenance of the data, as JSON values.
          where: put before the sample's number in messages.

        Raises:
          TypeError: the origin is no dict, or has no form in JSON.
        """
        if not isinstance(origin, dict | None):
            raise TypeError(f"origin is {origin!r}; give a dict of JSON values")
        self.written = 0
        self.channels: int | None = None
        self.form = records.SampleForm()
        self._stride, self._origin = vae_stride, json.loads(json.dumps(origin))
        self._where = where

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
        content: str | None = None,
        weight: float = 1.0,
        dropout: float = 0.0,
        found_captions: Sequence[str] = (),
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
          content: digest of the media file, by which `alload prepare media --update` knows it.
          weight: how often an epoch has the sample; `data.weights` multiplies it.
          dropout: share of the times that it is trained without its text.
          found_captions: captions of the media file, where words were added to them.

        Raises:
          ValueError: the shape of the latents does not match `size` and the VAE's stride, the
            channels or the kind of condition differ from the previous samples, a value is an
            integer, NaN or infinite, a class is negative, a caption or the path is no text, or
            weight or dropout are out of bounds. The sample is left out; the writer can go on.
          OSError: the disk is full.
        """
        if path is not None and not isinstance(path, str):
            raise ValueError(f"path is {path!r}; give text, or None where there is none")
        further = (((*each, {}) if len(each) == 2 else each) for each in alternatives)
        texts = [(condition, caption, parts or {}), *further]
        place = f"{self._where}sample {self.written}"
        for name, value in ((manifest.WEIGHT, weight), (manifest.DROPOUT, dropout)):
            least, most = manifest.BOUNDS[name]
            if not least <= value <= most:
                raise ValueError(f"{place}: {name} is {value}; it must be from {least} to {most}")
        latents = np.asarray(latents)
        self._check_shape(latents, size, place)
        arrays = {records.LATENTS: latents, **_checked_texts(texts, place)}
        arrays |= _checked_image(latents, given, image, place)
        for name, array in arrays.items():
            if not name.startswith(records.LABELS):
                _require_finite(name, array, place)
        form = records.SampleForm.of(arrays)
        if self.channels is not None and form != self.form:
            found, expected = form.described(), self.form.described()
            name = next(name for name in found if found[name] != expected[name])
            raise ValueError(
                f"{place}: {name} is {found[name]}; the previous samples have {expected[name]}"
            )
        self.channels, self.form = arrays[records.LATENTS].shape[-1], form
        frames, height, width = (int(value) for value in size)
        part_lengths = [_longest(arrays, name) for name in records.part_names(arrays)]
        row: Json = {
            "frames": frames,
            "height": height,
            "width": width,
            "channels": self.channels,
            "text_length": _longest(arrays),
            manifest.CAPTION: caption,
            manifest.CAPTIONS: [words for _, words, _ in texts] if len(texts) > 1 else None,
            manifest.FOUND: list(found_captions) or None,
            manifest.PATH: path,
            manifest.PART_LENGTHS: part_lengths or None,
            manifest.CONTENT: content,
            manifest.WEIGHT: None if weight == 1 else weight,
            manifest.DROPOUT: dropout or None,
        }
        self.add_record(records.encode(arrays), row)

    @abstractmethod
    def add_record(self, data: bytes, row: Json) -> None:
        """Appends an encoded sample.

        Args:
          data: the record.
          row: its row of the manifest; shard, index and checksum are filled in.

        Raises:
          OSError: the disk is full, or the file cannot be written.
        """

    def _check_shape(self, latents: np.ndarray, size: Triple, place: str) -> None:
        geometry = Geometry(self._stride)
        grid = tuple(geometry.latent_grid(*np.asarray(size)[:, None])[0].tolist())
        channels = self.channels
        if channels is None:
            channels = latents.shape[-1] if latents.ndim else 0
        if latents.shape != (*grid, channels):
            hint = ""  # for channels that do not stand last
            for axis, order in enumerate(("[channels, frames, …]", "[frames, channels, …]")):
                if latents.ndim != 4 or np.moveaxis(latents, axis, -1).shape[:3] != grid:
                    continue
                most = _MOST_CHANNELS if self.channels is None else self.channels
                if not hint and (self.channels or 0) <= latents.shape[axis] <= most:
                    hint = (
                        f"; they look like {order}, but channels last is wanted: "
                        f"np.moveaxis(latents, {axis}, -1)"
                    )
            raise ValueError(
                f"{place}: latents have shape {latents.shape}; size {size}, vae_stride "
                f"{geometry.vae_stride} and the previous samples give {(*grid, channels)}{hint}"
            )


def _longest(arrays: records.Arrays, name: str | None = None) -> int:
    return max(map(len, records.texts_of(arrays, name)))


def _checked_texts(
    texts: Sequence[tuple[np.ndarray, str | None, Mapping[str, np.ndarray]]], place: str
) -> dict[str, np.ndarray]:
    """The texts of a record by name, classes as int32, each with its tokens of further kinds."""
    for words in (words for _, words, _ in texts if not isinstance(words, str | None)):
        raise ValueError(f"{place}: caption is {words!r}; give text, or None where there is none")
    first, *others = (_checked_condition(np.asarray(text), place) for text, _, _ in texts)
    for other in others:
        if other.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"{place}: one of its texts has shape {other.shape}, the first has {first.shape}; "
                "all must be labels [L], or text of one width"
            )
    parts, *others_parts = (
        {name: np.asarray(array) for name, array in kinds.items()} for _, _, kinds in texts
    )
    for name, array in (item for kinds in (parts, *others_parts) for item in kinds.items()):
        if name in records.NAMED or not name.isidentifier():
            raise ValueError(f"{place}: {name!r} cannot name condition tokens; use another word")
        if array.ndim != 2 or not _is_float(array):
            raise ValueError(
                f"{place}: {name} has shape {array.shape} of {array.dtype}; it must be "
                "[tokens, width] of floats"
            )
        width = parts[name].shape[1] if name in parts else None
        if array.shape[1] != width:
            held = "none" if width is None else f"a width of {width}"
            raise ValueError(
                f"{place}: {name} of one of its texts has a width of {array.shape[1]}, the first "
                f"has {held}; all must be alike"
            )
    arrays = {(records.LABELS if first.ndim == 1 else records.TEXT): first, **parts}
    return records.with_alternatives(arrays, others, others_parts)


def _checked_condition(condition: np.ndarray, place: str) -> np.ndarray:
    """Checks the kind of a condition; returns classes as int32."""
    shape, dtype = condition.shape, condition.dtype
    if condition.ndim not in (1, 2):
        raise ValueError(
            f"{place}: condition has shape {shape}; it must be labels [L] or text [L, width]"
        )
    if condition.ndim == 2:
        return condition
    if len(condition):
        if dtype.kind not in "iu":
            raise ValueError(f"{place}: labels are {dtype}; they must be whole numbers")
        for label in (int(condition.min()), int(condition.max())):
            if not 0 <= label <= _LARGEST_LABEL:
                raise ValueError(
                    f"{place}: a label is {label}; labels are from 0 to {_LARGEST_LABEL}"
                )
    return condition.astype(np.int32)


def _checked_image(
    latents: np.ndarray, given: np.ndarray | None, image: np.ndarray | None, place: str
) -> dict[str, np.ndarray]:
    """Checks the axes of what image-to-video models take; returns what there is of it by name."""
    arrays = {records.GIVEN: given, records.IMAGE: image}
    found = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    for name, array in found.items():
        shape, grid = array.shape, latents.shape[:3]
        if name == records.GIVEN and (len(shape) != 4 or shape[:3] != grid):
            raise ValueError(
                f"{place}: given has shape {shape}; it must be {grid} and channels, as the latents"
            )
        if name == records.IMAGE and len(shape) != 2:
            raise ValueError(f"{place}: image has shape {shape}; it must be [tokens, width]")
    return found


def _is_float(array: np.ndarray) -> bool:
    """Whether an array holds floats, bfloat16 too."""
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16


def _require_finite(name: str, array: np.ndarray, place: str) -> None:
    """Refuses an array that does not hold floats, or of which one is NaN or infinite."""
    if not _is_float(array):
        verb, such = ("are", ", such as x / 127.5 - 1") if name == records.LATENTS else ("is", "")
        raise ValueError(f"{place}: {name} {verb} {array.dtype}; give floats{such}")
    finite = np.asarray(np.isfinite(array))
    if not finite.all():
        first = [int(axis[0]) for axis in np.nonzero(~finite)]
        raise ValueError(
            f"{place}: {name} hold {array[tuple(first)]} at {first} and "
            f"{int((~finite).sum())} values in all that are NaN or infinite; leave the sample out"
        )


class ShardWriter(SampleWriter):
    """Writes a shard of a store. It appears with its sidecar when it is complete, or not at all.

    Shards of one store may be written in any order, by any process. The same samples give the same
    bytes. `finish_store` makes the store of them::

        for number, clips in enumerate(parts):
            if not is_finished(folder, number):
                with ShardWriter(folder, number, vae_stride=(4, 8, 8)) as shard:
                    for latents, condition, size in clips:
                        shard.add(latents, condition, size)
        finish_store(folder, shards=len(parts))

    A shard may hold no samples. They are added by `SampleWriter.add`.

    Attributes:
      written: number of samples so far.
      record_bytes: sum of the sizes of their records.
    """

    def __init__(
        self, folder: str | Path, number: int, *, vae_stride: Triple, origin: Json | None = None
    ):
        """Opens a shard in FOLDER.partial, which is made if it does not exist.

        Args:
          folder: the store; the same for all of its shards.
          number: number of the shard, from 0.
          vae_stride: pixels per latent along (frames, height, width); 1, 1, 1 without a VAE.
          origin: provenance of the data, as JSON values; the same for all shards.

        Raises:
          TypeError: the origin has no form in JSON.
          InputError: the number is negative.
        """
        if number < 0:
            raise InputError(f"{folder}: number of a shard is {number}; it must be 0 or more")
        super().__init__(vae_stride, origin or {}, f"shard {number}: ")
        self.record_bytes = 0
        self._folder, self._number = Path(folder), number
        self._rows: list[Json] = []
        self._path = files.partial_folder(self._folder) / files.shard_name(number)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = self._path.with_name(
            f"{self._path.name}.{secrets.token_hex(4)}.unfinished"
        )
        # One record per group: training reads single samples in random order.
        self._writer = array_record_module.ArrayRecordWriter(str(self._unfinished), "group_size:1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    @override
    def add_record(self, data: bytes, row: Json) -> None:
        self._writer.write(data)
        if not self._writer.ok():
            self._close()
        place = {"shard": self._path.name, "index": self.written}
        self._rows.append(row | place | {"checksum": records.checksum(data)})
        self.written += 1
        self.record_bytes += len(data)

    def finish(self) -> None:
        """Closes the shard and writes its sidecar; a shard of this number is replaced.

        Raises:
          OSError: the disk is full, or the file cannot be written.
        """
        rows = manifest.table_of(self._rows)
        notes = {
            "vae_stride": list(self._stride),
            **(self.form if self._rows else records.SampleForm()).notes(),
            "origin": self._origin,
            "record_bytes": self.record_bytes,
        }
        try:
            self._close()
            there = files.finished_shard(self._folder, self._number)
            # A late writer of equal samples must not disturb those who read the shard by now.
            if there and there.rows.equals(rows) and notes.items() <= there.notes.items():
                return
            # The shard that is replaced must not pass for finished by the old sidecar.
            files.sidecar(self._path.parent, self._number).unlink(missing_ok=True)
            files.sync(self._unfinished)
            self._unfinished.replace(self._path)
            files.write_sidecar(self._folder, self._number, rows, notes)
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
            raise OSError(
                f"{self._path}: cannot be written ({first_line(error)}); is the disk full?"
            ) from None
