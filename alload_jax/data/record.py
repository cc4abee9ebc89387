"""One sample as bytes: safetensors, so that reading one never runs code."""

import zlib

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

LATENTS = "latents"
"""[frames, height, width, channels], what the model learns to draw."""
LABELS = "labels"
"""[L] int32, the classes that the sample shows."""


def encode(arrays: dict[str, np.ndarray]) -> bytes:
    """The arrays of one sample as bytes."""
    return safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()})


def decode(record: bytes) -> dict[str, np.ndarray]:
    """The arrays of one sample.

    Raises:
      ValueError: the bytes are no safetensors record.
    """
    try:
        return safetensors.numpy.load(record)
    except SafetensorError as error:
        raise ValueError(f"not a safetensors record ({error})") from error


def checksum(record: bytes) -> int:
    """CRC-32 of a record, as manifests hold it."""
    return zlib.crc32(record)
