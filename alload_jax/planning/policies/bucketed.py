"""Bucketed policies: micro-batches of one shape, drawn in random order.

Every shape of a micro-batch is a program to compile, and rows without a sample are computed too.
Where that costs too much, shapes of similar length share a bucket, whose rows are padded to the
longest of them (`ladder.py`).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from typing_extensions import override

from alload_jax.errors import InputError, require_positive
from alload_jax.planning.cost import CostFile, CostModel, bucketed_cost
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies.ladder import Ladder, choose_ladder
from alload_jax.planning.policies.policy import (
    MOST,
    PlanSettings,
    Policy,
    RankTopology,
    named,
)
from alload_jax.planning.samples import Buckets, Samples

_SHORTEST = 256
"""Tokens of the samples for which M_mem is made (`analytic.SHORTEST`)."""


@dataclass(frozen=True)
class BucketedSettings(PlanSettings):
    """The settings of bucketed policies.

    Attributes:
      max_programs: maximum number of buckets of a bucketed policy, each of which is a program to
        compile; shapes of similar length share one. Null for what compiles in ten minutes, at most
        64.
    """

    max_programs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("planning.", self, "max_programs", most=MOST)

    def bucketed_fields(self, costs: CostFile) -> dict[str, Any]:
        """Fields of `Bucketed`; `costs` as in `exponent`."""
        given = self.max_programs
        return {
            "max_programs": costs.most_programs() if given is None else given,
            "sequence_tokens": costs.sequence_tokens(),
        }


@dataclass(frozen=True, kw_only=True)
class Bucketed(Policy):
    """A policy whose micro-batches hold samples of one bucket.

    Attributes:
      max_programs: most buckets.
      sequence_tokens: tokens that take as much memory as the condition of a sequence.
      ladder: the buckets' lengths and rows; None until `fitted` chooses them.
    """

    merges: ClassVar[bool] = True
    """Whether shapes of similar length may share a bucket."""
    evens: ClassVar[bool] = True
    """Whether micro-batches may have fewer rows than fit, where that leaves fewer empty."""

    max_programs: int = 64
    sequence_tokens: float = 0.0
    ladder: Ladder | None = None

    @abstractmethod
    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """[K] int64, the most rows of a micro-batch on one rank, at least 1 each.

        Raises:
          InputError: a bucket can't be placed.
        """

    @override
    def fitted(self, samples: Samples, topology: RankTopology, program_share: float = 0.0) -> Self:
        buckets = samples.buckets()
        self.rows_per_bucket(buckets)  # refuses what cannot be placed
        ladder = choose_ladder(
            buckets,
            self._bounded_rows,
            topology.ranks_per_bucket,
            self.max_programs if self.merges else None,
            program_share,
            evenly=self.evens,
        )
        return replace(self, ladder=ladder)

    def _bounded_rows(self, buckets: Buckets) -> np.ndarray:
        """As `rows_per_bucket`, in no more memory than M_mem tokens in samples of `_SHORTEST`."""
        rows, m_mem = self.rows_per_bucket(buckets), getattr(self, "m_mem", None)
        if m_mem is None:
            return rows
        budget = m_mem * (1 + self.sequence_tokens / _SHORTEST)
        within = budget // (buckets.seq_len + self.sequence_tokens)
        return np.minimum(rows, np.maximum(1, within.astype(np.int64)))

    def classes(self, samples: Samples, topology: RankTopology) -> tuple[Buckets, np.ndarray]:
        """The buckets of samples, and the rows of a micro-batch of each: [K] int64."""
        ladder = self.ladder
        if ladder is None:
            ladder = self.fitted(samples.typical(), topology).ladder
            assert ladder is not None
        return ladder.buckets(samples.buckets())

    def places_of_groups(
        self,
        buckets: Buckets,
        rows: np.ndarray,
        bucket: np.ndarray,
        per_turn: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Where each group stands in the epoch: at random.

        Args:
          buckets: of the data set.
          rows: [K] int64, rows of a micro-batch of each bucket.
          bucket: [G] int64, the bucket of each group.
          per_turn: groups that the ranks compute at once.
          rng: decides the order.

        Returns:
          [G] int64, a permutation; places [n·per_turn, (n + 1)·per_turn) are computed at once.
        """
        del buckets, rows, per_turn
        return rng.permutation(len(bucket))

    def plan_epoch(
        self, samples: Samples, topology: RankTopology, rng: np.random.Generator
    ) -> EpochPlan:
        """See `Policy.plan_epoch`.

        Each bucket is shuffled and cut into groups: a micro-batch of one shape group's ranks
        (`independent`) or of all ranks (`synchronous`). The groups are assigned to steps in the
        order of `places_of_groups`. A bucket's last group may be short; its missing rows are
        padding, which ranks share evenly. A shape group without work at the end has no micro-batch
        there.
        """
        buckets, rows = self.classes(samples, topology)
        per_bucket = topology.ranks_per_bucket
        sizes, group_size = np.diff(buckets.offsets), rows * per_bucket
        numbers = np.arange(len(buckets))
        groups = -(-sizes // group_size)
        # Of each position of `members`: its bucket, its group, and its place within the group.
        of = np.repeat(numbers, sizes)
        index, member = np.divmod(np.arange(sizes.sum()) - buckets.offsets[of], group_size[of])
        group = (np.cumsum(groups) - groups)[of] + index
        bucket = np.repeat(numbers, groups)
        per_turn = topology.ranks // per_bucket
        place_of_group = self.places_of_groups(buckets, rows, bucket, per_turn, rng)
        bucket_of_place = np.empty_like(bucket)
        bucket_of_place[place_of_group] = bucket

        work_bucket = np.repeat(bucket_of_place, per_bucket)
        work_of_sample = place_of_group[group] * per_bucket + member % per_bucket
        counts = np.bincount(work_of_sample, minlength=len(work_bucket))
        turn, rank = np.divmod(np.arange(len(work_bucket)), topology.ranks)
        step, micro_batch = np.divmod(turn, topology.micro_batches_per_step)
        shuffled = [
            rng.permutation(buckets.members[start:stop])
            for start, stop in zip(buckets.offsets[:-1], buckets.offsets[1:], strict=True)
        ]
        return EpochPlan(
            ranks=topology.ranks,
            steps=int(step[-1]) + 1,
            step=step,
            micro_batch=micro_batch,
            rank=rank,
            rows=rows[work_bucket],
            padded_len=buckets.seq_len[work_bucket],
            shape=buckets.shape[work_bucket],
            offsets=np.r_[0, np.cumsum(counts)],
            sample=np.concatenate(shuffled)[np.argsort(work_of_sample, kind="stable")],
            seq_len=samples.seq_len,
        )


def _refuse_longer_than(buckets: Buckets, m_mem: int, policy: str) -> None:
    """Raises InputError, naming the samples, if a bucket's sequence is longer than `m_mem`."""
    too_long = np.flatnonzero(buckets.seq_len > m_mem)
    if not len(too_long):
        return
    members = buckets.members[buckets.offsets[too_long[0]] :]
    lengths = np.repeat(buckets.seq_len, np.diff(buckets.offsets))[-len(members) :]
    raise InputError(
        f"policy {policy}: m_mem is {m_mem} tokens, shorter than sample {named(members, lengths)}; "
        f"it cannot split a sample, so m_mem must be at least {buckets.seq_len[-1]}"
    )


_MOST_ROWS = 2**20


@dataclass(frozen=True)
class FixedSettings(BucketedSettings):
    """The settings of `Fixed`.

    Attributes:
      rows: for `fixed`, a batch size, or one for each bucket's name (`17x16x16`).
    """

    rows: int | dict[str, int] | None = None


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
    evens: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("rows",)

    rows: int | Mapping[str, int]
    m_mem: int | None = None

    @classmethod
    @override
    def from_config(cls, config: FixedSettings, costs: CostFile) -> Self:
        assert config.rows is not None  # it is required
        return cls(config.rows, config.tokens_bound(costs), **config.bucketed_fields(costs))

    @override
    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        if self.m_mem is not None:
            _refuse_longer_than(buckets, self.m_mem, self.name)
        rows = np.asarray([self._rows(buckets.name(k)) for k in range(len(buckets))], np.int64)
        most = np.inf if self.m_mem is None else self.m_mem
        for bucket in np.flatnonzero(rows * buckets.seq_len > most)[:1]:
            seq_len = buckets.seq_len[bucket]
            raise InputError(
                f"planning.rows gives bucket {buckets.name(bucket)} {rows[bucket]} rows of "
                f"{seq_len} tokens, over m_mem = {most}; at most {most // seq_len} "
                "rows fit"
            )
        return rows

    def _rows(self, bucket: str) -> int:
        rows = self.rows.get(bucket) if isinstance(self.rows, Mapping) else self.rows
        if rows is None:
            names = ", ".join(self.rows) if isinstance(self.rows, Mapping) else ""
            raise InputError(f"planning.rows has no bucket {bucket}; it names {names or 'none'}")
        if not 1 <= rows <= _MOST_ROWS:
            bound = "at least 1" if rows < 1 else f"at most {_MOST_ROWS:,}"
            raise InputError(f"planning.rows gives bucket {bucket} {rows} rows; it must be {bound}")
        return rows


@dataclass(frozen=True)
class EqualTokens(Bucketed):
    """B = M_mem // S.

    Attributes:
      m_mem: most tokens of one micro-batch on one rank.
    """

    name: ClassVar[str] = "equal_tokens"

    m_mem: int

    @classmethod
    @override
    def from_config(cls, config: BucketedSettings, costs: CostFile) -> Self:
        return cls(config.required_m_mem(costs), **config.bucketed_fields(costs))

    @override
    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        _refuse_longer_than(buckets, self.m_mem, self.name)
        return self.m_mem // buckets.seq_len


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
    @override
    def from_config(cls, config: BucketedSettings, costs: CostFile) -> Self:
        m_comp = config.m_comp_value or costs.m_comp
        return cls(
            m_mem=config.required_m_mem(costs),
            m_comp=None if m_comp is None else float(m_comp),
            p=config.exponent(costs),
            **config.bucketed_fields(costs),
        )

    @override
    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        _refuse_longer_than(buckets, self.m_mem, self.name)
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


@dataclass(frozen=True)
class Sorted(EqualTokens):
    """B = M_mem // S as in `equal_tokens`; the micro-batches of a step are neighbours in cost.

    Steps stand in random order. With independent ranks almost every step has one length, and ranks
    wait only where a step reaches from one length to the next.

    Attributes:
      cost: the cost model.
    """

    name: ClassVar[str] = "sorted"
    recalibrates: ClassVar[tuple[str, ...]] = ("epoch",)

    cost: CostModel

    @classmethod
    @override
    def from_config(cls, config: BucketedSettings, costs: CostFile) -> Self:
        fields = config.bucketed_fields(costs)
        return cls(config.required_m_mem(costs), config.predictor(costs), **fields)

    @override
    def recalibrated(self, cost: CostModel) -> Self:
        return replace(self, cost=cost)

    @override
    def places_of_groups(
        self,
        buckets: Buckets,
        rows: np.ndarray,
        bucket: np.ndarray,
        per_turn: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """The cheapest groups may fill a last turn in part."""
        cost = bucketed_cost(self.cost, rows, buckets.seq_len)[bucket]
        falling = np.lexsort((rng.random(len(cost)), -cost))
        turns = -(-len(cost) // per_turn)
        full = len(cost) // per_turn
        place_of_turn = np.r_[rng.permutation(full), np.arange(full, turns)]
        turn, within = np.divmod(np.arange(len(cost)), per_turn)
        place = np.empty(len(cost), np.int64)
        place[falling] = place_of_turn[turn] * per_turn + within
        return place
