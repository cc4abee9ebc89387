"""Samples of any data source of Grain, of known number or without an end.

Sizes of very many samples lie in a memory-mapped column, listed in random order without an end.
"""

import copy
import reprlib
import sys
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tokenize import TokenError
from typing import Any, Self

import numpy as np
from typing_extensions import override

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import GIVEN, IMAGE, LABELS, LATENTS, TEXT, SampleForm, mixed
from alload_jax.data.sources import SampleSource
from alload_jax.data.sources.arrays import checked_sample
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError, first_line
from alload_jax.files import Json, require_regular
from alload_jax.planning.epoch import WindowContent
from alload_jax.planning.samples import Triple
from alload_jax.planning.stream import Chunk, Feed
from alload_jax.processes import allow_workers, waits

_AXES = {LATENTS: 4, TEXT: 2, LABELS: 1, GIVEN: 4, IMAGE: 2}
"""Number of axes of each array."""


@waits("for the data folder to be read")
class GrainSamples(SampleSource):
    """`SampleSource` of the records of a `grain.sources.RandomAccessDataSource`."""

    def __init__(
        self,
        source: Any,
        geometry: Callable[[int], Triple],
        vae_stride: Triple,
        arrays: Callable[[Any], dict[str, np.ndarray]] | None = None,
        text_length: int | None = None,
        identity: str = "",
        origin: Json | None = None,
    ):
        """Asks for the geometry of every sample, and reads the first one.

        For the loader's processes, all arguments must pickle: functions of modules, no lambdas.

        Args:
          source: the data source; its length and its records by number are enough.
          geometry: number of a sample → (frames, height, width) in pixels. It is called for every
            sample at the start, so it should not read the sample.
          vae_stride: pixels per latent; (1, 1, 1) without a VAE.
          arrays: record → `latents` [t, h, w, C] floats, and `text` [L, width] floats or `labels`
            [L] integers; None if records are such dicts.
          text_length: most tokens of a sample's condition; None for that of the first sample.
          identity: what distinguishes the content from other content of equal sizes, such as a
            version. A checkpoint is refused for data of another identity.
          origin: provenance; `fps` and `vae` have a meaning.

        Raises:
          InputError: the source is empty, or a size or the first sample is not as it must be.
        """
        self._source, self._arrays = source, arrays
        self._name = type(source).__name__
        if not len(source):
            raise InputError(f"{self._name}: holds no samples; give a source with at least one")
        sizes = [geometry(sample) for sample in range(len(source))]
        shape = checked_sizes(sizes, f"{self._name}: geometry's")
        self.manifest = _manifest(
            self._name, shape, lambda: self._read(0), vae_stride, text_length, identity, origin
        )

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        place = f"{self._name}: sample {sample}"
        return checked_sample(self.manifest, sample, self._read(sample), place)

    def _read(self, sample: int) -> dict[str, np.ndarray]:
        arrays = self._arrays or (lambda record: record)
        return _arrays_of(lambda: arrays(self._source[sample]), f"{self._name}: sample {sample}")


def _arrays_of(read: Callable[[], Any], place: str) -> dict[str, np.ndarray]:
    """What a user's function gives for a sample, as arrays with the right number of axes."""
    try:
        arrays = read()
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise BadRecordError(f"{place} cannot be read: {error}") from error
    if not isinstance(arrays, dict) or LATENTS not in arrays or not {TEXT, LABELS} & {*arrays}:
        raise BadRecordError(f"{place} is not a dict with latents, and text or labels")
    found = {name: np.asarray(value) for name, value in arrays.items()}
    for name, axes in _AXES.items():
        if name in found and found[name].ndim != axes:
            raise BadRecordError(
                f"{place} holds {name} of shape {found[name].shape}; they must have {axes} axes"
            )
    return found


def _manifest(
    name: str,
    shape: np.ndarray,
    read_first: Callable[[], dict[str, np.ndarray]],
    vae_stride: Triple,
    text_length: int | None,
    identity: str,
    origin: Json | None,
) -> Manifest:
    """The manifest of samples of these sizes, [N, 3], that are otherwise like the first one."""
    try:
        first = read_first()
    except BadRecordError as error:
        raise InputError(f"{error}; correct the source or its arrays function") from error
    if text_length is None:
        text_length = len(first[TEXT if TEXT in first else LABELS])
    seed = zlib.crc32(repr((name, identity)).encode())
    return Manifest(
        path=Path(name),
        shard=np.full(len(shape), name, object),
        index=np.arange(len(shape)),
        shape=shape,
        channels=np.full(len(shape), first[LATENTS].shape[-1], np.int32),
        text_length=np.full(len(shape), text_length, np.int32),
        checksum=np.array([zlib.crc32(row.tobytes(), seed) for row in shape], np.uint32),
        vae_stride=vae_stride,
        form=SampleForm.of(first),
        shard_bytes={},
        origin=origin or {},
        tells_content=False,
    )


_DRAWN = 2**14
"""Samples from the beginning of a stream that stand for all."""
_CHUNK = 2**10
"""Samples that are read between two states of a stream, at least."""
_SIZE = ("frames", "height", "width")
_CODES = np.array([2**40, 2**20, 1])
"""Times a size: a number of its own, in the order of the sizes."""


