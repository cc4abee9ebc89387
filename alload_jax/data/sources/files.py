"""Finds the files of a data folder that a source reads."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from alload_jax.errors import InputError

_PICKLES = (".pt", ".pth", ".pkl", ".ckpt", ".bin")
_THREADS = 16  # scanning waits for the file system

T = TypeVar("T")
S = TypeVar("S")


def find_files(folder: Path, suffix: str) -> list[str]:
    """Returns the files of a folder and the folders in it whose names end in `suffix`.

    Hidden files and folders are left out. Paths are relative, sorted by their bytes.

    Raises:
      InputError: a file is a link out of the folder, or no file.
    """
    root = Path(os.path.realpath(folder))
    if root.is_file():
        return [folder.name] if folder.name.endswith(suffix) else []
    found = sorted((name for name in _names(root) if name.endswith(suffix)), key=os.fsencode)
    for name in found:
        path = root / name  # folders that are links are not walked
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise InputError(f"{folder / name}: is a link out of the folder; copy the file here")
        if not path.is_file():
            raise InputError(f"{folder / name}: is not a file; remove it")
    return found


def find_pickle(folder: Path) -> str | None:
    """Returns the first file of PyTorch's pickle format in a folder; None if there is none."""
    if folder.is_file():
        return folder.name if folder.suffix in _PICKLES else None
    return min((name for name in _names(folder) if name.endswith(_PICKLES)), default=None)


def root_of(folder: Path) -> Path:
    """Returns the folder to which the names of `find_files` are relative."""
    return folder.parent if folder.is_file() else folder


def scan(function: Callable[[T], S], items: Sequence[T]) -> list[S]:
    """Applies a function that reads a little of a file to each item, several at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def _names(root: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield (Path(parent) / name).relative_to(root).as_posix()
