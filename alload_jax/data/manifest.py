"""The manifest: a Parquet row per sample, beside the shards that hold the samples."""

import hashlib
import reprlib
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from alload_jax.data.record import SampleForm, pixel_channels
from alload_jax.errors import InputError, first_line, lacks_threads
from alload_jax.files import Json, parse_json, require_regular
from alload_jax.planning.epoch import LEAST_WEIGHT, MOST_WEIGHT
from alload_jax.planning.samples import Geometry, Samples, Triple, digest, samples_from_columns
from alload_jax.processes import waits

MANIFEST_NAME = "manifest.parquet"
METADATA_KEY = b"alload-manifest"
DIGEST_KEY = b"alload-manifest-sha256"
"""Key of what `manifest_digest` returns, in the metadata of the file."""
CAPTION = "caption"
"""Column of texts in words; null where a sample has none. Older manifests lack it."""
VAE, FPS = "vae", "fps"
"""Names in the origin: the VAE of the latents; frames per second of the videos, a number or text
such as 30000/1001."""
SCHEMA = pa.schema(
    {
        "shard": pa.string(),
        "index": pa.int64(),
        "frames": pa.int32(),
        "height": pa.int32(),
        "width": pa.int32(),
        "channels": pa.int32(),
        "text_length": pa.int32(),
        "checksum": pa.uint32(),
    }
)
"""The columns that every manifest has."""
ROW_SCHEMA = SCHEMA.append(pa.field(CAPTION, pa.string()))
"""The columns that are always written."""
CAPTIONS = "captions"
"""Column of all texts in words of samples that have several; null where there is one."""
FOUND = "found_captions"
"""Column of the captions that the media file has; null where these are the sample's texts."""
PATH = "path"
"""Column of the path of the media file within the input of `alload prepare media`."""
PART_LENGTHS = "part_lengths"
"""Column of the number of tokens of each kind that the note `parts` names, sorted by name."""
CONTENT = "content"
"""Column of a digest of the media file's bytes, by which an update knows the file again."""
NUMBER = "number"
"""Column of the sample's number, which stays when others leave; without it, that of the row."""
JOINED = "joined"
"""Column of the checksum that the record had at first; null where it is still the same."""
WEIGHT = "weight"
"""Column of how often an epoch has the sample; null for once."""
DROPOUT = "caption_dropout"
"""Column of the share of the times that the sample is trained without its text; null for none."""
NEXT_NUMBER = "next_number"
"""Note of the number that the next new sample gets; of folders with the column `NUMBER`."""
_OPTIONAL = {
    CAPTIONS: pa.list_(pa.string()),
    FOUND: pa.list_(pa.string()),
    PATH: pa.string(),
    PART_LENGTHS: pa.list_(pa.int32()),
    CONTENT: pa.string(),
    NUMBER: pa.int64(),
    JOINED: pa.uint32(),
    WEIGHT: pa.float64(),
    DROPOUT: pa.float64(),
}
"""Columns that are written where a sample has a value."""
_AGAIN = "prepare the data again"
_LARGEST_SIZE = 2**16
"""Most frames, rows or columns of pixels, channels, and tokens of text of a sample."""


