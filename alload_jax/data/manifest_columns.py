"""What manifests record of some samples: the paths of their files, and several captions."""

import numpy as np
import pyarrow.compute

from alload_jax.data.manifest import CAPTIONS, PATH, Manifest, read_columns


def read_paths(manifest: Manifest) -> np.ndarray | None:
    """Reads the path of each sample: [N] str, empty where a sample has none.

    That is the media file's path within the input, or of samples that others wrote the path of the
    file within the folder. None if a store names no paths.

    Raises:
      InputError: the manifest is no Parquet file.
    """
    if not manifest.is_store:
        return manifest.shard
    table = read_columns(manifest.path, ["shard", "index", PATH])
    if PATH not in table.column_names:
        return None
    if len(table) == len(manifest):
        return np.asarray(table[PATH].fill_null("").to_numpy())
    columns = (table[name].to_pylist() for name in ("shard", "index", PATH))
    path_of = {(shard, index): path or "" for shard, index, path in zip(*columns, strict=True)}
    places = zip(manifest.shard.tolist(), manifest.index.tolist(), strict=True)
    return np.asarray([path_of[place] for place in places], object)


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
