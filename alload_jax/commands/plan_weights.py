"""Weights of sources in `alload plan`: from flags or a config, and what they make of an epoch."""

import argparse
from collections.abc import Sequence

import numpy as np

from alload_jax.data.weights import SourceShare, SourceWeight, source_shares, with_weights
from alload_jax.errors import InputError
from alload_jax.planning.samples import Samples


def weights_of_flags(options: argparse.Namespace) -> tuple[SourceWeight, ...]:
    """The pairs of `--weights PATH=WEIGHT ...`.

    Raises:
      InputError: a word is no such pair, or the samples have no paths.
    """
    if options.weights and options.workload:
        raise InputError(
            "alload plan: --weights needs the paths of samples, which a workload has not; give "
            "--manifest"
        )
    found = []
    for word in options.weights or ():
        path, equals, number = word.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"alload plan: --weights {word}: give PATH=WEIGHT, as portraits=3")
        found.append(SourceWeight(path, value))
    return tuple(found)


def weigh(
    samples: Samples, weights: Sequence[SourceWeight], paths: np.ndarray | None
) -> tuple[Samples, tuple[SourceShare, ...]]:
    """The samples with their weights, and what each source is of an epoch; nothing without any.

    Raises:
      InputError: the samples have no paths, or an entry has no sample.
    """
    shares = source_shares(samples, weights, paths) if weights else []
    return with_weights(samples, weights, paths), tuple(shares)


def described(shares: Sequence[SourceShare]) -> str:
    """What follows the number of samples in the description of a data set."""
    if not shares:
        return ""
    return f", {sum(each.epoch_samples for each in shares):,.10g} an epoch by weights"
