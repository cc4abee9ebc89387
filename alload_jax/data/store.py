"""Writes and reads samples: ArrayRecord shards and a Parquet manifest."""

import contextlib
import json
import shutil
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from array_record.python import array_record_module

from alload_jax.data import record as records
from alload_jax.data.manifest import MANIFEST_NAME, METADATA_KEY, SCHEMA, Manifest
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Geometry, Triple


class StoreWriter:
    """Writes a data folder atomically: it appears when the writer closes without an error.

    Use as a context manager:

        with StoreWriter(folder, vae_stride=(4, 8, 8)) as writer:
            writer.add(latents, condition, size=(81, 480, 832))
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vae_stride: Triple,
        origin: dict[str, Any] | None = None,
        samples_per_shard: int = 4096,
    ):
        """Opens a writer.

        Args:
          folder: data folder to create; must be empty or not exist.
          vae_stride: pixels per latent along (frames, height, width); 1, 1, 1 without a VAE.
          origin: provenance of the data, JSON values that the manifest stores.
          samples_per_shard: maximum number of samples per shard.

        Raises:
          InputError: the folder exists already and is not empty.
        """
        self.folder = Path(folder)
        if self.folder.exists() and not (self.folder.is_dir() and not any(self.folder.iterdir())):
            raise InputError(f"{self.folder}: exists already; name another folder or remove it")
        self._geometry = Geometry(vae_stride)
        self._origin = origin or {}
        self._samples_per_shard = samples_per_shard
        self._partial = self.folder.with_name(self.folder.name + ".partial")
        self._rows: list[dict[str, Any]] = []
        self._text_dim: int | None = None
        self._shards: list[Path] = []
        self._writer: Any = None

    def __enter__(self) -> Self:
        self._remove_leftover()
        self._partial.mkdir(parents=True)
        return self

    def _remove_leftover(self) -> None:
        """Removes the files of a killed writer; refuses to remove other files."""
        found = list(self._partial.iterdir()) if self._partial.is_dir() else []
        if others := [path for path in found if path.suffix not in (".arrayrecord", ".parquet")]:
            raise InputError(
                f"{others[0]}: would be overwritten, because {self.folder} is first written there; "
                "move it away or name another folder"
            )
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, latents: np.ndarray, condition: np.ndarray, size: tuple[int, int, int]) -> None:
        """Appends a sample.

        Args:
          latents: [frames, height, width, channels].
          condition: [L] integers, the classes; or [L, width] floats, the text embeddings.
            All samples of a folder have the same kind and width.
          size: (frames, height, width) in pixels.

        Raises:
          ValueError: the shape of the latents does not match `size` and the VAE's stride, or the
            channels or the kind of condition differ from the previous samples.
        """
        expected = self._geometry.latent_grid(*np.asarray(size)[:, None])[0]
        latents = np.asarray(latents)
        channels = self._rows[0]["channels"] if self._rows else latents.shape[-1]
        if latents.shape != (*expected, channels):
            raise ValueError(
                f"latents have shape {latents.shape}; size {size}, vae_stride "
                f"{self._geometry.vae_stride} and the previous samples give "
                f"{(*expected.tolist(), channels)}"
            )
        condition = self._checked_condition(np.asarray(condition))
        if len(self._rows) % self._samples_per_shard == 0:
            self._next_shard()
        name = records.LABELS if self._text_dim is None else records.TEXT
        data = records.encode({records.LATENTS: latents, name: condition})
        self._writer.write(data)
        values = (
            self._shards[-1].name,
            len(self._rows) % self._samples_per_shard,
            *size,
            latents.shape[-1],
            len(condition),
            records.checksum(data),
        )
        self._rows.append(dict(zip(SCHEMA.names, values, strict=True)))

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        try:
            if kind is None:
                self._write_manifest()
                self._partial.rename(self.folder)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _checked_condition(self, condition: np.ndarray) -> np.ndarray:
        """Checks a condition against the first sample's kind; returns classes as int32."""
        shape, dtype = condition.shape, condition.dtype
        if condition.ndim not in (1, 2):
            raise ValueError(
                f"condition has shape {shape}; it must be labels [L] or text [L, width]"
            )
        if condition.ndim == 1 and len(condition) and dtype.kind not in "iu":
            raise ValueError(f"labels are {dtype}; they must be whole numbers")
        if condition.ndim == 2 and not (dtype.kind == "f" or dtype == ml_dtypes.bfloat16):
            raise ValueError(f"text is {dtype}; embeddings must be floats")
        text_dim = shape[1] if condition.ndim == 2 else None
        if self._rows and text_dim != self._text_dim:
            raise ValueError(
                f"condition has shape {shape}; the previous samples have "
                f"{'classes' if self._text_dim is None else f'text of width {self._text_dim}'}"
            )
        self._text_dim = text_dim
        return condition.astype(np.int32) if text_dim is None else condition

    def _next_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._shards.append(self._partial / f"shard-{len(self._shards):05d}.arrayrecord")
        # One record per group: training reads single samples in random order.
        self._writer = array_record_module.ArrayRecordWriter(str(self._shards[-1]), "group_size:1")

    def _write_manifest(self) -> None:
        notes = {
            "vae_stride": list(self._geometry.vae_stride),
            "text_dim": self._text_dim,
            "shard_bytes": {path.name: path.stat().st_size for path in self._shards},
            "origin": self._origin,
        }
        table = pa.Table.from_pylist(self._rows, schema=SCHEMA)
        table = table.replace_schema_metadata({METADATA_KEY: json.dumps(notes).encode()})
        pyarrow.parquet.write_table(table, self._partial / MANIFEST_NAME)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class BadRecordError(ValueError):
    """A record does not match its manifest row."""


