"""Which samples are trained on, and how often.

Weights of sources, by patterns over their paths; a share that is held out; those that are excluded.
The content of a sample is what its manifest's checksum covers. A sample therefore stays on its side
when the data folder is moved, when other samples are added and for every seed, and copies of one
sample are on the same side.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import unit_interval
from alload_jax.errors import InputError
from alload_jax.files import Json, require_regular
from alload_jax.planning.epoch import LEAST_WEIGHT, MOST_WEIGHT, Step
from alload_jax.planning.samples import Samples, digest

_NAMED = 6
"""Most folders that a message names."""


@dataclass(frozen=True)
class SourceWeight:
    """How often the samples of some paths stand in an epoch.

    Attributes:
      path: a folder or a file, relative to the prepared input or to the data folder; `*` stands for
        any characters and `?` for one.
      weight: expected number of times in an epoch, from 0.001 to 1000, in millionths: 3 is three
        times, 0.5 every other epoch.
    """

    path: str
    weight: float

    def __post_init__(self) -> None:
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:  # NaN too
            raise InputError(
                f"data.weights: the weight of {self.path!r} is {self.weight}; it must be from "
                f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, and data.exclude leaves samples out"
            )
        if not self.path.strip("/"):
            raise InputError("data.weights: a path is empty; give a folder, or * for all samples")

    @property
    def expression(self) -> str:
        """The regular expression of the paths that it matches."""
        wild = {"*": ".*", "?": "."}
        name = self.path.strip().removeprefix("./").rstrip("/")
        return f"^(?s:{''.join(wild.get(char) or re.escape(char) for char in name)})(?:/|$)"


def source_numbers(weights: Sequence[SourceWeight], paths: np.ndarray | None) -> np.ndarray:
    """The entry of `weights` that each sample follows: the first that matches its path.

    Args:
      weights: `data.weights`.
      paths: [N] str, of the samples; None if the data record none.

    Returns:
      [N] int64; the number of entries where none matches.

    Raises:
      InputError: the samples have no paths, or an entry has no sample.
    """
    if paths is None:
        raise InputError(
            "data.weights: the data folder does not record the paths of its files; prepare the "
            "media again, or merge folders by `alload data merge --add-names`"
        )
    names = pa.array(paths, pa.string())
    matched = np.ones((len(weights) + 1, len(paths)), bool)  # the last row: all others
    for entry, weight in enumerate(weights):
        found = pyarrow.compute.match_substring_regex(names, weight.expression)
        matched[entry] = found.to_numpy(zero_copy_only=False)
    number = matched.argmax(axis=0)
    for entry, weight in enumerate(weights):
        if not (number == entry).any():
            if matched[entry].any():
                raise InputError(
                    f"data.weights: all samples of {weight.path!r} belong to earlier entries, of "
                    "which the first that matches counts; put it before them, or leave it out"
                )
            folders = [*dict.fromkeys(path.rpartition("/")[0] or path for path in paths.tolist())]
            more = f" and {len(folders) - _NAMED} more" if len(folders) > _NAMED else ""
            raise InputError(
                f"data.weights: {weight.path!r} matches no sample; there are "
                f"{', '.join(folders[:_NAMED])}{more}"
            )
    return number


def with_weights(
    samples: Samples, weights: Sequence[SourceWeight], paths: np.ndarray | None
) -> Samples:
    """The samples with their weights, times those that they have; as they are if every one is 1.

    Args:
      samples: N samples.
      weights: `data.weights`.
      paths: as `source_numbers` takes them.

    Raises:
      InputError: see `source_numbers`; or a product is out of bounds.
    """
    if not weights:
        return samples
    values = np.array([each.weight for each in weights] + [1.0])
    found = values[source_numbers(weights, paths)]
    if samples.weight is not None:
        found = found * samples.weight
        if not ((found >= LEAST_WEIGHT) & (found <= MOST_WEIGHT)).all():
            raise InputError(
                "data.weights: times the weights in the data folder, some are not from "
                f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}; change one of both"
            )
    return samples if (found == 1).all() else replace(samples, weight=found)


def weights_identity(weights: Sequence[SourceWeight]) -> Json:
    """What tells these weights from others, as JSON values; empty if every weight is 1."""
    if all(each.weight == 1 for each in weights):
        return {}
    return {"data.weights": [asdict(each) for each in weights]}


class SourceShare(NamedTuple):
    """What the samples of one entry of `data.weights` are of an epoch.

    Attributes:
      path: the entry's; `others` for samples that none matches.
      weight: times that each stands in an epoch.
      samples: number of samples.
      epoch_samples, epoch_tokens: samples and tokens of an epoch, as expected.
      share: of the tokens of an epoch.
    """

    path: str
    weight: float
    samples: int
    epoch_samples: float
    epoch_tokens: float
    share: float


def source_shares(
    samples: Samples, weights: Sequence[SourceWeight], paths: np.ndarray | None
) -> list[SourceShare]:
    """The shares of the entries of `data.weights`, then that of other samples if there are any."""
    number, size = source_numbers(weights, paths), len(weights) + 1
    weight = np.array([each.weight for each in weights] + [1.0])
    times = weight[number] * (1.0 if samples.weight is None else samples.weight)
    counts, expected = (np.bincount(number, each, size) for each in (np.ones(len(times)), times))
    tokens = np.bincount(number, times * samples.seq_len, size)
    names = [*(each.path for each in weights), "others"]
    columns = (weight, counts.astype(int), expected, tokens, tokens / tokens.sum())
    rows = zip(names, *(column.tolist() for column in columns), strict=True)
    return [SourceShare(*row) for row in rows if row[2]]


_SPLIT, _ORDER = 0x5A11DA7E, 0x0DE2
"""Added to checksums, so that the split and the order of samples are independent."""
_MOST_DIGITS = 4


def positions(checksums: np.ndarray, salt: int = _SPLIT) -> np.ndarray:
    """Maps checksums to the unit interval, uniformly, by SplitMix64.

    Args:
      checksums: [N] uint32.
      salt: other salts give independent values.

    Returns:
      [N] float64 from 0 to below 1; equal for equal checksums.
    """
    return unit_interval(checksums.astype(np.uint64) + np.uint64(salt << 32))


def content_order(checksums: np.ndarray) -> np.ndarray:
    """Orders samples at random by their content alone: [N] uint32 → [N] int64, a permutation.

    Copies of one sample stay in the order of their numbers.
    """
    return np.argsort(positions(checksums, _ORDER), kind="stable")


def is_held_out(manifest: Manifest, share: float) -> np.ndarray:
    """Chooses the samples that are held out, as [N] bool. A larger share holds out these and more.

    Args:
      manifest: the samples.
      share: of the samples, from 0 to 1; the share that is held out is near it.

    Raises:
      InputError: the manifest does not tell contents apart, or no sample or every sample would be
        held out.
    """
    if not manifest.tells_content:
        raise InputError(
            f"validation.share is {share}, but {manifest.path} does not record the content of its "
            "samples, by which they are split; give validation.folder"
        )
    place = positions(manifest.contents)
    found = place < share
    count = len(found)
    if place.min() == place.max():
        raise InputError(
            f"validation.share is {share}, but {manifest.path} holds a single sample, or copies of "
            "it, which cannot be split; give validation.folder, or leave the share out"
        )
    if not found.any():
        least = float(place.min())
        unit = 10.0 ** (math.floor(math.log10(max(least, 1e-12))) - _MOST_DIGITS + 2)
        least = (math.floor(least / unit) + 1) * unit  # the least number of a few digits above it
        raise InputError(
            f"validation.share is {share}, which holds out none of the {count:,} samples of "
            f"{manifest.path}; give at least {least:g}, or validation.folder"
        )
    if found.all():
        raise InputError(
            f"validation.share is {share}, which holds out all {count:,} samples of "
            f"{manifest.path} and leaves none to train on; lower it, or give validation.folder"
        )
    return found


def read_excluded(path: str | Path | None, numbers: np.ndarray) -> frozenset[int]:
    """Reads the numbers of samples, one per line; what follows `#` is a comment.

    Args:
      path: the file; None for no samples.
      numbers: [N] int64, of all samples of the data, ascending.

    Returns:
      Their rows among all samples. Numbers of samples that have left the folder are passed over.

    Raises:
      InputError: the file cannot be read, a line is no number of a sample, or no sample is left.
    """
    if path is None:
        return frozenset()
    require_regular(path, "name a text file")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError(
            f"data.exclude: {path} cannot be read ({reason}); name a text file"
        ) from error
    found, samples = set(), int(numbers.max()) + 1
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        # Python refuses to parse thousands of digits.
        is_number = text.isascii() and text.isdigit() and len(text) < 20
        if not (is_number and int(text) < samples):
            raise InputError(
                f"data.exclude: line {number} of {path} is {text[:40]!r}; give a sample's number, "
                f"from 0 to {samples - 1}"
            )
        found.add(int(text))
    rows = np.flatnonzero(np.isin(numbers, sorted(found)))
    if len(rows) == len(numbers):
        raise InputError(f"data.exclude: {path} names all {len(rows)} samples; remove some lines")
    return frozenset(rows.tolist())


def exclusion_identity(excluded: frozenset[int]) -> dict[str, str]:
    """What tells these samples from others, as JSON values."""
    return {"data.exclude": digest(np.asarray(sorted(excluded), np.int64))}


def left_out(step: Step, excluded: frozenset[int]) -> list[int]:
    """The samples of a step that are left out, as often as they would be trained."""
    if not excluded:
        return []
    times = {
        time
        for part in step.micro_batches
        for time in zip_longest(part.samples, part.repetitions, fillvalue=0)
    }
    return [sample for sample, _ in times if sample in excluded]
