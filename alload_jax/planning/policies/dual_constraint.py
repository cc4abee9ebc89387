"""AdaptiveLoad's policy (arXiv 2605.17923): micro-batches bounded in memory and in compute."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from alload_jax.planning.cost import CostFile
from alload_jax.planning.policies.bucketed import Bucketed, bucketed_fields
from alload_jax.planning.policies.limits import refuse_longer_than
from alload_jax.planning.samples import Buckets
from alload_jax.planning.settings import PlanningConfig

_ROUNDING = 1e-9


@dataclass(frozen=True)
class DualConstraint(Bucketed):
    """B = max(1, min(M_mem // S, M_comp // S^p)).

    Attributes:
      m_mem: most tokens of one micro-batch on one rank.
      m_comp: most B·S^p of one micro-batch; None for that of the longest sequence at B = 1.
      p: how cost grows with sequence length.
    """

    name: ClassVar[str] = "dual_constraint"
    has_m_comp: ClassVar[bool] = True
    m_comp_by_default: ClassVar[bool] = True

    m_mem: int
    m_comp: float | None = None
    p: float = 2.0

    @classmethod
    def from_config(cls, config: PlanningConfig, costs: CostFile) -> Self:
        """See `Policy.from_config`."""
        m_comp = config.m_comp_value or costs.m_comp
        return cls(
            m_mem=config.required_m_mem(costs),
            m_comp=None if m_comp is None else float(m_comp),
            p=config.exponent(costs),
            **bucketed_fields(config, costs),
        )

    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """See `Bucketed.rows_per_bucket`."""
        refuse_longer_than(buckets, self.m_mem, self.name)
        with np.errstate(over="ignore"):
            cost = buckets.seq_len.astype(np.float64) ** self.p
        m_comp = cost.max() if self.m_comp is None else self.m_comp
        by_memory = self.m_mem // buckets.seq_len
        # A bound that is a whole number of rows must not lose one to rounding.
        with np.errstate(invalid="ignore"):
            exact = np.where(np.isfinite(cost), m_comp / cost, 0) * (1 + _ROUNDING)
        by_compute = np.floor(np.minimum(exact, by_memory)).astype(np.int64)
        return np.maximum(1, by_compute)

    def m_comp_measure(self, seq_len: np.ndarray) -> np.ndarray:
        """S^p; see `Policy.m_comp_measure`."""
        return np.asarray(seq_len, np.float64) ** self.p

    def m_comp_range(self, seq_len: np.ndarray) -> tuple[float, float]:
        """Up to the costliest micro-batch that memory holds; see `Policy.m_comp_range`."""
        alone = self.m_comp_measure(seq_len)
        rows = np.maximum(1, self.m_mem // seq_len)  # the plan refuses what has room for none
        return float(alone.min()), float((alone * rows).max())
