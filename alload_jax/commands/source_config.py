"""What commands that look at data need to know of its source."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from alload_jax.config_files import read_yaml
from alload_jax.config_parser import build_named
from alload_jax.data.sources.source import SOURCES, SourceConfig
from alload_jax.files import require_regular


def source_config(path: str | None, prog: str) -> SourceConfig | None:
    """Returns `data.source` of a config; None without a config, or if the files say it.

    Args:
      path: a training config, of which only this section is read.
      prog: name of the command, for messages.

    Raises:
      InputError: the config is not valid.
    """
    if path is None:
        return None
    section = read_yaml(path).get("data")
    named = section.get("source") if isinstance(section, dict) else None
    if named is None:
        return None
    found: SourceConfig = build_named(f"{prog}: {path}: data.source", named, SOURCES)
    return found


def holds_samples(place: str) -> bool:
    """Returns whether a path is a data folder, or a Parquet file of latents, and no manifest."""
    if not place.endswith(".parquet"):
        return Path(place).is_dir()
    require_regular(place)
    try:
        names = pyarrow.parquet.read_schema(place).names
    except (pa.ArrowException, OSError):
        return False
    return any(name.endswith("_bytes") for name in names)
