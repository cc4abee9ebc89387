"""The usual policy, and AdaptiveLoad's baseline: every micro-batch holds about equal tokens."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from alload_jax.planning.cost import CostFile
from alload_jax.planning.policies.bucketed import Bucketed, bucketed_fields
from alload_jax.planning.policies.limits import refuse_longer_than
from alload_jax.planning.samples import Buckets
from alload_jax.planning.settings import PlanningConfig


@dataclass(frozen=True)
class EqualTokens(Bucketed):
    """B = M_mem // S.

    Attributes:
      m_mem: most tokens of one micro-batch on one rank.
    """

    name: ClassVar[str] = "equal_tokens"

    m_mem: int

    @classmethod
    def from_config(cls, config: PlanningConfig, costs: CostFile) -> Self:
        """See `Policy.from_config`."""
        return cls(config.required_m_mem(costs), **bucketed_fields(config, costs))

    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """See `Bucketed.rows_per_bucket`."""
        refuse_longer_than(buckets, self.m_mem, self.name)
        return self.m_mem // buckets.seq_len
