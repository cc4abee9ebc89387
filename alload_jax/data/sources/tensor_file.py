"""Reads the header and single tensors of a safetensors file, without mapping it into memory.

A mapped file that another program truncates ends the process; reading it is an error of one sample.
"""

import math
import os
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from alload_jax.files import parse_json

_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library
_PROBE = 4096

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class TensorInfo(NamedTuple):
    """Place of a tensor in a file.

    Attributes:
      dtype: dtype as safetensors names it.
      shape: shape of the tensor.
      begin, end: offsets of its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """What the header of a file says.

    Attributes:
      tensors: the tensors by name.
      metadata: texts by name.
      bytes: size of the file.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    bytes: int


def read_header(path: Path) -> Header:
    """Reads a header and checks it against the size of the file.

    Raises:
      ValueError: the file is not a complete safetensors file.
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return _header(file)


def read_tensors(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Reads tensors by name.

    Raises:
      ValueError: the file is damaged, lacks a tensor, or a dtype is not supported.
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        tensors = _header(file).tensors
        return {name: _tensor(file, name, tensors) for name in names}


def content_mark(path: Path, tensors: list[TensorInfo]) -> int:
    """Returns a CRC-32 of dtypes, shapes, and the first and last 4 KiB of tensors of a file.

    Raises:
      OSError: the file cannot be read.
    """
    mark = 0
    with path.open("rb") as file:
        for info in tensors:
            mark = zlib.crc32(repr((info.dtype, info.shape)).encode(), mark)
            for begin in (info.begin, max(info.begin, info.end - _PROBE)):
                file.seek(begin)
                mark = zlib.crc32(file.read(min(_PROBE, info.end - begin)), mark)
    return mark


def _header(file: IO[bytes]) -> Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER):
        raise ValueError("it is empty or truncated, or not a safetensors file")
    try:
        content = parse_json(file.read(length), "the header", "")
        metadata = content.pop("__metadata__", {})
        tensors = {name: _info(value, 8 + length) for name, value in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its header is not that of a safetensors file") from error
    for name, info in tensors.items():
        if not 8 + length <= info.begin <= info.end <= size:
            raise ValueError(f"it is truncated: {name} ends at byte {info.end} of {size}")
    return Header(tensors, metadata if isinstance(metadata, dict) else {}, size)


def _info(value: Any, offset: int) -> TensorInfo:
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(one) is int and one >= 0 for one in (begin, end, *shape)):
        raise ValueError("a size is not a whole number")
    return TensorInfo(str(value["dtype"]), shape, offset + begin, offset + end)


def _tensor(file: IO[bytes], name: str, tensors: dict[str, TensorInfo]) -> np.ndarray:
    info = tensors.get(name)
    if info is None:
        raise ValueError(f"it lacks the tensor {name}")
    if info.dtype not in _DTYPES:
        raise ValueError(f"{name} is {info.dtype}; supported are {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[info.dtype])
    if math.prod(info.shape) * dtype.itemsize != info.end - info.begin:
        raise ValueError(
            f"{name} has {info.end - info.begin} bytes, not those of {info.dtype} {info.shape}"
        )
    file.seek(info.begin)
    data = file.read(info.end - info.begin)
    if len(data) != info.end - info.begin:
        raise ValueError(f"it is truncated within {name}")
    return np.frombuffer(data, dtype).reshape(info.shape)
