"""What a source of samples is, a part of one, and the registry that a config can name."""

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from typing_extensions import override

from alload_jax.data.manifest import Manifest
from alload_jax.planning.epoch import WindowContent
from alload_jax.registry import Registry


class SampleReader(Protocol):
    """Reads samples by number. It is thread-safe, and pickles for the loader's processes.

    Attributes:
      manifest: the samples' sizes, conditions and identity, without their content.
    """

    manifest: Manifest

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Reads a sample: `latents` [t, h, w, C], and `text` [L, width] or `labels` [L].

        Raises:
          BadRecordError: the sample is missing, damaged, or not as the manifest says.
        """

    def of_window(self, window: WindowContent) -> Self:
        """Returns what reads the samples of a window by their numbers in it.

        Raises:
          ValueError: it is no stream.
        """
        raise ValueError(f"{type(self).__name__} is no stream; read it by sample number")


class SampleSource(SampleReader, Protocol):
    """Random access to samples, and what is known of them.

    Attributes:
      stand_ins: rows of the manifest without content, for sizes of which no sample is known yet.
    """

    stand_ins: range = range(0)

    def captions(self, samples: Sequence[int]) -> list[str | None]:
        """Returns the captions of these samples; None where there is none that can be read."""
        return [None] * len(samples)

    def require_settings(self) -> None:
        """Checks that the config says what training must know and the files do not record.

        Raises:
          InputError: a setting is missing.
        """
        return

    def close(self) -> None:
        """Closes files; a later `read` opens them again."""
        return


class SourceConfig(Protocol):
    """A frozen dataclass whose fields are a source's config; `name` is its name in the config."""

    def open(self, folder: str) -> SampleSource:
        """Opens the source.

        Args:
          folder: `data.folder`.

        Raises:
          InputError: the folder does not hold what the source reads.
        """


SOURCES: Registry[type[SourceConfig]] = Registry(
    "data.source",
    {
        "store": "alload_jax.data.sources.opening:Store",
        "parquet": "alload_jax.data.sources.parquet:Parquet",
        "musubi": "alload_jax.data.sources.opening:Musubi",
        "safetensors": "alload_jax.data.sources.opening:SafetensorsFolder",
    },
    method="open",
)
"""Config classes, each a `SourceConfig`. `module:Class` names one outside the package."""


class Subset(SampleSource):
    """Random access to some samples of a source.

    Attributes:
      manifest: their manifest. Messages name a sample by its number in the whole data folder.
    """

    def __init__(self, source: SampleSource, numbers: np.ndarray):
        """Takes the samples of these numbers of `source`, [K] int64."""
        self._source, self._numbers = source, numbers
        self.manifest = source.manifest.subset(numbers)

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        return self._source.read(int(self._numbers[sample]))

    @override
    def captions(self, samples: Sequence[int]) -> list[str | None]:
        return self._source.captions(self._numbers[list(samples)].tolist())

    @override
    def require_settings(self) -> None:
        self._source.require_settings()

    @override
    def close(self) -> None:
        self._source.close()
