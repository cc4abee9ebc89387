"""Data sets that a run makes for itself, found by name."""

from pathlib import Path
from typing import Any, Protocol

from alload_jax.data.manifest import MANIFEST_NAME, manifest_metadata
from alload_jax.errors import InputError
from alload_jax.registry import Registry


class Dataset(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config."""

    def origin(self) -> dict[str, Any]:
        """What the manifest notes about its making, JSON values; equal for equal data."""
        ...

    def write(self, folder: str | Path) -> None:
        """Writes the data folder; the same config gives the same samples.

        Raises:
          InputError: the folder exists already.
        """
        ...


DATASETS: Registry[type[Any]] = Registry(
    "data.dataset", {"digits": "alload_jax.data.datasets.digits:Digits"}
)
"""Classes of data sets, each a `Dataset`, which can be made without arguments."""


def prepare_dataset(folder: str | Path, dataset: Dataset) -> None:
    """Writes the data folder unless it is there already.

    Raises:
      InputError: the folder holds other data.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.exists():
        print(f"making {type(dataset).__name__.lower()} in {folder}")
        dataset.write(folder)
    elif manifest_metadata(path).get("origin") != dataset.origin():
        raise InputError(
            f"{folder}: holds data made with another data.dataset; name another data.folder, or "
            "remove this one to have it made anew"
        )
