"""Rejects samples that do not fit into a micro-batch of a bucketed policy."""

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.samples import Buckets

_NAMED = 5
_SHORTEST = 256
"""Tokens of the samples for which M_mem is made (`analytic.SHORTEST`)."""


def most_sequences(m_mem: int, seq_len: np.ndarray, sequence_tokens: float) -> np.ndarray:
    """The most sequences of so many tokens that take no more memory than M_mem tokens do.

    Args:
      m_mem: tokens of a micro-batch, in sequences of `_SHORTEST` tokens.
      seq_len: [K] integers.
      sequence_tokens: tokens that take as much memory as the condition of a sequence.

    Returns:
      [K] int64, at least 1.
    """
    budget = m_mem * (1 + sequence_tokens / _SHORTEST)
    within = budget // (np.asarray(seq_len) + sequence_tokens)
    return np.maximum(1, within.astype(np.int64))


def refuse_longer_than(buckets: Buckets, m_mem: int, policy: str) -> None:
    """Raises InputError, naming the samples, if a bucket's sequence is longer than `m_mem`."""
    too_long = np.flatnonzero(buckets.seq_len > m_mem)
    if not len(too_long):
        return
    members = buckets.members[buckets.offsets[too_long[0]] :]
    lengths = np.repeat(buckets.seq_len, np.diff(buckets.offsets))[-len(members) :]
    named = ", ".join(
        f"{sample} ({length} tokens)"
        for sample, length in zip(members[:_NAMED], lengths[:_NAMED], strict=True)
    )
    more = f" and {len(members) - _NAMED} more" if len(members) > _NAMED else ""
    raise InputError(
        f"policy {policy}: m_mem is {m_mem} tokens, shorter than sample {named}{more}; "
        f"it cannot split a sample, so m_mem must be at least {buckets.seq_len[-1]}"
    )
