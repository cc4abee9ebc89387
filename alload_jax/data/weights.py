"""Weights of sources: how often samples stand in an epoch, by patterns over their paths."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.epoch import LEAST_WEIGHT, MOST_WEIGHT
from alload_jax.planning.samples import Samples

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
    names, matched = pa.array(paths, pa.string()), np.zeros((len(weights), len(paths)), bool)
    for entry, weight in enumerate(weights):
        found = pyarrow.compute.match_substring_regex(names, weight.expression)
        matched[entry] = found.to_numpy(zero_copy_only=False)
    number = np.full(len(paths), len(weights))
    for entry in reversed(range(len(weights))):
        number[matched[entry]] = entry
    for entry, weight in enumerate(weights):
        if not (number == entry).any():
            raise InputError(_unmatched(weight.path, bool(matched[entry].any()), paths))
    return number


def with_weights(
    samples: Samples, weights: Sequence[SourceWeight], paths: np.ndarray | None
) -> Samples:
    """The samples with their weights; as they are if every weight is 1.

    Args:
      samples: N samples.
      weights: `data.weights`.
      paths: as `source_numbers` takes them.

    Raises:
      InputError: see `source_numbers`.
    """
    if not weights:
        return samples
    values = np.array([each.weight for each in weights] + [1.0])
    found = values[source_numbers(weights, paths)]
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
    number = source_numbers(weights, paths)
    counts = np.bincount(number, minlength=len(weights) + 1)
    tokens = np.bincount(number, weights=samples.seq_len, minlength=len(weights) + 1)
    weight = np.array([each.weight for each in weights] + [1.0])
    names = [*(each.path for each in weights), "others"]
    whole = float((tokens * weight).sum())
    columns = (weight, counts, counts * weight, tokens * weight, tokens * weight / whole)
    rows = zip(names, *(column.tolist() for column in columns), strict=True)
    return [SourceShare(*row) for row in rows if row[2]]


def _unmatched(path: str, matches: bool, paths: np.ndarray) -> str:
    if matches:
        return (
            f"data.weights: all samples of {path!r} belong to earlier entries, of which the first "
            "that matches counts; put it before them, or leave it out"
        )
    folders = list(dict.fromkeys(name.rpartition("/")[0] or name for name in paths.tolist()))
    more = f" and {len(folders) - _NAMED} more" if len(folders) > _NAMED else ""
    return (
        f"data.weights: {path!r} matches no sample; there are {', '.join(folders[:_NAMED])}{more}"
    )
