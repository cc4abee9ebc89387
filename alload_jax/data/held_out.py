"""Samples that are not trained on: a share that is held out, and those that are excluded.

The content of a sample is what its manifest's checksum covers. A sample therefore stays on its side
when the data folder is moved, when other samples are added and for every seed, and copies of one
sample are on the same side.
"""

import math
from itertools import zip_longest
from pathlib import Path

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import unit_interval
from alload_jax.errors import InputError
from alload_jax.files import require_regular
from alload_jax.planning.epoch import Step
from alload_jax.planning.samples import digest

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
    place = positions(manifest.checksum)
    found = place < share
    count = len(found)
    if not found.any():
        least = _rounded_up(float(place.min()))
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


def _rounded_up(value: float) -> float:
    """The least number of a few digits above a value."""
    unit = 10.0 ** (math.floor(math.log10(max(value, 1e-12))) - _MOST_DIGITS + 2)
    return (math.floor(value / unit) + 1) * unit


_LONGEST_NUMBER = 20


def read_excluded(path: str | Path | None, samples: int) -> frozenset[int]:
    """Reads the numbers of samples, one per line; what follows `#` is a comment.

    Args:
      path: the file; None for no samples.
      samples: number of samples of the data.

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
    found = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        # Python refuses to parse thousands of digits.
        is_number = text.isascii() and text.isdigit() and len(text) < _LONGEST_NUMBER
        if not (is_number and int(text) < samples):
            raise InputError(
                f"data.exclude: line {number} of {path} is {text[:40]!r}; give a sample's number, "
                f"from 0 to {samples - 1}"
            )
        found.add(int(text))
    if len(found) == samples:
        raise InputError(f"data.exclude: {path} names all {samples} samples; remove some lines")
    return frozenset(found)


def exclusion_identity(excluded: frozenset[int]) -> dict[str, str]:
    """What tells these samples from others, as JSON values."""
    return {"data.exclude": digest(np.asarray(sorted(excluded), np.int64))}


def count_excluded(step: Step, excluded: frozenset[int]) -> int:
    """Returns how many samples of a step are left out."""
    if not excluded:
        return 0
    times = {
        time
        for part in step.micro_batches
        for time in zip_longest(part.samples, part.repetitions, fillvalue=0)
    }
    return sum(sample in excluded for sample, _ in times)
