"""Reads samples of a store and checks them against the manifest.

Shards of a store in object storage are copied to this host when they are first read. Copies stay in
`$XDG_CACHE_HOME/alload_jax`, by default under `~/.cache`, for later epochs, runs and other
processes of the host.
"""

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.fs
from array_record.python import array_record_module
from typing_extensions import override

from alload_jax.data import record as records
from alload_jax.data.manifest import MANIFEST_NAME, Manifest, read_captions, read_manifest
from alload_jax.data.sources import SampleReader, SampleSource
from alload_jax.errors import InputError, first_line, one_line
from alload_jax.files import replacing
from alload_jax.processes import most_open_files, waits

_RESTORE = "restore it or prepare the data again"
_THREADS = 16  # opening waits for the file system
_SCALE_SAMPLES = 32
"""Samples by which the scale of latents is judged."""


class BadRecordError(ValueError):
    """A record does not match its manifest row."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


@waits("for the data folder to be read")
class StoreReader(SampleSource):
    """Random access to the samples of a manifest; thread-safe."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self._readers: dict[str, array_record_module.ArrayRecordReader] = {}
        self._lock = threading.Lock()
        # A set has several folders, and a run opens other files as well.
        self._most_open = max(1, most_open_files() // 8)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Pickles only the manifest; a worker process opens the shards itself."""
        return type(self), (self.manifest,)

    def path(self, shard: str) -> Path:
        """Returns where a shard can be read."""
        return self.manifest.folder / shard

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Reads the arrays of a sample and checks them against the manifest row.

        Raises:
          BadRecordError: the record is missing, damaged, of another shape or not finite.
        """
        shard, index = self.manifest.shard[sample], int(self.manifest.index[sample])
        place = f"{self.manifest.folder / shard}: record {index} (sample {sample})"
        try:
            path = str(self.path(shard))
            with self._lock:
                if shard not in self._readers:
                    if len(self._readers) == self._most_open:
                        self._close_oldest()
                    self._readers[shard] = array_record_module.ArrayRecordReader(path)
                (data,) = self._readers[shard].read([index])
        except (IndexError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise BadRecordError(f"{place} cannot be read ({first_line(error)})") from error
        if records.checksum(data) != self.manifest.checksum[sample]:
            raise BadRecordError(
                f"{place} has checksum {records.checksum(data)}; "
                f"the manifest says {self.manifest.checksum[sample]}"
            )
        try:
            arrays = records.decode(data)
        except ValueError as error:
            raise BadRecordError(f"{place} cannot be decoded: {error}") from error
        for name, shape in self.manifest.record_shapes(sample).items():
            held = [arrays[name]] if name in arrays else []
            if held and name not in (records.LATENTS, records.GIVEN, records.IMAGE):
                # Of several texts, the manifest has the length of the longest.
                held = sorted(records.texts_of(arrays, name), key=len, reverse=True)
            found = held[0].shape if held else "nothing"
            if found != shape or any(other.shape[1:] != shape[1:] for other in held):
                raise BadRecordError(
                    f"{place} holds {name} of shape {found}; the manifest says {shape}"
                )
            if not all(np.isfinite(array).all() for array in held):
                raise BadRecordError(f"{place} holds {name} with NaN or infinite values")
        return arrays

    @override
    def captions(self, samples: Sequence[int]) -> list[str | None]:
        captions = read_captions(self.manifest.folder)
        return [captions[sample] for sample in samples]

    def require_shards(self, spared: int = 0, excluded: Collection[int] = ()) -> None:
        """Opens every shard.

        Args:
          spared: number of records that may be damaged; a shard of so few is not opened.
          excluded: samples that are not read.

        Raises:
          InputError: a shard is destroyed, so that none of its records can be found, or has not
            all that the manifest names.
        """
        read = np.delete(np.arange(len(self.manifest)), sorted(excluded))
        names, numbers, counts = np.unique(
            self.manifest.shard[read].astype(str), return_inverse=True, return_counts=True
        )
        indices = np.split(self.manifest.index[read][np.argsort(numbers)], np.cumsum(counts)[:-1])

        def check(shard: tuple[str, np.ndarray]) -> None:
            name, named = shard
            path = self.manifest.folder / name
            try:
                reader = array_record_module.ArrayRecordReader(str(path))
                held = reader.num_records()
            except (RuntimeError, ValueError) as error:
                raise InputError(
                    f"{path}: cannot be opened ({first_line(error)}); {_RESTORE}"
                ) from error
            # A damaged shard raises again on close.
            with contextlib.suppress(RuntimeError):
                reader.close()
            if not held:
                raise InputError(
                    f"{path}: this shard is destroyed, no record can be found; {_RESTORE}"
                )
            if np.count_nonzero(named >= held) > spared:
                raise InputError(
                    f"{path}: holds {held} records, and the manifest names record {named.max()}; "
                    f"{_RESTORE}"
                )

        each = zip(names.tolist(), indices, strict=True)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(check, [shard for shard in each if len(shard[1]) > spared]))

    @override
    def close(self) -> None:
        with self._lock:
            while self._readers:
                self._close_oldest()

    def _close_oldest(self) -> None:
        reader = self._readers.pop(next(iter(self._readers)))
        # A damaged shard raises again on close; `read` has reported it already.
        with contextlib.suppress(RuntimeError):
            reader.close()


_BLOCK = 2**22


def is_address(folder: str) -> bool:
    """Whether a folder is one of object storage, such as s3://bucket/folder."""
    return "://" in folder


class RemoteStore(StoreReader):
    """`StoreReader` of a folder that PyArrow can reach by an address: s3://, gs:// and others."""

    def __init__(self, address: str, manifest: Manifest | None = None):
        """Copies the manifest, and checks that the shards are there and complete.

        Args:
          address: as `pyarrow.fs.FileSystem.from_uri` takes it, such as s3://bucket/folder. Options
            such as the server follow behind a question mark.
          manifest: what another process has copied and checked.

        Raises:
          InputError: the address cannot be reached or holds no complete store, or there is no
            folder for copies.
        """
        self._address, self._renewed = address, set[str]()
        self._place = address.partition("?")[0].rstrip("/")
        name = self._place.rpartition("/")[2]
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alload_jax"
            self._copies = cache / f"{name}-{records.checksum(address.encode()):08x}"
            self._copies.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # without a home, or in a read-only one
            raise InputError(
                f"{self._place}: its copies have no folder ({first_line(error)}); set the "
                "environment variable XDG_CACHE_HOME to one"
            ) from error
        try:
            self._files, self._root = pyarrow.fs.FileSystem.from_uri(address)
            if manifest is None:
                self._copy(MANIFEST_NAME)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(
                f"{self._place}: its {MANIFEST_NAME} cannot be read ({first_line(error)}); check "
                "data.folder and the credentials"
            ) from error
        super().__init__(manifest or read_manifest(self._copies, has_shards=False))
        sizes = self.manifest.shard_bytes if manifest is None else {}
        found = self._files.get_file_info([f"{self._root}/{shard}" for shard in sizes])
        for info, (shard, size) in zip(found, sizes.items(), strict=True):
            if info.size != size:
                held = "is missing" if info.size is None else f"has {info.size} bytes"
                raise InputError(
                    f"{self._place}/{shard}: this shard {held} where the manifest says {size} "
                    "bytes; copy it there again"
                )

    @override
    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._address, self.manifest)

    @override
    def path(self, shard: str) -> Path:
        """The copy of a shard, made if there is none.

        Raises:
          OSError: it cannot be copied.
        """
        path = self._copies / shard
        if not path.is_file() or path.stat().st_size != self.manifest.shard_bytes[shard]:
            self._copy(shard)
        return path

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        try:
            return super().read(sample)
        except BadRecordError:
            # The copy may be damaged, or of an older shard: the next attempt makes a new one.
            shard = self.manifest.shard[sample]
            if shard not in self._renewed:
                self._renewed.add(shard)
                (self._copies / shard).unlink(missing_ok=True)
            raise

    @override
    def require_shards(self, spared: int = 0, excluded: Collection[int] = ()) -> None:
        """Does nothing: their sizes are known to be right, and they are not copied yet."""

    def _copy(self, name: str) -> None:
        with (
            self._files.open_input_stream(f"{self._root}/{name}", buffer_size=0) as source,
            replacing(self._copies / name) as unfinished,
            unfinished.open("wb") as file,
        ):
            while block := source.read(_BLOCK):
                file.write(block)


@waits("for the data folder to be read")
def damaged_records(source: SampleSource) -> Iterator[str]:
    """Reads every sample of a source; yields a line for each one that is damaged."""
    for sample in range(len(source.manifest)):
        if sample in source.stand_ins:
            continue
        try:
            source.read(sample)
        except BadRecordError as error:
            yield str(error)
    source.close()


@waits("for the data folder to be read")
def mean_square(reader: SampleReader) -> float | None:
    """The mean square of a usual sample's latents; None if none of some can be read."""
    count = len(reader.manifest)
    numbers = np.unique(np.linspace(0, count - 1, min(count, _SCALE_SAMPLES)).astype(int))
    found = []
    for sample in numbers.tolist():
        try:
            latents = reader.read(sample)["latents"]
        except BadRecordError:
            continue  # training reports it where its turn comes
        found.append(float(np.mean(np.square(latents, dtype=np.float64))))
    return float(np.median(found)) if found else None
