"""One sample as bytes: safetensors, so that reading one never runs code."""

import zlib

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

LATENTS = "latents"
"""[frames, height, width, channels], what the model learns to draw."""
LABELS = "labels"
"""[L] int32, the classes that the sample shows."""
TEXT = "text"
"""[L, width] embeddings of the text that describes the sample, in place of classes."""

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
    """The arrays of one sample as bytes.

    Raises:
      ValueError: an array has a dtype that `decode` does not read.
    """
    known = {np.dtype(dtype) for dtype in _DTYPES.values()}
    native = {}
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("=")
        if dtype not in known:
            raise ValueError(f"{name} is {dtype}; a record holds {', '.join(map(str, known))}")
        native[name] = np.asarray(array, dtype, order="C")
    return safetensors.numpy.save(native)


def decode(record: bytes) -> dict[str, np.ndarray]:
    """The arrays of one sample. Unlike safetensors' own NumPy reader this one knows bfloat16.

    Raises:
      ValueError: the bytes are no safetensors record, or one of an unknown dtype.
    """
    try:
        views = safetensors.deserialize(record)
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors record ({error})") from error
    arrays = {}
    for name, view in views:
        if view["dtype"] not in _DTYPES:
            raise ValueError(
                f"{name} is {view['dtype']}; of safetensors' dtypes a record holds "
                f"{', '.join(_DTYPES)}"
            )
        flat = np.frombuffer(view["data"], _DTYPES[view["dtype"]])
        arrays[name] = flat.reshape(view["shape"])
    return arrays


def checksum(record: bytes) -> int:
    """CRC-32 of a record, as manifests hold it."""
    return zlib.crc32(record)
