"""Stores of samples: ArrayRecord shards and a Parquet manifest. Writers, readers, merging."""

from alload_jax.data.store.finish import finish_store
from alload_jax.data.store.merge import merge_stores, origin_differences
from alload_jax.data.store.reader import BadRecordError, StoreReader, damaged_records, mean_square
from alload_jax.data.store.shard import ShardWriter
from alload_jax.data.store.shard_files import is_finished
from alload_jax.data.store.writer import StoreWriter

__all__ = [
    "BadRecordError",
    "ShardWriter",
    "StoreReader",
    "StoreWriter",
    "damaged_records",
    "finish_store",
    "is_finished",
    "mean_square",
    "merge_stores",
    "origin_differences",
]
