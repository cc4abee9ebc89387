"""Samples of any data source of Grain."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, TEXT, SampleForm
from alload_jax.data.sources import SampleSource
from alload_jax.data.sources.arrays import checked_sample
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.samples import Triple
from alload_jax.processes import waits

_AXES = {LATENTS: 4, TEXT: 2, LABELS: 1, GIVEN: 4, IMAGE: 2}
"""Number of axes of each array."""


class RandomAccess(Protocol):
    """What `grain.sources.RandomAccessDataSource` asks for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...  # a record


@waits("for the data folder to be read")
class GrainSamples(SampleSource):
    """`SampleSource` of the records of a `grain.sources.RandomAccessDataSource`."""

    def __init__(
        self,
        source: RandomAccess,
        geometry: Callable[[int], Triple],
        vae_stride: Triple,
        arrays: Callable[[Any], dict[str, np.ndarray]] | None = None,
        text_length: int | None = None,
        identity: str = "",
        origin: Json | None = None,
    ):
        """Asks for the geometry of every sample, and reads the first one.

        For the loader's processes, all arguments must pickle: functions of modules, no lambdas.

        Args:
          source: the data source.
          geometry: number of a sample → (frames, height, width) in pixels. It is called for every
            sample at the start, so it should not read the sample.
          vae_stride: pixels per latent; (1, 1, 1) without a VAE.
          arrays: record → `latents` [t, h, w, C] floats, and `text` [L, width] floats or `labels`
            [L] integers; None if records are such dicts.
          text_length: most tokens of a sample's condition; None for that of the first sample.
          identity: what distinguishes the content from other content of equal sizes, such as a
            version. A checkpoint is refused for data of another identity.
          origin: provenance; `fps` and `vae` have a meaning.

        Raises:
          InputError: the source is empty, or a size or the first sample is not as it must be.
        """
        self._source, self._arrays = source, arrays
        self._name = type(source).__name__
        if not len(source):
            raise InputError(f"{self._name}: holds no samples; give a source with at least one")
        shape = np.array([geometry(sample) for sample in range(len(source))], np.int64)
        if shape.shape != (len(source), 3) or (shape < 1).any():
            raise InputError(
                f"{self._name}: geometry must give (frames, height, width) of at least 1"
            )
        try:
            first = self._read(0)
        except BadRecordError as error:
            raise InputError(f"{error}; correct the source or its arrays function") from error
        condition = first[TEXT if TEXT in first else LABELS]
        seed = zlib.crc32(repr((self._name, identity)).encode())
        self.manifest = Manifest(
            path=Path(self._name),
            shard=np.full(len(shape), self._name, object),
            index=np.arange(len(shape)),
            shape=shape,
            channels=np.full(len(shape), first[LATENTS].shape[-1], np.int32),
            text_length=np.full(
                len(shape), len(condition) if text_length is None else text_length, np.int32
            ),
            checksum=np.array([zlib.crc32(row.tobytes(), seed) for row in shape], np.uint32),
            vae_stride=vae_stride,
            form=SampleForm.of(first),
            shard_bytes={},
            origin=origin or {},
            tells_content=False,
        )

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        place = f"{self._name}: sample {sample}"
        return checked_sample(self.manifest, sample, self._read(sample), place)

    def _read(self, sample: int) -> dict[str, np.ndarray]:
        place = f"{self._name}: sample {sample}"
        try:
            record = self._source[sample]
            arrays = self._arrays(record) if self._arrays else record
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise BadRecordError(f"{place} cannot be read: {error}") from error
        if not isinstance(arrays, dict) or LATENTS not in arrays or not {TEXT, LABELS} & {*arrays}:
            raise BadRecordError(f"{place} is not a dict with latents, and text or labels")
        found = {name: np.asarray(value) for name, value in arrays.items()}
        for name, axes in _AXES.items():
            if name in found and found[name].ndim != axes:
                raise BadRecordError(
                    f"{place} holds {name} of shape {found[name].shape}; they must have {axes} axes"
                )
        return found