@dataclass(frozen=True)
class Manifest:
    """The samples of a data folder.

    Attributes:
      path: the Parquet file; the shards are in the same folder. The folder itself, or the one
        file, for samples that others wrote.
      shard: [N] str, file name of each sample's shard.
      index: [N] int64, index of the record in its shard.
      shape: [N, 3] int64, (frames, height, width) in pixels.
      channels: [N] int32, number of channels of the latents.
      text_length: [N] int32, number of condition tokens.
      checksum: [N] uint32, CRC-32 of the record.
      vae_stride: pixels per latent of the stored latents.
      form: what the samples hold beside latents.
      shard_bytes: size of each shard in bytes.
      origin: provenance of the data, as given to the writer; `VAE` and `FPS` name parts of it.
      tells_content: whether `checksum` tells samples of other content apart.
      numbers: [N] int64, the samples' rows in the whole data folder; None if these are all.
      ids: [N] int64, the samples' numbers, which stay when the folder changes; None for their rows.
      weight: [N] float64, how often an epoch has each sample; None for once.
      dropout: [N] float64, share of the times that it is trained without text; None for never.
      joined: [N] uint32, `checksum` when the samples joined; None if no caption has changed since.
      part_lengths: [N, K] int32, tokens of each of the form's `parts`; None if it has none.
    """

    path: Path
    shard: np.ndarray
    index: np.ndarray
    shape: np.ndarray
    channels: np.ndarray
    text_length: np.ndarray
    checksum: np.ndarray
    vae_stride: Triple
    form: SampleForm
    shard_bytes: dict[str, int]
    origin: Json
    tells_content: bool = True
    numbers: np.ndarray | None = None
    part_lengths: np.ndarray | None = None
    ids: np.ndarray | None = None
    joined: np.ndarray | None = None
    weight: np.ndarray | None = None
    dropout: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.index)

    def geometry(self, patch_size: Triple) -> Geometry:
        """Returns the geometry that maps samples to tokens for a patch size."""
        return Geometry(self.vae_stride, patch_size)

    def samples(self, patch_size: Triple) -> Samples:
        """Returns the samples as planning needs them."""
        frames, height, width = self.shape.T
        columns = {"frames": frames, "height": height, "width": width}
        samples = samples_from_columns(columns, self.geometry(patch_size), str(self.path))
        return replace(samples, weight=self.weight)

    def subset(self, numbers: np.ndarray) -> "Manifest":
        """Returns the manifest of some samples, in the order of their numbers, [K] int64."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        taken = {name: v[numbers] for name, v in values.items() if isinstance(v, np.ndarray)}
        return replace(self, **{"numbers": numbers} | taken)

    def record_shapes(self, sample: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the arrays of a sample, by name."""
        parts = () if self.part_lengths is None else self.part_lengths[sample].tolist()
        latents = self.latent_shape(tuple(self.shape[sample]))
        return self.form.shapes(latents, int(self.text_length[sample]), parts)

    def number(self, sample: int) -> int:
        """The number that a sample has in the whole data folder."""
        return int(self.sample_numbers[sample])

    @cached_property
    def sample_numbers(self) -> np.ndarray:
        """[N] int64: the number that each sample has in the whole data folder."""
        rows = np.arange(len(self)) if self.numbers is None else self.numbers
        return rows if self.ids is None else self.ids

    @property
    def contents(self) -> np.ndarray:
        """[N] uint32: what a sample keeps when its captions change, to split samples by."""
        return self.checksum if self.joined is None else self.joined

    @property
    def is_store(self) -> bool:
        """Whether alload wrote the samples, with a manifest in a file."""
        return self.path.name == MANIFEST_NAME

    @property
    def folder(self) -> Path:
        """The folder or file that holds the samples."""
        return self.path.parent if self.is_store else self.path

    @property
    def holds_pixels(self) -> bool:
        """Whether samples are grey or colour pictures, not latents of a VAE."""
        return pixel_channels(self.vae_stride, int(self.channels[0])) is not None

    @property
    def fps(self) -> float | None:
        """Frames per second of the videos; None if the origin does not say."""
        return fps_of(self.origin)

    def longest_text(self) -> int:
        """Returns the maximum number of condition tokens of a sample, at least 1."""
        return max(1, int(self.text_length.max()))

    def digest(self) -> str:
        """Returns a digest that is equal for equal records in the same order."""
        return digest(self.checksum)

    def notes(self) -> Json:
        """What the notes say of every sample: `vae_stride`, and those of the form."""
        return {"vae_stride": list(self.vae_stride), **self.form.notes()}

    def identity(self) -> Json:
        """What tells these samples from others, as JSON values: equal for equal content."""
        return {"samples": len(self.checksum), "records": self.digest()}

    def require(self, channels: int, patch_size: Triple) -> None:
        """Checks that a model with these channels and this patch size can take every sample.

        Raises:
          InputError: a sample has other channels, or its size is not a multiple of the patch size.
        """
        if (wrong := np.flatnonzero(self.channels != channels)).size:
            raise InputError(
                f"{self.path}: sample {wrong[0]} has {self.channels[wrong[0]]} channels, but the "
                f"model generates {channels}; set model.in_channels to the channels of the data"
            )
        grid = self.geometry(patch_size).latent_grid(*self.shape.T)
        if (wrong := np.flatnonzero((grid % np.asarray(patch_size)).any(axis=1))).size:
            raise InputError(
                f"{self.path}: sample {wrong[0]} has latents of {tuple(grid[wrong[0]].tolist())}, "
                f"which model.patch_size {patch_size} does not divide; choose one that does"
            )

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Returns (frames, height, width, channels) of the latents of a clip of `shape` pixels."""
        grid = Geometry(self.vae_stride).latent_grid(*np.asarray(shape)[:, None])[0]
        return (int(grid[0]), int(grid[1]), int(grid[2]), int(self.channels[0]))


def fps_of(origin: Json) -> float | None:
    """Frames per second of the videos of an origin; None if it does not say."""
    try:
        value = float(Fraction(str(origin.get(FPS))))
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None


@waits("for the manifest to be read")
def manifest_metadata(path: Path) -> Json:
    """Returns the writer's notes from a manifest's Parquet metadata; empty for other files.

    Raises:
      InputError: the notes, or the names and types of the columns, are not as they were written.
    """
    require_regular(path, _AGAIN)
    try:
        file = pyarrow.parquet.read_metadata(path)
        schema = file.schema.to_arrow_schema()
        metadata = schema.metadata or {}
        written = metadata.get(METADATA_KEY, b"{}")
        notes = parse_json(written, str(path), "")
    except (pa.ArrowInvalid, OSError, ValueError):
        return {}
    digest_then = metadata.get(DIGEST_KEY)  # older manifests have none
    if digest_then not in (None, manifest_digest(schema, file.num_rows, written)):
        raise InputError(
            f"{path}: its notes are damaged: they differ from their SHA-256; restore the file, or "
            f"{_AGAIN}"
        )
    return notes if isinstance(notes, dict) else {}


def manifest_digest(schema: pa.Schema, rows: int, notes: bytes) -> bytes:
    """SHA-256 of what a manifest's pages, which have checksums of their own, do not hold."""
    # Parquet calls the items of a list elements.
    columns = [(field.name, str(field.type).replace("element: ", "item: ")) for field in schema]
    return hashlib.sha256(repr((columns, rows, notes)).encode()).hexdigest().encode()


