"""The manifest: a Parquet row per sample, beside the shards that hold the samples."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from alload_jax.errors import InputError
from alload_jax.planning.digest import digest
from alload_jax.planning.geometry import Geometry, Triple
from alload_jax.planning.samples import Samples, samples_from_columns

MANIFEST_NAME = "manifest.parquet"
METADATA_KEY = b"alload-manifest"
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


@dataclass(frozen=True)
class Manifest:
    """What is where.

    Attributes:
      path: the Parquet file; shards lie beside it.
      shard: [N] str, file name of each sample's shard.
      index: [N] int64, its place there.
      shape: [N, 3] int64, (frames, height, width) in pixels.
      channels: [N] int32, of its latents.
      text_length: [N] int32, its condition tokens.
      checksum: [N] uint32, CRC-32 of its record.
      vae_stride: pixels per latent of the stored latents.
      text_dim: width of the samples' text embeddings; None where they have classes.
      shard_bytes: size of every shard.
      origin: what the data was made from, as its maker wrote it down.
    """

    path: Path
    shard: np.ndarray
    index: np.ndarray
    shape: np.ndarray
    channels: np.ndarray
    text_length: np.ndarray
    checksum: np.ndarray
    vae_stride: Triple
    text_dim: int | None
    shard_bytes: dict[str, int]
    origin: dict[str, Any]

    def __len__(self) -> int:
        return len(self.index)

    def geometry(self, patch_size: Triple) -> Geometry:
        """How these samples become tokens of a model with that patch size."""
        return Geometry(self.vae_stride, patch_size)

    def samples(self, patch_size: Triple) -> Samples:
        """What planning needs to know."""
        frames, height, width = self.shape.T
        columns = {"frames": frames, "height": height, "width": width}
        return samples_from_columns(columns, self.geometry(patch_size), str(self.path))

    def longest_text(self) -> int:
        """Condition tokens of the sample that has most; 1 where none has any."""
        return max(1, int(self.text_length.max()))

    def digest(self) -> str:
        """The same for the same records in the same order."""
        return digest(self.checksum)

    def require(self, channels: int, patch_size: Triple) -> None:
        """Checks that a model of that patch size can take every sample.

        Raises:
          InputError: a sample has other channels, or a size that the patch does not divide.
        """
        if (wrong := np.flatnonzero(self.channels != channels)).size:
            raise InputError(
                f"{self.path}: sample {wrong[0]} has {self.channels[wrong[0]]} channels, but "
                f"model.in_channels is {channels}; set it to the data's"
            )
        grid = self.geometry(patch_size).latent_grid(*self.shape.T)
        if (wrong := np.flatnonzero((grid % np.asarray(patch_size)).any(axis=1))).size:
            raise InputError(
                f"{self.path}: sample {wrong[0]} has latents of {tuple(grid[wrong[0]].tolist())}, "
                f"which model.patch_size {patch_size} does not divide; choose one that does"
            )

    def latent_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """(frames, height, width, channels) of the latents of a clip of that size in pixels."""
        grid = Geometry(self.vae_stride).latent_grid(*np.asarray(shape)[:, None])[0]
        return (int(grid[0]), int(grid[1]), int(grid[2]), int(self.channels[0]))


def manifest_metadata(path: Path) -> dict[str, Any]:
    """What the writer noted in a manifest's Parquet metadata; empty for a foreign file."""
    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
        notes = json.loads(metadata.get(METADATA_KEY, b"{}"))
    except (pa.ArrowInvalid, OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def read_manifest(folder: str | Path) -> Manifest:
    """Reads the manifest of a data folder and checks that its shards are there and whole.

    Raises:
      InputError: the manifest or a shard is missing, truncated, or not of this format.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise InputError(f"{path}: no such manifest; set data.folder to a prepared data folder")
    try:
        table = pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a Parquet file ({reason}); prepare the data anew") from error
    notes = manifest_metadata(path)
    _check_format(path, table, notes)
    _check_shards(path.parent, notes["shard_bytes"])
    column = {name: table[name].to_numpy() for name in SCHEMA.names}
    return Manifest(
        path=path,
        shard=column["shard"],
        index=column["index"],
        shape=np.stack([column[n] for n in ("frames", "height", "width")], -1).astype(np.int64),
        channels=column["channels"],
        text_length=column["text_length"],
        checksum=column["checksum"],
        vae_stride=tuple(notes["vae_stride"]),
        text_dim=notes.get("text_dim"),
        shard_bytes=notes["shard_bytes"],
        origin=notes["origin"],
    )


def _check_format(path: Path, table: pa.Table, notes: dict[str, Any]) -> None:
    remedy = "write it with alload_jax.data.store.StoreWriter"
    lacking = [name for name in SCHEMA.names if name not in table.column_names]
    lacking += [f"the note {n}" for n in ("vae_stride", "shard_bytes", "origin") if n not in notes]
    if lacking:
        raise InputError(f"{path}: lacks {', '.join(lacking)}; {remedy}")
    if not len(table):
        raise InputError(f"{path}: the manifest has no rows; it needs at least one sample")
    for name in SCHEMA.names:
        found = table.schema.field(name).type
        fits = pa.types.is_string if name == "shard" else pa.types.is_integer
        if not fits(found):
            raise InputError(
                f"{path}: column {name} holds {found}, not {SCHEMA.field(name).type}; {remedy}"
            )


def _check_shards(folder: Path, shard_bytes: dict[str, int]) -> None:
    for name, size in shard_bytes.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: this shard is missing; restore it or prepare the data anew")
        if path.stat().st_size != size:
            raise InputError(
                f"{path}: this shard has {path.stat().st_size} bytes where the manifest says "
                f"{size}; restore it or prepare the data anew"
            )
