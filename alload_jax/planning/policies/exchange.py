"""Exchanges samples of equal tokens among the places that a window has for them."""

import numpy as np


def exchanged(
    seq_len: np.ndarray,
    must: np.ndarray,
    held: np.ndarray,
    in_row: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """The sample of each place, so that steps hold what must be placed, in new company.

    Samples of equal tokens are exchanged, which changes no cost; chance decides among equals.

    Args:
      seq_len: [N] integers, tokens of each sample and of the place that has its number.
      must: [N] bool, samples that must be placed.
      held: [N] bool, places that are in steps.
      in_row: [N] bool, places that are in rows.
      rng: decides among equals.

    Returns:
      [N] int64.
    """
    length = _ranked(seq_len)
    places = np.argsort(_narrow(4 * length + 2 * ~held + ~in_row), kind="stable")
    shuffled = rng.permutation(len(length))
    wanted = np.argsort(_narrow(2 * length + ~must)[shuffled], kind="stable")
    sample = np.empty(len(length), np.int64)
    sample[places] = shuffled[wanted]
    return sample


def _ranked(seq_len: np.ndarray) -> np.ndarray:
    """[N] int64: equal where the lengths are. They usually come sorted, which is faster."""
    steps = np.diff(seq_len, prepend=seq_len[:1])
    if (steps <= 0).all() or (steps >= 0).all():
        return np.cumsum(steps != 0)
    return np.unique(seq_len, return_inverse=True)[1]


def _narrow(keys: np.ndarray) -> np.ndarray:
    """Keys of two bytes where they fit: NumPy then sorts by radix."""
    return keys.astype(np.uint16) if keys.max(initial=0) < 1 << 16 else keys
