"""`--text bytes`: a small, fixed embedding of a caption's bytes, which needs no weights."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import EncoderOptions
from alload_jax.data.splitmix import unit_interval
from alload_jax.errors import InputError

_LONGEST = 2**16


@dataclass(frozen=True)
class ByteText:
    """Gives each UTF-8 byte of a caption a row: its own vector plus that of its place.

    Both vectors are fixed and random: component j of vector v is number v·width + j of the
    SplitMix64 sequence (Steele, Lea and Flood, 2014) from the seed 0 (bytes) or 1 (places), taken
    as uniform with unit variance. The rows have unit variance too. Nothing depends on a library's
    random generator, so that the same caption has the same embedding everywhere.

    Attributes:
      width: components of a row.
      length: most bytes of a caption; the rest is cut off between characters.
    """

    has_weights: ClassVar[bool] = False
    default_length: ClassVar[int] = 256

    width: int = 64
    length: int = 256

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """See `TextEncoder.make`."""
        if not 1 <= options.text_length <= _LONGEST:
            raise InputError(
                f"--text-length is {options.text_length}; it must be from 1 to {_LONGEST}"
            )
        return cls(length=options.text_length)

    def origin(self) -> dict[str, Any]:
        """See `TextEncoder.origin`."""
        return {"name": "bytes", "width": self.width, "length": self.length, "version": 1}

    def encode(self, caption: str | None) -> np.ndarray:
        """See `TextEncoder.encode`; [L, width] float16, L = 0 without a caption."""
        data = (caption or "").encode("utf-8", "replace")[: self.length]
        data = data.decode("utf-8", "ignore").encode()  # without half a character at the end
        values = np.frombuffer(data, np.uint8)
        rows = self._bytes[values] + self._places[: len(values)]
        return (rows / np.sqrt(2.0)).astype(np.float16)

    @cached_property
    def _bytes(self) -> np.ndarray:
        return uniform_vectors(0, 256, self.width)

    @cached_property
    def _places(self) -> np.ndarray:
        return uniform_vectors(1, self.length, self.width)


def uniform_vectors(seed: int, count: int, width: int) -> np.ndarray:
    """[count, width] float64 from −√3 to √3: the first outputs of SplitMix64 from a seed."""
    number = np.arange(1, count * width + 1, dtype=np.uint64)
    unit = unit_interval(number * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed))
    return ((2 * unit - 1) * np.sqrt(3.0)).reshape(count, width)
