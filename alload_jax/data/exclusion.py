"""Samples that a run leaves out, without a change to the place of the others."""

from itertools import zip_longest
from pathlib import Path

import numpy as np

from alload_jax.errors import InputError
from alload_jax.files import require_regular
from alload_jax.planning.digest import digest
from alload_jax.planning.step import Step

_MOST_DIGITS = 20


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
        is_number = text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS
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
