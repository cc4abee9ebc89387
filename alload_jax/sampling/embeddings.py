"""Files of text or image embeddings: safetensors with one tensor, or one of the right name."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alload_jax.errors import InputError
from alload_jax.models.common.safetensor_files import open_safetensors
from alload_jax.models.wan.config import WanConfig
from alload_jax.sampling.flow import Condition

if TYPE_CHECKING:
    from alload_jax.sampling.requests import Request


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


def conditions(requests: "Sequence[Request]", model: WanConfig) -> tuple[Condition, Condition]:
    """The condition of a batch and its null condition, float32 or int32 in host memory.

    Args:
      requests: of one `Request.shape()`.
      model: that takes them.
    """
    image = None
    if model.image:
        image = np.stack([read_embeddings(r.image, "image") for r in requests if r.image])
    if model.text is None:
        tokens = np.array([request.classes for request in requests], np.int32)
        return Condition(tokens, image), Condition(np.full_like(tokens, model.num_classes), image)
    shape = (len(requests), model.text.length, model.text.dim)
    text, negative = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, request in enumerate(requests):
        for array, file in ((text, request.prompt), (negative, request.negative)):
            if file is not None:
                found = read_embeddings(file, "text")
                array[row, : len(found)] = found
    return Condition(text, image), Condition(negative, image)


@functools.lru_cache(maxsize=4096)
def _checked_shape(path: Path, name: str, version: tuple[int, ...]) -> tuple[int, ...]:
    return read_embeddings(path, name).shape


def _key(path: Path, file: Any, name: str) -> str:
    keys = sorted(file.keys())
    if name not in keys and len(keys) != 1:
        raise InputError(f"{path}: holds {', '.join(keys) or 'nothing'}; name one of them {name}")
    return name if name in keys else keys[0]