@waits("for the manifest to be read")
def read_manifest(folder: str | Path, has_shards: bool = True) -> Manifest:
    """Reads the manifest of a data folder and checks that its shards exist and are complete.

    Args:
      folder: the data folder.
      has_shards: whether the folder holds them; else only their names are checked.

    Raises:
      InputError: the manifest or a shard is missing, truncated or in another format.
    """
    path = Path(folder) / MANIFEST_NAME
    require_regular(path, _AGAIN, or_folder=False)
    if Path(folder).is_file():
        raise InputError(f"{folder}: is a file; set data.folder to its folder")
    if not path.is_file():
        raise InputError(f"{path}: no such manifest; set data.folder to a prepared data folder")
    table = read_columns(path, [*SCHEMA.names, PART_LENGTHS, NUMBER, JOINED, WEIGHT, DROPOUT])
    notes = manifest_metadata(path)
    _check_format(path, table, notes)
    _check_notes(path, notes)
    column = {name: _numbers(path, table, name) for name in SCHEMA.names if name in BOUNDS}
    _check_shards(path, table, notes["shard_bytes"], has_shards)
    form, ids = SampleForm.from_notes(notes), _numbers(path, table, NUMBER)
    if ids is not None and len(np.unique(ids)) < len(ids):
        raise InputError(
            f"{path}: column {NUMBER} is not a number of its own in each row; {_AGAIN}"
        )
    return Manifest(
        path=path,
        shard=table["shard"].to_numpy(),
        index=column["index"],
        shape=np.stack([column[n] for n in ("frames", "height", "width")], -1).astype(np.int64),
        channels=column["channels"],
        text_length=column["text_length"],
        checksum=column["checksum"],
        vae_stride=tuple(notes["vae_stride"]),
        form=form,
        shard_bytes=notes["shard_bytes"],
        origin=notes["origin"],
        part_lengths=_part_lengths(path, table, len(form.parts)),
        ids=None if ids is None else ids.astype(np.int64),
        joined=_numbers(path, table, JOINED, pa.array(column["checksum"])),
        weight=_numbers(path, table, WEIGHT, pa.scalar(1.0)),
        dropout=_numbers(path, table, DROPOUT, pa.scalar(0.0)),
    )


_SIZES, _ROWS, _CHECKSUMS = (1, _LARGEST_SIZE), (0, 2**63 - 1), (0, 2**32 - 1)
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("frames", "height", "width", "channels"), _SIZES),
    **dict.fromkeys(("index", NUMBER), _ROWS),
    **dict.fromkeys(("checksum", JOINED), _CHECKSUMS),
    "text_length": (0, _LARGEST_SIZE),
    WEIGHT: (LEAST_WEIGHT, MOST_WEIGHT),
    DROPOUT: (0, 1),
}
"""Least and most value of each column of numbers."""


