"""What all bucketed policies share: micro-batches of one shape, drawn in random order."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.samples import Buckets, Samples
from alload_jax.planning.topology import RankTopology


class Bucketed(Policy):
    """A policy whose micro-batches hold samples of one shape."""

    @abstractmethod
    def rows_per_bucket(self, buckets: Buckets) -> np.ndarray:
        """[K] int64, at least 1 each. Raises InputError where a bucket can't be placed."""

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
        buckets = samples.buckets()
        # A refusal names samples, which a weighted epoch may lack.
        rows = self.rows_per_bucket(buckets if samples.counts is None else samples.once().buckets())
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
