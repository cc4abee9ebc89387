"""Files of text or image embeddings: safetensors with one tensor, or one of the right name."""

from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from alload_jax.errors import InputError


def read_embeddings(path: Path, name: str) -> np.ndarray:
    """The tensor of that name in a safetensors file, or its only one: float32.

    Raises:
      InputError: there is no such file or tensor.
    """
    with _opened(path) as file:
        return np.asarray(file.get_tensor(_key(path, file, name)), np.float32)


def embeddings_shape(path: Path, name: str) -> tuple[int, ...]:
    """The shape of what `read_embeddings` reads; only the file's header is read.

    Raises:
      InputError: there is no such file or tensor.
    """
    with _opened(path) as file:
        return tuple(file.get_slice(_key(path, file, name)).get_shape())


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: no such file; name a safetensors file of embeddings")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise InputError(f"{path}: is no whole safetensors file ({error})") from error


def _key(path: Path, file: Any, name: str) -> str:
    keys = sorted(file.keys())
    if name not in keys and len(keys) != 1:
        raise InputError(f"{path}: holds {', '.join(keys) or 'nothing'}; name one of them {name}")
    return name if name in keys else keys[0]
