"""What a source of samples is, and the registry of sources that a config can name."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.registry import Registry


class SampleReader(Protocol):
    """Reads samples by number. It is thread-safe, and pickles for the loader's processes."""

    @property
    def manifest(self) -> Manifest:
        """The samples' sizes, conditions and identity, without their content."""
        ...

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Reads a sample: `latents` [t, h, w, C], and `text` [L, width] or `labels` [L].

        Raises:
          BadRecordError: the sample is missing, damaged, or not as the manifest says.
        """
        ...


class SampleSource(SampleReader, Protocol):
    """Random access to samples, and what is known of them."""

    def captions(self, samples: Sequence[int]) -> list[str | None]:
        """Returns the captions of these samples; None where there is none that can be read."""
        ...

    def require_settings(self) -> None:
        """Checks that the config says what training must know and the files do not record.

        Raises:
          InputError: a setting is missing.
        """
        ...

    def close(self) -> None:
        """Closes files; a later `read` opens them again."""
        ...


class SourceConfig(Protocol):
    """A frozen dataclass whose fields are a source's config; `name` is its name in the config."""

    def open(self, folder: str) -> SampleSource:
        """Opens the source.

        Args:
          folder: `data.folder`.

        Raises:
          InputError: the folder does not hold what the source reads.
        """
        ...


SOURCES: Registry[type[Any]] = Registry(
    "data.source",
    {
        "store": "alload_jax.data.sources.stores:Store",
        "parquet": "alload_jax.data.sources.parquet:Parquet",
        "musubi": "alload_jax.data.sources.musubi:Musubi",
        "safetensors": "alload_jax.data.sources.safetensors_folder:SafetensorsFolder",
    },
    method="open",
)
"""Config classes, each a `SourceConfig`. `module:Class` names one outside the package."""
