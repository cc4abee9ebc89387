"""The geometry of samples, the columns of a manifest that planning reads, and their buckets."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from alload_jax.errors import InputError, first_line
from alload_jax.planning.epoch import LEAST_WEIGHT, MOST_WEIGHT, Repeats

Triple = tuple[int, int, int]
PIXEL_PATCH: Triple = (1, 16, 16)
"""The patch size with which tokens of pixels are counted where no model is named."""
ASPECT_RATIOS: dict[tuple[int, int], float] = {
    (1, 1): 2.0,
    (4, 3): 2.0,
    (3, 4): 1.0,
    (3, 2): 1.0,
    (2, 3): 1.0,
    (16, 9): 5.0,
    (9, 16): 3.0,
    (21, 9): 1.0,
    (9, 21): 0.5,
}
"""(width, height) of an aspect ratio → its weight."""


@dataclass(frozen=True)
class Geometry:
    """How pixels become tokens. The defaults are Wan 2.1's.

    Attributes:
      vae_stride: pixels per latent along (frames, height, width); 1, 1, 1 without a VAE. The
        first frame has a latent of its own: frames F give (F − 1) / stride + 1.
      patch_size: latents per token along (frames, height, width).
    """

    vae_stride: Triple = (4, 8, 8)
    patch_size: Triple = (1, 2, 2)

    def __post_init__(self) -> None:
        for name in ("vae_stride", "patch_size"):
            value = getattr(self, name)
            if len(value) != 3 or min(value) < 1:
                raise InputError(f"{name} is {value}; it must be three whole numbers of at least 1")

    def latent_grid(self, frames: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Latent (frames, height, width) of each sample; sizes that don't divide are rounded up.

        Args:
          frames, height, width: [N] integers, in pixels.

        Returns:
          [N, 3] int64.
        """
        stride_t, stride_h, stride_w = self.vae_stride
        return np.stack(
            [
                -((1 - np.asarray(frames, np.int64)) // stride_t) + 1,
                -(-np.asarray(height, np.int64) // stride_h),
                -(-np.asarray(width, np.int64) // stride_w),
            ],
            axis=-1,
        )

    def seq_len(self, frames: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Tokens of each sample.

        Args:
          frames, height, width: [N] integers, in pixels.

        Returns:
          [N] int64.
        """
        return self.token_grid(frames, height, width).prod(axis=-1)

    def token_grid(self, frames: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
        """Tokens along (frames, height, width) of each sample; arguments as `latent_grid`'s.

        Returns:
          [N, 3] int64.
        """
        return -(-self.latent_grid(frames, height, width) // np.asarray(self.patch_size))


def divisible(size: Triple, vae_stride: Triple, patch_size: Triple) -> bool:
    """Whether a sample of this size in pixels is made of whole latents and whole patches."""
    parts = zip((size[0] - 1, *size[1:]), vae_stride, strict=True)
    if any(part % stride for part, stride in parts):
        return False
    grid = Geometry(vae_stride).latent_grid(*np.asarray(size)[:, None])[0]
    return not (grid % np.asarray(patch_size)).any()


def digest(*columns: np.ndarray) -> str:
    """The same 16 hexadecimal digits for the same bytes."""
    found = hashlib.sha256()
    for column in columns:
        found.update(np.ascontiguousarray(column).tobytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Buckets:
    """Samples grouped by equal shape, shortest sequence first.

    Attributes:
      shape: [K, 3] int64, (frames, height, width) of each bucket; zeros where only lengths are
        known, or where it holds several shapes.
      seq_len: [K] int64, tokens of a sample of the bucket, of the longest if it holds several.
      members: [N] int64, sample numbers, bucket by bucket, ascending within each; as often as
        each stands in the epoch.
      offsets: [K + 1] int64; bucket k holds `members[offsets[k]:offsets[k + 1]]`.
    """

    shape: np.ndarray
    seq_len: np.ndarray
    members: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.seq_len)

    def merged(self, number: np.ndarray) -> "Buckets":
        """Buckets that hold those of equal numbers.

        Args:
          number: [K] integers, ascending.

        Returns:
          Buckets as long as the longest that they hold; their shape is zeros where they hold
          several.
        """
        first = np.flatnonzero(np.r_[True, number[1:] != number[:-1]])
        last = np.r_[first[1:], len(number)] - 1
        shape = np.where((first == last)[:, None], self.shape[last], 0)
        offsets = np.r_[self.offsets[first], self.offsets[-1]]
        return Buckets(shape, self.seq_len[last], self.members, offsets)

    def name(self, bucket: int) -> str:
        """`17x16x16` (frames, height, width), or the length alone where no shape is known."""
        if self.shape[bucket].any():
            return "x".join(str(size) for size in self.shape[bucket])
        return str(self.seq_len[bucket])


@dataclass(frozen=True)
class Samples:
    """Shapes and lengths of the samples of a data set, in the manifest's order.

    Attributes:
      shape: [N, 3] int64, (frames, height, width) in pixels; zeros where only lengths are known.
      seq_len: [N] int64, tokens.
      weight: [N] float64, expected times that each sample stands in an epoch; None for once each.
      counts: [N] int64, how often each stands in the epoch that is planned; None for once each.
    """

    shape: np.ndarray
    seq_len: np.ndarray
    weight: np.ndarray | None = None
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.seq_len)

    def buckets(self) -> Buckets:
        """Groups the samples by (seq_len, frames, height, width).

        All epochs have the same buckets; of weighted samples, an epoch's may be empty.
        """
        keys = np.column_stack([self.seq_len, self.shape])
        order = np.lexsort(keys.T[::-1])
        ordered = keys[order]
        starts = np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)])
        offsets = np.r_[starts, len(order)].astype(np.int64)
        if self.counts is not None:
            offsets = np.r_[0, np.cumsum(self.counts[order])][offsets]
            order = np.repeat(order, self.counts[order])
        return Buckets(
            shape=ordered[starts, 1:],
            seq_len=ordered[starts, 0],
            members=order.astype(np.int64),
            offsets=offsets,
        )

    def most_within(self, tokens: int) -> int:
        """Most samples of an epoch that so many tokens hold: the shortest ones; at least 1."""
        each = np.ones(len(self), np.int64) if self.counts is None else self.counts
        shortest_first = np.argsort(self.seq_len, kind="stable")
        lengths = np.repeat(self.seq_len[shortest_first], each[shortest_first])
        return max(1, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))

    def shuffled(self, rng: np.random.Generator) -> np.ndarray:
        """Sample numbers in random order, each as often as it stands in the epoch: [E] int64."""
        if self.counts is None:
            return rng.permutation(len(self))
        return rng.permutation(np.repeat(np.arange(len(self)), self.counts))

    def repeats(self, seed: int) -> Repeats | None:
        """How often each sample stands in each epoch of a plan of this seed; None for once each.

        Raises:
          InputError: an epoch might hold no sample.
        """
        if self.weight is None:
            return None
        return Repeats.of(self.weight, np.column_stack([self.seq_len, self.shape]), seed)

    def typical(self) -> "Samples":
        """What an epoch holds, each time as a sample of its own, with the longest and shortest.

        Statistics over these are those of all epochs. They depend on the data set alone. Samples
        without weights are returned as they are.
        """
        repeats = self.repeats(seed=0)
        if repeats is None:
            return self
        counts = repeats.counts(0)
        for extreme in (self.seq_len.argmax(), self.seq_len.argmin()):
            counts[extreme] = max(1, counts[extreme])
        return Samples(self.shape.repeat(counts, axis=0), self.seq_len.repeat(counts))

    def of_epoch(self, counts: np.ndarray) -> "Samples":
        """The samples with how often each stands in one epoch: [N] int64."""
        return replace(self, counts=counts)


def samples_from_columns(columns: dict[str, np.ndarray], geometry: Geometry, place: str) -> Samples:
    """Samples from a manifest's columns.

    Args:
      columns: `frames`, `height`, `width` ([N] integers, pixels), or `seq_len` ([N]) alone.
      geometry: turns pixels into tokens where `frames` is given.
      place: where the columns come from, for messages.

    Raises:
      InputError: no usable columns, no rows, or a size below 1.
    """
    if not len(next(iter(columns.values()), [1])):
        raise InputError(f"{place}: the manifest has no rows; it needs at least one sample")
    sized = [name for name in ("frames", "height", "width") if name in columns]
    if len(sized) == 3:
        shape = np.stack([_whole(columns[name], name, place) for name in sized], axis=-1)
        samples = Samples(shape, _tokens(shape, geometry, place))
    elif "seq_len" in columns:
        seq_len = _whole(columns["seq_len"], "seq_len", place)
        samples = Samples(np.zeros((len(seq_len), 3), np.int64), seq_len)
    else:
        raise InputError(
            f"{place}: columns are {', '.join(columns) or 'none'}; "
            "a manifest needs frames, height and width, or seq_len"
        )
    return samples


def read_samples(path: str | Path, geometry: Geometry) -> Samples:
    """Reads what planning needs from a Parquet or CSV manifest, with its column `weight`, if any.

    Raises:
      InputError: the file is missing, unreadable or unusable.
    """
    table = _read_table(Path(path))
    columns = {name: table[name].to_numpy() for name in table.column_names}
    samples = samples_from_columns(columns, geometry, str(path))
    if (weight := columns.get(_WEIGHT)) is None or table[_WEIGHT].null_count == len(table):
        return samples
    if weight.dtype.kind not in "iuf":
        raise InputError(f"{path}: column weight holds {str(weight[0])[:40]!r}; write numbers")
    weight = np.where(np.isnan(weight), 1.0, weight)  # a row may have none
    wrong = np.flatnonzero(~((weight >= LEAST_WEIGHT) & (weight <= MOST_WEIGHT)))
    if wrong.size:
        raise InputError(
            f"{path}: row {wrong[0]} has weight {weight[wrong[0]]:g}; it must be from "
            f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        )
    return samples if (weight == 1).all() else replace(samples, weight=weight)


def read_sample_paths(path: str | Path) -> np.ndarray | None:
    """Reads the column `path` of a Parquet or CSV manifest: [N] str; None if there is none.

    Raises:
      InputError: the file is missing or unreadable.
    """
    table = _read_table(Path(path), (_PATH,))
    if _PATH not in table.column_names:
        return None
    return np.asarray([value or "" for value in table[_PATH].to_pylist()], object)


_PATH = "path"
_LARGEST = 10**9
_WEIGHT = "weight"
_COLUMNS = ("frames", "height", "width", "seq_len", _WEIGHT)


def _read_table(path: Path, wanted: tuple[str, ...] = _COLUMNS) -> pa.Table:
    """The columns that are wanted; all columns if planning cannot use them, for the message."""
    if not path.is_file():
        raise InputError(f"{path}: no such manifest; give the path of a .parquet or .csv file")
    try:
        if path.suffix.lower() == ".csv":
            table = pyarrow.csv.read_csv(path)
        else:
            names = pyarrow.parquet.read_schema(path).names
            usable = {"frames", "height", "width"} <= set(names) or "seq_len" in names
            known = [name for name in names if name in wanted]
            table = pyarrow.parquet.read_table(path, columns=known if usable else None)
        columns = table.column_names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        usual = path.suffix.lower() in (".csv", ".parquet")
        reason = first_line(error) if usual else "its name ends in neither .parquet nor .csv"
        raise InputError(f"{path}: not a readable manifest ({reason}); write it again") from error
    if doubled := {name for name in columns if columns.count(name) > 1}:
        raise InputError(f"{path}: column {', '.join(sorted(doubled))} exists twice; keep one")
    return table


def _tokens(shape: np.ndarray, geometry: Geometry, place: str) -> np.ndarray:
    """Tokens of each shape; raises InputError for sizes that would overflow."""
    about = shape.astype(np.float64).prod(axis=1) / np.prod(
        np.multiply(geometry.vae_stride, geometry.patch_size, dtype=np.float64)
    )
    if (about > _LARGEST).any():
        row = int(about.argmax())
        raise InputError(
            f"{place}: row {row} is {'×'.join(map(str, shape[row]))} (frames, height, width), "
            f"about {about[row]:.3g} tokens; at most {_LARGEST:,} can be planned"
        )
    return geometry.seq_len(*shape.T)


def _whole(values: np.ndarray, name: str, place: str) -> np.ndarray:
    """The column as int64; raises InputError unless all values are whole numbers from 1."""
    values = np.asarray(values)
    if values.dtype.kind not in "iuf":
        raise InputError(
            f"{place}: column {name} holds {str(values[0])[:40]!r}; it must hold whole numbers"
        )
    in_range = (values >= 1) & (values <= _LARGEST)
    wrong = ~(np.isfinite(values) & in_range & (values == np.floor(values)))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"{place}: row {row} has {name} = {values[row]}; "
            f"it must be a whole number from 1 to {_LARGEST:,}"
        )
    return values.astype(np.int64)
