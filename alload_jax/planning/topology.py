"""The data-parallel ranks of a step, and which of them share a bucket."""

from dataclasses import dataclass
from typing import Literal

from alload_jax.errors import InputError

RanksMode = Literal["synchronous", "independent"]
"""`synchronous`: all ranks of a micro-batch share one bucket. `independent`: each shape group has
its own.

All ranks of packed policies have rows of the same shape in both modes.
"""


@dataclass(frozen=True)
class RankTopology:
    """The ranks of a step.

    Attributes:
      ranks: number of data-parallel ranks.
      mode: whether ranks share a bucket.
      micro_batches_per_step: micro-batches that a rank accumulates before it updates.
      ranks_per_group: in mode `independent`, number of consecutive ranks of a shape group, which
        share a bucket; it divides `ranks`.
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
