"""Data sets that a run can generate, selected by name."""

from pathlib import Path
from typing import Any, Protocol

from alload_jax.data.manifest import MANIFEST_NAME, manifest_metadata
from alload_jax.errors import InputError
from alload_jax.files import Json, require_regular
from alload_jax.registry import Registry


class Dataset(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config."""

    def origin(self) -> Json:
        """Returns the provenance that the manifest stores, as JSON values; equal for equal data."""
        ...

    def write(self, folder: str | Path) -> None:
        """Writes the data folder; the same config produces the same samples.

        Raises:
          InputError: the folder exists already.
        """
        ...


DATASETS: Registry[type[Any]] = Registry(
    "data.dataset", {"digits": "alload_jax.data.datasets.digits:Digits"}
)
"""Classes of data sets, each a `Dataset` that can be created without arguments."""


def prepare_dataset(folder: str | Path, dataset: Dataset) -> None:
    """Writes the data folder unless it exists.

    Raises:
      InputError: the folder contains other data.
    """
    path = Path(folder) / MANIFEST_NAME
    require_regular(path, "remove it", or_folder=False)
    if not path.exists():
        print(f"writing {type(dataset).__name__.lower()} to {folder}")
        dataset.write(folder)
    elif manifest_metadata(path).get("origin") != dataset.origin():
        raise InputError(
            f"{folder}: holds data of another data.dataset; name another data.folder, or remove "
            "this one to write it again"
        )
