"""Encodes one sample as bytes, in safetensors format, so that reading never runs code."""

import zlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

LATENTS = "latents"
"""[frames, height, width, channels], the data that the model learns to generate."""
LABELS = "labels"
"""[L] int32, the classes of the sample."""
TEXT = "text"
"""[L, width], text embeddings of the sample, instead of classes."""
GIVEN = "given"
"""[frames, height, width, channels], what an image-to-video model takes beside noisy latents."""
IMAGE = "image"
"""[N, width], embeddings of the given image."""

NAMED = (LATENTS, LABELS, TEXT, GIVEN, IMAGE)
"""Arrays that every model may use. Others are condition tokens [L, width] of further kinds, by the
names of the models' `condition_parts`; further texts of a sample are `text.1` and so on."""

Arrays = Mapping[str, np.ndarray]
"""The arrays of a sample by name."""

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def encode(arrays: dict[str, np.ndarray]) -> bytes:
    """Encodes the arrays of one sample.

    Raises:
      ValueError: an array has a dtype that `decode` does not support.
    """
    known = {np.dtype(dtype) for dtype in _DTYPES.values()}
    native = {}
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("=")
        if dtype not in known:
            raise ValueError(f"{name} is {dtype}; supported are {', '.join(map(str, known))}")
        native[name] = np.asarray(array, dtype, order="C")
    return safetensors.numpy.save(native)


def decode(record: bytes) -> dict[str, np.ndarray]:
    """Decodes the arrays of one sample; unlike safetensors' NumPy reader it supports bfloat16.

    Raises:
      ValueError: the bytes are not a safetensors record, or a dtype is not supported.
    """
    try:
        views = safetensors.deserialize(record)
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors record ({error})") from error
    arrays = {}
    for name, view in views:
        if view["dtype"] not in _DTYPES:
            raise ValueError(
                f"{name} is {view['dtype']}; of the safetensors dtypes, a record may hold "
                f"{', '.join(_DTYPES)}"
            )
        flat = np.frombuffer(view["data"], _DTYPES[view["dtype"]])
        arrays[name] = flat.reshape(view["shape"])
    return arrays


def checksum(record: bytes) -> int:
    """Returns the CRC-32 of a record, which manifests store."""
    return zlib.crc32(record)
