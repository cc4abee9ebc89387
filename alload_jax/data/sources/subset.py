"""Some of the samples of a source, as a source of their own."""

from collections.abc import Sequence

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.sources.source import SampleSource


class Subset:
    """Random access to some samples of a source; a `SampleSource`.

    Attributes:
      manifest: their manifest. Messages name a sample by its number in the whole data folder.
    """

    def __init__(self, source: SampleSource, numbers: np.ndarray):
        """Takes the samples of these numbers of `source`, [K] int64."""
        self._source, self._numbers = source, numbers
        self.manifest: Manifest = source.manifest.subset(numbers)

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """See `SampleReader.read`."""
        return self._source.read(int(self._numbers[sample]))

    def captions(self, samples: Sequence[int]) -> list[str | None]:
        """See `SampleSource.captions`."""
        return self._source.captions([int(self._numbers[sample]) for sample in samples])

    def require_settings(self) -> None:
        """See `SampleSource.require_settings`."""
        self._source.require_settings()

    def close(self) -> None:
        """See `SampleSource.close`."""
        self._source.close()
