"""Sizes of very many samples in a memory-mapped column, listed in random order without an end."""

import sys
from pathlib import Path
from tokenize import TokenError
from typing import Any, Self

import numpy as np

from alload_jax.data.record import mixed
from alload_jax.errors import InputError, first_line
from alload_jax.files import require_regular

SIZES, SIZE = "sizes.npy", "size.npy"
"""Files of a folder: every (frames, height, width) that occurs, [K, 3]; and of each sample the row
there, [N]."""
LARGEST_SIZE = 2**16
_PER_ENTRY = 2**13
"""Samples that are listed at a time."""
_ROUNDS = 4


class SizeColumn:
    """Sizes of samples in a folder of NumPy files, of which no more is read than is listed.

    Attributes:
      sizes: [K, 3] int64, every (frames, height, width) in pixels.
    """

    def __init__(self, folder: str | Path, seed: int = 0):
        """Maps the files into memory.

        Args:
          folder: holds `SIZES` and `SIZE`.
          seed: of the order.

        Raises:
          InputError: a file is missing, or holds something else.
        """
        self._given = folder, seed
        self._path, self._seed = Path(folder) / SIZE, seed
        self.sizes = checked_sizes(_mapped(Path(folder) / SIZES), f"{folder}/{SIZES}:")
        self._rows = _mapped(self._path)
        if self._rows.ndim != 1 or not len(self._rows):
            raise InputError(f"{self._path}: has shape {self._rows.shape}; it must be [N]")

    def __reduce__(self) -> tuple[type[Self], tuple[str | Path, int]]:
        """Pickles the folder's name: other processes map the files themselves."""
        return type(self), self._given

    def __len__(self) -> int:
        return len(self._rows)

    def size_of(self, samples: np.ndarray) -> np.ndarray:
        """(frames, height, width) of samples by number: [n] → [n, 3] int64.

        Raises:
          InputError: the column names a size that there is not.
        """
        rows = self._rows[samples]
        if (wrong := np.flatnonzero((rows < 0) | (rows >= len(self.sizes)))).size:
            raise InputError(
                f"{self._path}: sample {samples[wrong[0]]} has size {rows[wrong[0]]}, but {SIZES} "
                f"has {len(self.sizes)} rows; correct one of both"
            )
        return self.sizes[rows]

    def drawn(self, count: int) -> np.ndarray:
        """Numbers of samples that are drawn at random, [n] int64: at most so many."""
        return shuffled(np.arange(min(count, len(self))), len(self), [self._seed])

    def entry(self, number: int) -> dict[str, np.ndarray]:
        """Element `number` of `entries`; all samples stand in each pass, in another order."""
        per_pass = -(-len(self) // _PER_ENTRY)
        done, block = divmod(number, per_pass)
        places = np.arange(block * _PER_ENTRY, min(len(self), (block + 1) * _PER_ENTRY))
        samples = shuffled(places, len(self), [self._seed, done])
        frames, height, width = self.size_of(samples).T
        return {"key": samples, "frames": frames, "height": height, "width": width}

    def entries(self) -> Any:
        """What `GrainStream` takes: samples with their numbers as keys."""
        import grain

        reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        return grain.MapDataset.range(sys.maxsize).map(self.entry).to_iter_dataset(reading)


def _mapped(path: Path) -> np.ndarray:
    """An array of whole numbers in a file, without reading it."""
    require_regular(path, "write it with numpy.save")
    try:
        found = np.lib.format.open_memmap(path, mode="r")  # which knows no pickles
    except (OSError, ValueError, TypeError, OverflowError, TokenError) as error:
        reason = first_line(error)
        raise InputError(f"{path}: cannot be read ({reason}); write it with numpy.save") from error
    if found.dtype.kind not in "iu":
        raise InputError(f"{path}: holds {found.dtype}; it must hold whole numbers")
    return found


def checked_sizes(sizes: Any, place: str) -> np.ndarray:
    """Sizes of samples, (frames, height, width) in pixels, as [K, 3] int64.

    Raises:
      InputError: they are something else, or out of range.
    """
    found = np.asarray(sizes)
    if found.dtype.kind not in "iu" or found.shape[1:] != (3,) or not len(found):
        raise InputError(
            f"{place} sizes are {found.dtype} of shape {found.shape}; they must be whole numbers "
            "[K, 3]: frames, height, width"
        )
    if (wrong := np.flatnonzero(((found < 1) | (found > LARGEST_SIZE)).any(axis=1))).size:
        raise InputError(
            f"{place} size {wrong[0]} is {'×'.join(map(str, found[wrong[0]]))} (frames, height, "
            f"width); each must be from 1 to {LARGEST_SIZE:,}"
        )
    return found.astype(np.int64)


def shuffled(places: np.ndarray, count: int, seed: list[int]) -> np.ndarray:
    """What stands at some places of a random order of the numbers below `count`.

    The order is a function of its seed and takes no memory: a Feistel network over the next power
    of four, which is applied again to what is out of range (M. Luby and C. Rackoff, How to
    Construct Pseudorandom Permutations from Pseudorandom Functions, 1988; J. Black and P. Rogaway,
    Ciphers with Arbitrary Finite Domains, 2002).

    Args:
      places: [n] int64, from 0 to below `count`.
      count: above 0.
      seed: non-negative numbers.

    Returns:
      [n] int64, from 0 to below `count`, different for different places.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
    found, out = places.astype(np.uint64), np.ones(len(places), bool)
    while out.any():
        left, right = found[out] >> half, found[out] & mask
        for key in keys:
            left, right = right, left ^ (mixed(right + key) & mask)
        found[out] = left << half | right
        out = found >= count
    return found.astype(np.int64)
