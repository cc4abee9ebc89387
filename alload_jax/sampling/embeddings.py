"""Reads text or image embeddings: safetensors with one tensor, or with one of a given name."""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.errors import InputError
from alload_jax.models.common.config import ConditionPart
from alload_jax.models.common.safetensor_files import open_safetensors


def read_embeddings(path: Path, name: str) -> np.ndarray:
    """Reads the tensor of that name, or the only tensor, from a safetensors file as float32.

    Raises:
      InputError: the file or tensor is missing, or a value is not finite.
    """
    with open_safetensors(path) as file:
        tensor = file.get_tensor(_key(path, file, name))
    with np.errstate(over="ignore"):
        values = np.asarray(tensor, np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{path}: holds values that are not finite in float32; create it again")
    return values


def read_optional(path: Path, name: str) -> np.ndarray | None:
    """Reads the tensor of that name as float32; None if the file has none.

    Raises:
      InputError: a value is not finite.
    """
    with open_safetensors(path) as file:
        if name not in file.keys():  # noqa: SIM118  a handle, not a dict
            return None
    return read_embeddings(path, name)


def read_part(path: Path, part: ConditionPart) -> np.ndarray:
    """Reads the tokens of a kind beside the text in a file; none if the file has none.

    Returns:
      [L, width] float32.

    Raises:
      InputError: the tokens do not fit the model, or a value is not finite.
    """
    found = read_optional(path, part.name)
    if found is None:
        return np.zeros((0, part.width), np.float32)
    if found.ndim != 2 or found.shape[1] != part.width or len(found) > part.length:
        raise InputError(
            f"{path}: {part.name} has shape {list(found.shape)}, but the model takes up to "
            f"[{part.length}, {part.width}]; write embeddings of its own encoder"
        )
    return found


def refuse_others(path: Path, names: Collection[str]) -> None:
    """Refuses tensors of other names, but for a file's only tensor, whose name does not matter.

    Raises:
      InputError: there are some.
    """
    with open_safetensors(path) as file:
        keys = set(file.keys())
    if len(keys) > 1 and (others := sorted(keys - set(names))):
        raise InputError(
            f"{path}: holds {', '.join(others)}, but the model takes {', '.join(names)} from it; "
            "remove or rename them"
        )


def embeddings_shape(path: Path, name: str) -> tuple[int, ...]:
    """Returns the shape of the tensor that `read_embeddings` reads.

    The file is read and checked only once, because many lines of a list may name it.

    Raises:
      InputError: the file or tensor is missing, or a value is not finite.
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
        raise InputError(
            f"{path}: holds {', '.join(keys) or 'nothing'}; rename one of them to {name}"
        )
    return name if name in keys else keys[0]
