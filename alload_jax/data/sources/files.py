"""Finds the files of a data folder that a source reads, and statistics of known VAEs.

Wan 2.1: the defaults of diffusers' `AutoencoderKLWan`. Wan 2.2 (5B): the VAE of Wan's repository.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

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


Normalize = Literal["wan2.1", "wan2.2", "none"]
"""The VAE whose statistics latents must be normalised with; `none` for normalised latents."""

# fmt: off
_STATISTICS = {
    "wan2.1": (
        (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
         0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
        (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
         3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    ),
    "wan2.2": (
        (-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
         -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
         -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
         -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
         -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
         0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
        (0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
         0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
         0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
         0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
         0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
         0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ),
}
# fmt: on


def channels_of(normalize: Normalize | None) -> int | None:
    """Returns the number of channels of a VAE's latents; None for `none`."""
    return len(_STATISTICS[normalize][0]) if normalize in _STATISTICS else None


def normalized(latents: np.ndarray, normalize: Normalize | None) -> np.ndarray:
    """Subtracts the mean of each channel and divides by its standard deviation.

    Args:
      latents: [..., C] floats.
      normalize: the VAE; None and `none` leave the latents as they are.

    Returns:
      [..., C] float32, or `latents` themselves.
    """
    if normalize not in _STATISTICS:
        return latents
    mean, deviation = np.array(_STATISTICS[normalize], np.float32)
    return (latents.astype(np.float32) - mean) / deviation
