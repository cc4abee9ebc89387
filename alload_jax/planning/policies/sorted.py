"""Micro-batches of about equal tokens, sorted by predicted cost before they meet in steps."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from alload_jax.planning.cost import CostFile, CostModel, bucketed_cost
from alload_jax.planning.policies.bucketed import Bucketed, bucketed_fields
from alload_jax.planning.policies.limits import refuse_longer_than
from alload_jax.planning.samples import Buckets
from alload_jax.planning.settings import PlanningConfig


@dataclass(frozen=True)
class Sorted(Bucketed):
    """B = M_mem // S as in `equal_tokens`; the micro-batches of a step are neighbours in cost.

    Steps stand in random order. With independent ranks almost every step has one length, and ranks
    wait only where a step reaches from one length to the next.

    Attributes:
      m_mem: most tokens of one micro-batch on one rank.
      cost: the cost model.
    """

    name: ClassVar[str] = "sorted"
    recalibrates: ClassVar[bool] = True

    m_mem: int
    cost: CostModel

    @classmethod
    def from_config(cls, config: PlanningConfig, costs: CostFile) -> Self:
        """See `Policy.from_config`."""
        fields = bucketed_fields(config, costs)
        return cls(config.required_m_mem(costs), config.predictor(costs), **fields)

    def recalibrated(self, cost: CostModel) -> Self:
        """See `Policy.recalibrated`."""
        return replace(self, cost=cost)

    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """See `Bucketed.rows_per_bucket`."""
        refuse_longer_than(buckets, self.m_mem, self.name)
        return self.m_mem // buckets.seq_len

    def places_of_groups(
        self,
        buckets: Buckets,
        rows: np.ndarray,
        bucket: np.ndarray,
        per_turn: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """See `Bucketed.places_of_groups`; the cheapest groups may fill a last turn in part."""
        cost = bucketed_cost(self.cost, rows, buckets.seq_len)[bucket]
        falling = np.lexsort((rng.random(len(cost)), -cost))
        turns = -(-len(cost) // per_turn)
        full = len(cost) // per_turn
        place_of_turn = np.r_[rng.permutation(full), np.arange(full, turns)]
        turn, within = np.divmod(np.arange(len(cost)), per_turn)
        place = np.empty(len(cost), np.int64)
        place[falling] = place_of_turn[turn] * per_turn + within
        return place