def _numbers(path: Path, table: pa.Table, name: str, usual: Any = None) -> Any:
    """[N] values of a column within its bounds, with the usual one where a row has none.

    None if there is no such column.
    """
    if name not in table.column_names:
        return None
    if not (pa.types.is_integer(kind := table[name].type) or pa.types.is_floating(kind)):
        raise InputError(f"{path}: column {name} holds {kind}, not numbers; {_AGAIN}")
    column = table[name] if usual is None else pyarrow.compute.coalesce(table[name], usual)
    values, (least, most) = np.asarray(column.to_numpy()), BOUNDS[name]
    wrong = np.flatnonzero(~((values >= least) & (values <= most)))
    if wrong.size:
        raise InputError(
            f"{path}: row {wrong[0]} has {name} {values[wrong[0]]}; it must be from {least:,} to "
            f"{most:,}, {_AGAIN}"
        )
    return values


def _part_lengths(path: Path, table: pa.Table, parts: int) -> np.ndarray | None:
    """[N, parts] tokens of further kinds; None if there are none."""
    if not parts:
        return None
    rows = table[PART_LENGTHS].to_pylist() if PART_LENGTHS in table.column_names else []
    fits = len(rows) == len(table) and all(
        row is not None and len(row) == parts and all(0 <= size <= _LARGEST_SIZE for size in row)
        for row in rows
    )
    if not fits:
        raise InputError(
            f"{path}: column {PART_LENGTHS} does not hold {parts} lengths in each row, one for "
            f"each name in the note parts; {_AGAIN}"
        )
    return np.asarray(rows, np.int32)


def row_schema(names: Collection[str]) -> pa.Schema:
    """The columns of rows of which some have values under these names."""
    fields = [pa.field(name, kind) for name, kind in _OPTIONAL.items() if name in names]
    return pa.schema([*ROW_SCHEMA, *fields])


def table_of(rows: list[Json]) -> pa.Table:
    """Rows as a table, with the columns in which one has a value."""
    held = {name for row in rows for name, value in row.items() if value is not None}
    return pa.Table.from_pylist(rows, schema=row_schema(held))


def in_row_schema(table: pa.Table) -> pa.Table:
    """The rows with the columns that are written, in their order and types."""
    if CAPTION not in table.column_names:
        table = table.append_column(CAPTION, pa.nulls(len(table), pa.string()))
    schema = row_schema(table.column_names)
    return table.select(schema.names).cast(schema)


@waits("for the manifest to be read")
def read_captions(folder: str | Path) -> list[str | None]:
    """Reads the caption of each sample of a data folder; None where it has none.

    Raises:
      InputError: the manifest is no Parquet file.
    """
    table = read_columns(Path(folder) / MANIFEST_NAME, ["index", CAPTION])
    if CAPTION not in table.column_names:
        return [None] * len(table)
    return table[CAPTION].to_pylist()


@waits("for the manifest to be read")
def read_rows(folder: str | Path) -> pa.Table:
    """Reads the rows of a data folder's manifest in a `row_schema`.

    Raises:
      InputError: the manifest is missing, damaged or in another format.
    """
    path = Path(folder) / MANIFEST_NAME
    table = read_columns(path, row_schema(_OPTIONAL).names)
    _check_format(path, table, manifest_metadata(path), may_be_empty=True)
    return in_row_schema(table)


@waits("for the manifest to be read")
def read_columns(path: Path, names: list[str]) -> pa.Table:
    """Reads those of the columns of a manifest that the file has.

    Raises:
      InputError: it is no Parquet file, or it is damaged.
    """
    require_regular(path, _AGAIN)
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            found = [name for name in names if name in file.schema_arrow.names]
            table, rows = file.read(columns=found), file.metadata.num_rows
        table.validate(full=True)  # a flipped bit can make text that is no UTF-8
        if len(table) != rows:
            raise OSError(f"{len(table)} rows of {rows}")
        return table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if lacks_threads(error):  # which says nothing of the file
            raise
        raise InputError(f"{path}: not a Parquet file ({first_line(error)}); {_AGAIN}") from error


