"""Stores, which alload writes."""

from dataclasses import dataclass
from typing import Literal

from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader


@dataclass(frozen=True)
class Store:
    """A data folder with manifest.parquet and shards; see `SourceConfig`.

    Attributes:
      name: `store`.
    """

    name: Literal["store"] = "store"

    def open(self, folder: str) -> StoreReader:
        """See `SourceConfig.open`.

        Raises:
          InputError: the manifest or a shard is missing, truncated or in another format.
        """
        return StoreReader(read_manifest(folder))
