"""Folders with weights as diffusers and transformers write them: found, checked, identified."""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from alload_jax.errors import InputError
from alload_jax.files import read_json

CONFIG_NAME = "config.json"
_BLOCK = 2**24


def find_folder(folder: Path, subfolder: str, wanted: str) -> Path:
    """The folder itself, or its subfolder where a whole pipeline's folder is given.

    Args:
      folder: a local folder.
      subfolder: name of the part in a pipeline's folder, such as `vae`.
      wanted: what is looked for, for messages.

    Raises:
      InputError: neither has a config.json.
    """
    for place in (folder, folder / subfolder):
        if (place / CONFIG_NAME).is_file():
            return place
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the local folder of {wanted}")
    raise InputError(
        f"{folder}: has no {CONFIG_NAME} and no {subfolder}/{CONFIG_NAME}; give the folder of "
        f"{wanted}"
    )


def find_beside(folder: Path, subfolder: str, names: Sequence[str], wanted: str) -> Path:
    """The folder of a part that lies in the folder of a model or beside it.

    Args:
      folder: the model's folder.
      subfolder: name of the part in a pipeline's folder, such as `tokenizer`.
      names: files of which the part has one at least.
      wanted: what is looked for, for messages.

    Raises:
      InputError: it is in neither.
    """
    places = (folder, folder / subfolder, folder.parent / subfolder)
    for place in places:
        if any((place / name).is_file() for name in names):
            return place
    raise InputError(
        f"{folder}: no {wanted} ({' or '.join(names)}) in it or in {places[-1]}; copy it there"
    )


def read_config(folder: Path, key: str, known: Sequence[str], wanted: str) -> dict[str, Any]:
    """The values of config.json, which must be that of a known model.

    Args:
      folder: the model's folder.
      key: name of the value that says what it is.
      known: what it may say.
      wanted: what is looked for, for messages.

    Raises:
      InputError: it is not JSON, or another model's.
    """
    path = folder / CONFIG_NAME
    found = read_json(path, "copy it again")
    name = found.get(key) if isinstance(found, dict) else None
    if name not in known:
        names = " or ".join(known)
        raise InputError(f"{path}: {key} is {name}, not {names}; give the folder of {wanted}")
    return dict(found)


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of a model: one, or those that its index names.

    Args:
      folder: the model's folder.
      stem: file name without suffixes.

    Raises:
      InputError: a file is missing, or the index is not valid.
    """
    index = folder / f"{stem}.safetensors.index.json"
    names = {f"{stem}.safetensors"}
    if index.is_file():
        try:
            names = set(read_json(index)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{index}: is not a valid index of weights; copy it again") from error
    paths = [folder / str(name) for name in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: no such file; weights are read from safetensors files")
    return paths


def weights_digest(config: dict[str, Any], files: Sequence[Path]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a model.

    Names of files do not count, nor do values of the config that describe its writer.

    Args:
      config: values of config.json.
      files: weights, and other files that determine what the model computes.
    """
    writer = ("transformers_version", "torch_dtype", "dtype")
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in writer}
    found = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    stats = [path.stat() for path in files]
    with ThreadPoolExecutor() as threads:  # hashing does not hold Python's lock
        for digest in threads.map(
            _file_digest, files, [s.st_size for s in stats], [s.st_mtime_ns for s in stats]
        ):
            found.update(digest)
    return found.hexdigest()[:16]


@cache
def _file_digest(path: Path, size: int, changed: int) -> bytes:
    """SHA-256 of a file's bytes; size and time of change tell cached digests apart."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.digest()