def _check_format(path: Path, table: pa.Table, notes: Json, may_be_empty: bool = False) -> None:
    remedy = "write it with alload_jax.data.store.StoreWriter"
    lacking = [name for name in SCHEMA.names if name not in table.column_names]
    lacking += [f"the note {n}" for n in ("vae_stride", "shard_bytes", "origin") if n not in notes]
    if lacking:
        raise InputError(f"{path}: lacks {', '.join(lacking)}; {remedy}")
    if not len(table) and not may_be_empty:
        raise InputError(f"{path}: the manifest has no rows; it needs at least one sample")
    for name in SCHEMA.names:
        if table[name].null_count:
            raise InputError(f"{path}: column {name} has rows without a value; {remedy}")
        found = table.schema.field(name).type
        fits = pa.types.is_string if name == "shard" else pa.types.is_integer
        if not fits(found):
            raise InputError(
                f"{path}: column {name} holds {found}, not {SCHEMA.field(name).type}; {remedy}"
            )


def _check_notes(path: Path, notes: Json) -> None:
    """Refuses notes of other types than the writer's, and sizes that no sample has."""

    def sizes(value: object, count: int) -> bool:
        return isinstance(value, list) and len(value) == count and all(map(_is_size, value))

    text, given, image = map(notes.get, ("text_dim", "given_channels", "image_shape"))
    shards, parts = notes["shard_bytes"], notes.get("parts", {})
    fits = {
        "vae_stride": sizes(notes["vae_stride"], 3),
        "shard_bytes": isinstance(shards, dict) and {*map(type, shards.values())} <= {int},
        "origin": isinstance(notes["origin"], dict),
        "text_dim": text is None or _is_size(text),
        "given_channels": not given or _is_size(given),
        "image_shape": not image or sizes(image, 2),
        "parts": isinstance(parts, dict) and all(map(_is_size, parts.values())),
    }
    for name in (name for name, good in fits.items() if not good):
        raise InputError(
            f"{path}: its note {name} is {reprlib.repr(notes[name])}, which no writer of this "
            f"project writes; {_AGAIN}"
        )


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST_SIZE


def _check_shards(
    path: Path, table: pa.Table, shard_bytes: dict[str, int], has_shards: bool
) -> None:
    """Refuses shards that are no files of the folder itself, or not as the notes say."""
    for name in (*shard_bytes, *table["shard"].unique().to_pylist()):
        if name in ("", "..") or Path(name).name != name or "\0" in name:
            raise InputError(
                f"{path}: shard {name!r} is not the name of a file beside the manifest; {_AGAIN}"
            )
        if name not in shard_bytes:
            raise InputError(f"{path}: its note shard_bytes lacks the shard {name!r}; {_AGAIN}")
    for name, size in shard_bytes.items() if has_shards else ():
        shard = path.with_name(name)
        require_regular(shard, _AGAIN, or_folder=False)
        if not shard.is_file():
            raise InputError(f"{shard}: this shard is missing; restore it or {_AGAIN}")
        if (held := shard.stat().st_size) != size:
            size_now = f"has {held} bytes where the manifest says {size}"
            raise InputError(f"{shard}: this shard {size_now}; restore it or {_AGAIN}")


@waits("for the manifest to be read")
def read_paths(manifest: Manifest) -> np.ndarray | None:
    """Reads the path of each sample: [N] str, empty where a sample has none.

    That is the media file's path within the input, or of samples that others wrote the path of the
    file within the folder. None if a store names no paths.

    Raises:
      InputError: the manifest is no Parquet file.
    """
    if not manifest.is_store:
        return manifest.shard
    table = read_columns(manifest.path, ["index", PATH])
    if PATH not in table.column_names:
        return None
    paths = np.asarray(table[PATH].fill_null("").to_numpy())
    # Samples that were appended meanwhile come last.
    return paths[: len(manifest)] if manifest.numbers is None else paths[manifest.numbers]


def caption_counts(manifest: Manifest) -> np.ndarray:
    """Reads how many texts each sample has: [N] int64, 1 for samples that others wrote."""
    ones = np.ones(len(manifest), np.int64)
    if not manifest.is_store:
        return ones
    table = read_columns(manifest.path, ["index", CAPTIONS])
    if CAPTIONS not in table.column_names:
        return ones
    counts = pyarrow.compute.list_value_length(table[CAPTIONS]).fill_null(1)
    return counts.to_numpy().astype(np.int64)
