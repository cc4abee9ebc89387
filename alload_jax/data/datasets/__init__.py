"""Data sets that a run can generate, selected by name."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from alload_jax.data.manifest import MANIFEST_NAME, manifest_metadata
from alload_jax.errors import InputError
from alload_jax.files import Json, require_regular
from alload_jax.processes import waits
from alload_jax.registry import Registry


class Dataset(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config."""

    def origin(self) -> Json:
        """Returns the provenance that the manifest stores, as JSON values; equal for equal data."""

    def write(self, folder: str | Path) -> None:
        """Writes the data folder; the same config produces the same samples.

        Raises:
          InputError: the folder exists already.
        """


DATASETS: Registry[type[Any]] = Registry(
    "data.dataset", {"digits": "alload_jax.data.datasets.digits:Digits"}
)
"""Classes of data sets, each a `Dataset` that can be created without arguments."""


def prepare_dataset(folder: str | Path, dataset: Dataset) -> None:
    """Writes the data folder unless it exists; of runs that begin together, one writes.

    Raises:
      InputError: the folder contains other data.
    """
    path = Path(folder) / MANIFEST_NAME
    require_regular(path, "remove it", or_folder=False)
    if not path.exists():
        with _turn(path.parent.parent):
            if not path.exists():
                print(f"writing {type(dataset).__name__.lower()} to {folder}")
                dataset.write(folder)
                return
    found, wanted = manifest_metadata(path).get("origin"), dataset.origin()
    if found != wanted:
        made = isinstance(found, dict) and found.keys() == wanted.keys()  # by other settings
        remedy = "remove this one to write it again" if made else "leave data.dataset out"
        raise InputError(
            f"{folder}: holds data of another data.dataset, or of none; name another data.folder, "
            f"or {remedy}"
        )


@contextmanager
@waits("for another run to write its data set")
def _turn(folder: Path) -> Iterator[None]:
    """Waits until no other process writes a data set in the folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
