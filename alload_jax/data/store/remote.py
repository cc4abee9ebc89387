"""A store in object storage: its shards are copied to this host when they are first read.

Copies stay in `$XDG_CACHE_HOME/alload_jax`, by default under `~/.cache`, for later epochs, runs and
other processes of the host.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.fs
from typing_extensions import override

from alload_jax.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from alload_jax.data.record import checksum
from alload_jax.data.store.reader import BadRecordError, StoreReader
from alload_jax.errors import InputError, first_line
from alload_jax.files import replacing

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
          InputError: the address cannot be reached, or holds no complete store.
        """
        self._address, self._renewed = address, set[str]()
        self._place = address.partition("?")[0].rstrip("/")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alload_jax"
        name = self._place.rpartition("/")[2]
        self._copies = cache / f"{name}-{checksum(address.encode()):08x}"
        try:
            self._files, self._root = pyarrow.fs.FileSystem.from_uri(address)
            if manifest is None:
                self._copies.mkdir(parents=True, exist_ok=True)
                self._copy(MANIFEST_NAME)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(
                f"{self._place}: its {MANIFEST_NAME} cannot be read ({first_line(error)}); check "
                "data.folder and the credentials"
            ) from error
        super().__init__(manifest or read_manifest(self._copies, has_shards=False))
        if manifest is None:
            self._check_sizes()

    @override
    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._address, self.manifest)

    def _check_sizes(self) -> None:
        sizes = self.manifest.shard_bytes
        found = self._files.get_file_info([f"{self._root}/{shard}" for shard in sizes])
        for info, (shard, size) in zip(found, sizes.items(), strict=True):
            if info.size != size:
                held = "is missing" if info.size is None else f"has {info.size} bytes"
                raise InputError(
                    f"{self._place}/{shard}: this shard {held} where the manifest says {size} "
                    "bytes; copy it there again"
                )

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
