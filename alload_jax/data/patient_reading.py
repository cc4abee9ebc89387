"""Reads samples again that could not be read, because network storage fails for moments."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.sources.source import SampleSource
from alload_jax.data.store import BadRecordError

WAITS = (0.1, 0.5, 2.0)
"""Seconds before the second and later attempts."""


class PatientReader:
    """A `SampleReader` that tries several times before it reports a sample as damaged.

    A sample that stayed damaged is tried once in later epochs.
    """

    def __init__(self, source: SampleSource, waits: Sequence[float] = WAITS):
        self._source = source
        self._waits = tuple(waits)
        self._damaged: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the source for the loader's processes, without what was found."""
        return {"source": self._source, "waits": self._waits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def manifest(self) -> Manifest:
        """See `SampleReader.manifest`."""
        return self._source.manifest

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Reads a sample; see `SampleReader.read`.

        Raises:
          BadRecordError: no attempt succeeded.
        """
        for wait in () if sample in self._damaged else self._waits:
            try:
                return self._source.read(sample)
            except BadRecordError:
                self._source.close()  # the next attempt opens the files again
                time.sleep(wait)
        try:
            arrays = self._source.read(sample)
        except BadRecordError:
            self._damaged.add(sample)
            raise
        self._damaged.discard(sample)
        return arrays
