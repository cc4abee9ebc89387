"""A ladder of lengths: shapes of similar length share a bucket, whose rows are padded."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alload_jax.planning.samples import Buckets

_NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
"""Numbers of buckets that are tried, and all shapes, each in a bucket of its own."""
_MOST_PADDING = 0.05
"""Padding that is avoided where so many buckets are allowed."""
_FIXED, _MOST_ROWS_TRIED = 0.01, 1024
"""Time of a micro-batch beside that of its rows, over that of the largest; rows that are tried."""
_THINNED = 400
"""Most lengths among which those of the ladder are chosen."""


@dataclass(frozen=True)
class Ladder:
    """The buckets of a policy, by length.

    Attributes:
      lengths: tokens of a row of each bucket, ascending; a sample's bucket is the first that it
        fits. Of equal lengths each holds one shape.
      rows: rows of a micro-batch of each bucket on one rank.
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    def buckets(self, shapes: Buckets) -> tuple[Buckets, np.ndarray]:
        """The buckets that the shapes of a data set fall into, and the rows of each, [K] int64."""
        lengths = np.asarray(self.lengths)
        by_shape = len(lengths) == len(shapes) and np.array_equal(lengths, shapes.seq_len)
        number = np.arange(len(shapes))
        if not by_shape:
            number = np.searchsorted(lengths, shapes.seq_len)
        used = np.unique(number)
        return shapes.merged(number), np.asarray(self.rows, np.int64)[used]


def choose_ladder(
    shapes: Buckets,
    most_rows: Callable[[Buckets], np.ndarray],
    ranks: int,
    most: int | None,
    program_share: float,
    *,
    evenly: bool = True,
) -> Ladder:
    """The ladder with the least padding and compilation.

    Of ladders with at most `most` buckets, those with little padding come first.

    Args:
      shapes: a bucket for each shape of the data set, shortest first.
      most_rows: the most rows of a micro-batch of buckets on one rank.
      ranks: that share a bucket.
      most: buckets; None for one for each shape.
      program_share: share of the run's time that compiling a program takes.
      evenly: whether micro-batches may have fewer rows, where that leaves fewer empty.
    """
    found: list[tuple[bool, float, Ladder]] = []
    for number in _partitions(shapes, most):
        buckets = shapes.merged(number)
        rows, padding = _filled(buckets, most_rows(buckets), ranks, shapes, evenly)
        ladder = Ladder(tuple(buckets.seq_len.tolist()), tuple(rows.tolist()))
        found.append((padding > _MOST_PADDING, padding + program_share * len(rows), ladder))
    return min(found, key=lambda each: each[:2])[2]


def _filled(
    buckets: Buckets, most_rows: np.ndarray, ranks: int, shapes: Buckets, evenly: bool
) -> tuple[np.ndarray, float]:
    """Rows of each bucket that its samples fill ([K]), and the padding of all.

    A micro-batch has so many rows at most; `evenly`, fewer where that leaves fewer rows empty.
    """
    samples = np.diff(buckets.offsets)
    rows = np.clip(-(-samples // ranks), 1, most_rows)
    if evenly:
        pairs = zip(samples.tolist(), rows.tolist(), strict=True)
        rows = np.asarray([_fewest_empty(count, ranks, most) for count, most in pairs])
    computed = -(-samples // (rows * ranks)) * rows * ranks * buckets.seq_len
    real = (np.diff(shapes.offsets) * shapes.seq_len).sum()
    return rows, 1 - float(real) / float(max(1, computed.sum()))


def _fewest_empty(samples: int, ranks: int, most: int) -> int:
    """Rows of a micro-batch, at most `most`, that compute least for so many samples."""
    rows = np.arange(most, 0, -1)[:_MOST_ROWS_TRIED]
    groups = -(-samples // (rows * ranks))
    return int(rows[np.argmin(groups * (rows + _FIXED * most))])


def _partitions(shapes: Buckets, most: int | None) -> list[np.ndarray]:
    """[K] int64 each: the bucket of every shape, shortest first, in ladders of various sizes."""
    alone = np.arange(len(shapes))
    if most is None:
        return [alone]
    lengths, number = np.unique(shapes.seq_len, return_inverse=True)
    found = [alone] if len(shapes) <= most else []
    if len(lengths) < len(shapes) and len(lengths) <= most:
        found.append(number)
    counts = np.bincount(number, weights=np.diff(shapes.offsets)).astype(np.int64)
    tops = lengths
    if len(lengths) > _THINNED:  # some of them, evenly on a logarithmic scale
        even = np.searchsorted(lengths, np.geomspace(lengths[0], lengths[-1], _THINNED))
        tops = np.unique(lengths[np.minimum(even, len(lengths) - 1)])
    for steps in best_steps(lengths, counts, tops, min(most, len(tops))):
        found.append(np.searchsorted(steps, shapes.seq_len))
    return found


def best_steps(
    lengths: np.ndarray, counts: np.ndarray, tops: np.ndarray, most: int
) -> list[np.ndarray]:
    """Ladders that add the fewest tokens in all where each length is rounded up to a step.

    Dynamic programming over (lengths covered, steps used).

    Args:
      lengths, counts: [L] int64, ascending, and how often each occurs.
      tops: [K] int64, those of the lengths that may be steps, the longest among them.
      most: steps of the largest ladder, at most K.

    Returns:
      Ascending steps of ladders of as many steps as `_NUMBERS` names, or fewer, up to `most`.
    """
    upto = np.searchsorted(lengths, tops, side="right")
    samples = np.r_[0, np.cumsum(counts)][np.r_[0, upto]].astype(np.float64)
    tokens = np.r_[0, np.cumsum(counts * lengths)][np.r_[0, upto]].astype(np.float64)
    n = len(tops)
    # waste[i, j]: what lies above tops[i − 1] and up to tops[j − 1], padded to tops[j − 1]
    waste = np.r_[0, tops] * (samples - samples[:, None]) - (tokens - tokens[:, None])
    waste[np.tril_indices(n + 1)] = np.inf
    best, choices, found = waste[0], [np.zeros(n + 1, np.int64)], []
    for used in range(1, most + 1):
        if used in _NUMBERS:
            steps, j = [], n
            for choice in reversed(choices):
                if j:
                    steps.append(int(tops[j - 1]))
                    j = int(choice[j])
            found.append(np.asarray(steps[::-1]))
        through = best[:, None] + waste
        through[0] = waste[0]
        choices.append(through.argmin(axis=0))
        best = through.min(axis=0)
    return found
