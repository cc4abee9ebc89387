"""The usual policy, and AdaptiveLoad's baseline: every micro-batch holds about equal tokens."""

from dataclasses import dataclass

import numpy as np

from alload_jax.planning.policies.bucketed import Bucketed
from alload_jax.planning.policies.limits import refuse_longer_than
from alload_jax.planning.samples import Buckets


@dataclass(frozen=True)
class EqualTokens(Bucketed):
    """B = M_mem // S.

    Attributes:
      m_mem: most tokens of one micro-batch on one rank.
    """

    m_mem: int

    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """See `Bucketed.rows_per_bucket`."""
        refuse_longer_than(buckets, self.m_mem, "equal_tokens")
        return self.m_mem // buckets.seq_len