class GrainStream(SampleSource, Feed):
    """`SampleSource` of a `grain.IterDataset` without an end, which lists samples.

    Every process reads the whole list, but only the content of its own ranks' samples.

    Attributes:
      manifest: of the first samples, and of one of each size that these lack. Beside the first,
        which tells what samples hold, these cannot be read by their numbers.
    """

    def __init__(
        self,
        entries: Any,
        arrays: Callable[[Any], dict[str, np.ndarray]],
        sizes: Sequence[Triple] | np.ndarray,
        vae_stride: Triple,
        text_length: int | None = None,
        identity: str = "",
        origin: Json | None = None,
    ):
        """Reads the beginning of the list, and the first sample.

        For the loader's processes, all arguments must pickle.

        Args:
          entries: `grain.IterDataset` of dicts with `key`, a whole number or text, and `frames`,
            `height` and `width` in pixels: of one sample, or [n] each of several, which is faster.
            Its order is the same whenever and wherever it is read, and it does not read content.
          arrays: key → the sample's arrays, as those of `GrainSamples`.
          sizes: [K, 3], every (frames, height, width) that samples may have.
          vae_stride, text_length, identity, origin: as those of `GrainSamples`.

        Raises:
          InputError: an entry, a size or the first sample is not as it must be.
        """
        self._entries, self._arrays, self._name, self._kind = entries, arrays, "stream", ""
        allow_workers()  # entries may have some
        self._sizes = np.unique(checked_sizes(sizes, f"{self._name}:"), axis=0)
        self._rows = np.arange(len(self._sizes))
        drawn, count = [], 0
        with closing(self.chunks(None)) as chunks:
            while count < _DRAWN:
                drawn.append(next(chunks))
                count += len(drawn[-1].rows)
        kinds = np.concatenate([chunk.rows for chunk in drawn])
        keys = np.concatenate([chunk.keys for chunk in drawn])
        lacking = np.setdiff1d(self._rows, kinds)  # behind the first sample, which is read
        self.stand_ins = range(1, 1 + len(lacking))
        kinds = np.insert(kinds, 1, lacking)
        self._keys = np.insert(keys, 1, keys[:1].repeat(len(lacking)))
        _, self._rows = np.unique(kinds, return_index=True)
        shape, notes = self._sizes[kinds], (vae_stride, text_length, identity, origin)
        self.manifest = _manifest(self._name, shape, lambda: self._read(0), *notes)

    @override
    def chunks(self, state: Any) -> Generator[Chunk, None, None]:
        iterator = iter(self._entries)
        if state is not None:
            try:
                iterator.set_state(copy.deepcopy(state))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise InputError(
                    f"{self._name}: cannot go on from a checkpoint's state of other entries "
                    f"({reprlib.repr(error)}); give the entries as they were"
                ) from error
        with closing(iterator):
            while True:
                keys, sizes, count = [], [], 0
                while count < _CHUNK:
                    of_entry, size = self._columns(next(iterator, None))
                    keys.append(of_entry)
                    sizes.append(size)
                    count += len(of_entry)
                held = np.concatenate(keys)
                rows = self._rows_of(np.concatenate(sizes), held)
                yield Chunk(rows, held, copy.deepcopy(iterator.get_state()))

    def _columns(self, entry: Any) -> tuple[np.ndarray, np.ndarray]:
        """Keys [n] and sizes [n, 3] of one element."""
        if entry is None:
            raise InputError(f"{self._name}: has an end; repeat it, as by Grain's repeat()")
        if not isinstance(entry, dict) or not {"key", *_SIZE} <= {*entry}:
            raise InputError(
                f"{self._name}: gives {reprlib.repr(entry)}; it must give dicts with key, "
                f"{', '.join(_SIZE)}"
            )
        keys, *size = (np.atleast_1d(entry[name]) for name in ("key", *_SIZE))
        is_whole = all(each.dtype.kind in "iu" and each.shape == keys.shape for each in size)
        if not is_whole or keys.ndim != 1 or keys.dtype.kind not in "iuU":
            raise InputError(
                f"{self._name}: gives {reprlib.repr(entry)}; key must be a whole number or text, "
                f"{', '.join(_SIZE)} whole numbers, or equally many of each"
            )
        self._kind = self._kind or keys.dtype.kind
        if keys.dtype.kind != self._kind:  # NumPy would join them as floats, or as text
            raise InputError(
                f"{self._name}: gives {reprlib.repr(entry)}, whose key is {keys.dtype}, unlike "
                "those before; give all keys of one type: int64, uint64 or text"
            )
        return keys, np.stack(size, axis=1).astype(np.int64)

    def _rows_of(self, size: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """For sizes [n, 3] the manifest's row with each: [n] int64."""
        kind = np.searchsorted(self._sizes @ _CODES, size @ _CODES)
        kind = np.minimum(kind, len(self._sizes) - 1)
        if (wrong := np.flatnonzero((self._sizes[kind] != size).any(axis=1))).size:
            raise InputError(
                f"{self._name}: sample {keys[wrong[0]]} has {'×'.join(map(str, size[wrong[0]]))} "
                "(frames, height, width), which is none of the source's sizes; add it to them"
            )
        return self._rows[kind]

    @override
    def of_window(self, window: WindowContent) -> Self:
        found = copy.copy(self)
        found.manifest = replace(self.manifest.subset(window.rows), numbers=None)
        found._keys, found.stand_ins = window.keys, range(0)
        return found

    @override
    def read(self, sample: int) -> dict[str, np.ndarray]:
        return checked_sample(self.manifest, sample, self._read(sample), self._place(sample))

    def _read(self, sample: int) -> dict[str, np.ndarray]:
        key = self._keys[sample].item()
        return _arrays_of(lambda: self._arrays(key), self._place(sample))

    def _place(self, sample: int) -> str:
        return f"{self._name}: sample {self._keys[sample]}"


# ---------------------------------------------------------------- columns of sizes

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
