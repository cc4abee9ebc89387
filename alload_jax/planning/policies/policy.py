"""The one interface behind which all policies stand."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.samples import Samples

RanksMode = Literal["synchronous", "independent"]
"""`synchronous`: all ranks of a micro-batch share one bucket. `independent`: each shape group has
its own.

Ranks of packed policies are always alike: every row has the same shape.
"""


@dataclass(frozen=True)
class RankTopology:
    """Who runs a step.

    Attributes:
      ranks: data-parallel ranks.
      mode: whether ranks share a bucket.
      micro_batches_per_step: micro-batches that a rank accumulates before it updates.
      ranks_per_group: where ranks are independent, consecutive ranks of a shape group, which share
        a bucket; it divides `ranks`.
    """

    ranks: int
    mode: RanksMode = "synchronous"
    micro_batches_per_step: int = 1
    ranks_per_group: int = 1

    def __post_init__(self) -> None:
        if self.ranks % self.ranks_per_group:
            raise InputError(
                f"planning.ranks_per_group is {self.ranks_per_group}, which does not divide the "
                f"plan's {self.ranks} ranks; choose one that does"
            )

    @property
    def ranks_per_bucket(self) -> int:
        """Ranks whose bucketed micro-batches share a bucket: all, or those of a shape group."""
        return self.ranks if self.mode == "synchronous" else self.ranks_per_group


class Policy(Protocol):
    """Turns a data set's columns into an epoch. A frozen dataclass: its fields are its identity."""

    def plan_epoch(
        self, samples: Samples, topology: RankTopology, rng: np.random.Generator
    ) -> EpochPlan:
        """Places every sample once.

        Args:
          samples: N samples.
          topology: ranks and steps.
          rng: decides the order; equal generators give equal epochs.

        Raises:
          InputError: a sample can't be placed; it names the samples and what would place them.
        """
        ...
