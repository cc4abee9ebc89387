"""What all bucketed policies share: micro-batches of one shape, drawn in random order.

Every shape of a micro-batch is a program to compile, and rows without a sample are computed too.
Where that costs too much, shapes of similar length share a bucket, whose rows are padded to the
longest of them (`ladder.py`).
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.planning.cost import CostFile
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies.ladder import Ladder, choose_ladder
from alload_jax.planning.policies.limits import most_sequences
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.samples import Buckets, Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.topology import RankTopology


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

    max_programs: int = 64
    sequence_tokens: float = 0.0
    ladder: Ladder | None = None

    @abstractmethod
    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """[K] int64, the most rows of a micro-batch on one rank, at least 1 each.

        Raises:
          InputError: a bucket can't be placed.
        """

    def fitted(self, samples: Samples, topology: RankTopology, program_share: float = 0.0) -> Self:
        """See `Policy.fitted`."""
        buckets = samples.buckets()
        self.rows_per_bucket(buckets)  # refuses what cannot be placed
        ladder = choose_ladder(
            buckets,
            self._bounded_rows,
            topology.ranks_per_bucket,
            self.max_programs if self.merges else None,
            program_share,
        )
        return replace(self, ladder=ladder)

    def _bounded_rows(self, buckets: Buckets) -> np.ndarray:
        rows, m_mem = self.rows_per_bucket(buckets), getattr(self, "m_mem", None)
        if m_mem is None:
            return rows
        within = most_sequences(m_mem, buckets.seq_len, self.sequence_tokens)
        return np.minimum(rows, within)

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
        self,
        samples: Samples,
        topology: RankTopology,
        rng: np.random.Generator,
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
        cut = _cut_into_groups(buckets, rows * per_bucket)
        per_turn = topology.ranks // per_bucket
        place_of_group = self.places_of_groups(buckets, rows, cut.bucket, per_turn, rng)
        bucket_of_place = np.empty_like(cut.bucket)
        bucket_of_place[place_of_group] = cut.bucket

        work_bucket = np.repeat(bucket_of_place, per_bucket)
        work_of_sample = place_of_group[cut.group] * per_bucket + cut.member % per_bucket
        counts = np.bincount(work_of_sample, minlength=len(work_bucket))
        turn, rank = np.divmod(np.arange(len(work_bucket)), topology.ranks)
        step, micro_batch = np.divmod(turn, topology.micro_batches_per_step)
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
            sample=_shuffle_within(buckets, rng)[np.argsort(work_of_sample, kind="stable")],
        )


def bucketed_fields(config: PlanningConfig, costs: CostFile) -> dict[str, Any]:
    """The fields of `Bucketed` by a config."""
    given = config.max_programs
    return {
        "max_programs": costs.most_programs() if given is None else given,
        "sequence_tokens": costs.sequence_tokens(),
    }


@dataclass(frozen=True)
class _Groups:
    """How positions of `Buckets.members` fall into groups of equal size.

    Attributes:
      group: [N] int64, the group of each position.
      member: [N] int64, its place within the group.
      bucket: [G] int64, the bucket of each group.
    """

    group: np.ndarray
    member: np.ndarray
    bucket: np.ndarray


def _cut_into_groups(buckets: Buckets, group_size: np.ndarray) -> _Groups:
    """Cuts each bucket into groups of `group_size` ([K]) members, the last one maybe short."""
    sizes = np.diff(buckets.offsets)
    groups = -(-sizes // group_size)
    bucket = np.repeat(np.arange(len(buckets)), sizes)
    index, member = np.divmod(np.arange(sizes.sum()) - buckets.offsets[bucket], group_size[bucket])
    first = np.cumsum(groups) - groups
    return _Groups(first[bucket] + index, member, np.repeat(np.arange(len(buckets)), groups))


def _shuffle_within(buckets: Buckets, rng: np.random.Generator) -> np.ndarray:
    """The members, each bucket's in a new random order."""
    parts = [
        rng.permutation(buckets.members[start:stop])
        for start, stop in zip(buckets.offsets[:-1], buckets.offsets[1:], strict=True)
    ]
    return np.concatenate(parts)
