"""A share of the samples that is held out of training, chosen by the samples' content.

The content of a sample is what its manifest's checksum covers. A sample therefore stays on its side
when the data folder is moved, when other samples are added and for every seed, and copies of one
sample are on the same side.
"""

import math

import numpy as np

from alload_jax.data.manifest import Manifest
from alload_jax.data.splitmix import unit_interval
from alload_jax.errors import InputError

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
