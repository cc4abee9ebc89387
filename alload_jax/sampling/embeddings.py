"""Files of text or image embeddings: safetensors with one tensor, or one of the right name."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.errors import InputError
from alload_jax.models.common.safetensor_files import open_safetensors


def read_embeddings(path: Path, name: str) -> np.ndarray:
    """The tensor of that name in a safetensors file, or its only one: float32.

    Raises:
      InputError: there is no such file or tensor, or a value is not finite.
    """
    with open_safetensors(path) as file:
        tensor = file.get_tensor(_key(path, file, name))
    with np.errstate(over="ignore"):
        values = np.asarray(tensor, np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{path}: holds values that are not finite in float32; make it anew")
    return values


def embeddings_shape(path: Path, name: str) -> tuple[int, ...]:
    """The shape of what `read_embeddings` reads.

    All of it is read and checked, but once: a list may name one file in many lines.

    Raises:
      InputError: there is no such file or tensor, or a value is not finite.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):
        return read_embeddings(path, name).shape
    return _checked_shape(path, name, (found.st_ino, found.st_size, found.st_mtime_ns))


@functools.lru_cache(maxsize=4096)
def _checked_shape(path: Path, name: str, version: tuple[int, ...]) -> tuple[int, ...]:
    return read_embeddings(path, name).shape


def _key(path: Path, file: Any, name: str) -> str:
    keys = sorted(file.keys())
    if name not in keys and len(keys) != 1:
        raise InputError(f"{path}: holds {', '.join(keys) or 'nothing'}; name one of them {name}")
    return name if name in keys else keys[0]
