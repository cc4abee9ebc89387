"""A batch size for every bucket, chosen by hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile
from alload_jax.planning.policies.bucketed import Bucketed, bucketed_fields
from alload_jax.planning.policies.limits import refuse_longer_than
from alload_jax.planning.samples import Buckets
from alload_jax.planning.settings import PlanningConfig


@dataclass(frozen=True)
class Fixed(Bucketed):
    """B as given.

    Attributes:
      rows: one number for all buckets, or one for each bucket's name (`17x16x16`, or the
        sequence length where the manifest has no shapes).
      m_mem: most tokens of one micro-batch on one rank; None for no bound.
    """

    name: ClassVar[str] = "fixed"
    merges: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("rows",)

    rows: int | Mapping[str, int]
    m_mem: int | None = None

    @classmethod
    def from_config(cls, config: PlanningConfig, costs: CostFile) -> Self:
        """See `Policy.from_config`."""
        assert config.rows is not None  # it is required
        return cls(config.rows, config.tokens_bound(costs), **bucketed_fields(config, costs))

    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """See `Bucketed.rows_per_bucket`."""
        if self.m_mem is not None:
            refuse_longer_than(buckets, self.m_mem, self.name)
        rows = np.asarray([self._rows(buckets.name(k)) for k in range(len(buckets))], np.int64)
        for bucket in np.flatnonzero(rows < 1).tolist():
            raise InputError(
                f"planning.rows gives bucket {buckets.name(bucket)} {rows[bucket]} rows; "
                "it must be at least 1"
            )
        if self.m_mem is not None:
            self._refuse_over_memory(buckets, rows, self.m_mem)
        return rows

    def _rows(self, bucket: str) -> int:
        if not isinstance(self.rows, Mapping):
            return self.rows
        if bucket not in self.rows:
            raise InputError(
                f"planning.rows has no bucket {bucket}; it names {', '.join(self.rows) or 'none'}"
            )
        return self.rows[bucket]

    def _refuse_over_memory(self, buckets: Buckets, rows: np.ndarray, m_mem: int) -> None:
        for bucket in np.flatnonzero(rows * buckets.seq_len > m_mem).tolist():
            seq_len = buckets.seq_len[bucket]
            raise InputError(
                f"planning.rows gives bucket {buckets.name(bucket)} {rows[bucket]} rows of "
                f"{seq_len} tokens, over m_mem = {m_mem}; at most {m_mem // seq_len} rows fit"
            )