class StoreReader:
    """Random access to the samples of a manifest; thread-safe."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self._readers: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the manifest; a worker process opens the shards itself."""
        return {"manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["manifest"])  # type: ignore[misc]

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Reads the arrays of a sample and checks them against the manifest row.

        Raises:
          BadRecordError: the record is missing, damaged or of another shape.
        """
        shard, index = self.manifest.shard[sample], int(self.manifest.index[sample])
        place = f"{self.manifest.path.parent / shard}: record {index} (sample {sample})"
        try:
            with self._lock:
                (data,) = self._reader(shard).read([index])
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise BadRecordError(f"{place} cannot be read ({_first_line(error)})") from error
        if records.checksum(data) != self.manifest.checksum[sample]:
            raise BadRecordError(
                f"{place} has checksum {records.checksum(data)}; "
                f"the manifest says {self.manifest.checksum[sample]}"
            )
        try:
            arrays = records.decode(data)
        except ValueError as error:
            raise BadRecordError(f"{place} cannot be decoded: {error}") from error
        self._check_shapes(arrays, sample, place)
        return arrays

    def close(self) -> None:
        """Closes the shards; a later read opens them again."""
        with self._lock:
            while self._readers:
                _, reader = self._readers.popitem()
                # A damaged shard raises again on close; `read` has reported it already.
                with contextlib.suppress(RuntimeError):
                    reader.close()

    def _reader(self, shard: str) -> Any:
        if shard not in self._readers:
            path = str(self.manifest.path.parent / shard)
            self._readers[shard] = array_record_module.ArrayRecordReader(path)
        return self._readers[shard]

    def _check_shapes(self, arrays: dict[str, np.ndarray], sample: int, place: str) -> None:
        expected: dict[str, tuple[int, ...]] = {
            records.LATENTS: self.manifest.latent_shape(tuple(self.manifest.shape[sample]))
        }
        length, width = int(self.manifest.text_length[sample]), self.manifest.text_dim
        if width is None:
            expected[records.LABELS] = (length,)
        else:
            expected[records.TEXT] = (length, width)
        for name, shape in expected.items():
            found = arrays[name].shape if name in arrays else "nothing"
            if found != shape:
                raise BadRecordError(
                    f"{place} holds {name} of shape {found}; the manifest says {shape}"
                )
