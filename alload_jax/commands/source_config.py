"""What commands that look at data need to know of its source."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.sources.source import SourceConfig


def source_config(path: str | None, prog: str) -> SourceConfig | None:
    """Returns `data.source` of a config; None without a config, or if the files say it.

    Args:
      path: a training config.
      prog: name of the command, for messages.

    Raises:
      InputError: the config is not valid.
    """
    if path is None:
        return None
    # Imported here because a training config needs JAX, which takes a second to import.
    from alload_jax.config import read_config

    return read_config(["--config", path], prog=prog).data.source


def holds_samples(place: str) -> bool:
    """Returns whether a path is a data folder, or a Parquet file of latents, and no manifest."""
    if not place.endswith(".parquet"):
        return Path(place).is_dir()
    try:
        names = pyarrow.parquet.read_schema(place).names
    except (pa.ArrowException, OSError):
        return False
    return any(name.endswith("_bytes") for name in names)
