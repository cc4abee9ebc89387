"""Stores of samples: ArrayRecord shards and a Parquet manifest. Writers, readers, merging."""

from alload_jax.data.store.files import finish_store, is_finished
from alload_jax.data.store.reader import BadRecordError, StoreReader, damaged_records, mean_square
from alload_jax.data.store.shard import ShardWriter
from alload_jax.data.store.writer import StoreWriter, merge_stores, origin_differences

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
