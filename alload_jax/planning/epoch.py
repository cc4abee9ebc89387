"""One epoch of a plan, as columns: which rank takes which samples in which micro-batch."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class RowShape:
    """The properties that all packed rows of all epochs share.

    A part is the portion of a sample on one rank. A whole sample is one part. A split sample is
    shared by the `context` ranks of a group: the first A tokens of each rank's row are its split
    region, and the group's c·A split tokens hold the group's split samples one after another. Rank
    r of the group holds split tokens [r·A, (r + 1)·A).

    Attributes:
      capacity: T, tokens of a row.
      segments: M, maximum number of whole samples of a row.
      align: samples begin at multiples of this many tokens.
      context: c, number of consecutive ranks of a group; 1 if no sample is split.
      split_sizes: allowed values of A in all epochs, ascending from 0; each needs a program.
      region_segments: maximum number of samples that a group's ranks share.
      longest_whole: maximum tokens of a sample that is not split, in all epochs.
    """

    capacity: int
    segments: int
    align: int = 1
    context: int = 1
    split_sizes: tuple[int, ...] = (0,)
    region_segments: int = 0
    longest_whole: int = 0

    def footprint(self, seq_len: np.ndarray) -> np.ndarray:
        """Tokens of a row that samples occupy, including alignment: [N] → [N] int64."""
        return -(-np.asarray(seq_len, np.int64) // self.align) * self.align


@dataclass(frozen=True, kw_only=True)
class Packing(RowShape):
    """Positions of the parts of a packed epoch in rows of this shape.

    Attributes:
      split_tokens: [W] int64, A of each micro-batch, equal over the ranks of a step.
      tokens: [P] int64, tokens of each part.
      offset: [P] int64, where the part begins in its rank's row.
      is_split: [P] bool, whether the part belongs to a split sample.
    """

    split_tokens: np.ndarray
    tokens: np.ndarray
    offset: np.ndarray
    is_split: np.ndarray


@dataclass(frozen=True)
class EpochPlan:
    """Every micro-batch of every rank over one epoch, ordered by (step, micro_batch, rank).

    Attributes:
      ranks: data-parallel ranks.
      steps: optimizer steps.
      step, micro_batch, rank: [W] int64, where each micro-batch stands.
      rows: [W] int64, rows it computes, zero-weight padding rows included; 1 where packed.
      padded_len: [W] int64, tokens of each of its rows.
      shape: [W, 3] int64, (frames, height, width) of its rows; zeros where unknown or packed.
      offsets: [W + 1] int64; micro-batch w holds `sample[offsets[w]:offsets[w + 1]]`.
      sample: [P] int64, the manifest's row numbers; each stands here once (or `counts` times), a
        split sample once for each rank that holds a part of it.
      packing: where parts lie in packed rows; None for bucketed micro-batches, whose rows hold a
        sample each.
      counts: [N] int64, how often each sample stands in the epoch; None for once each.
      repetition: [P] int64, which of the sample's times in the epoch a part belongs to; None if
        all are the first.
    """

    ranks: int
    steps: int
    step: np.ndarray
    micro_batch: np.ndarray
    rank: np.ndarray
    rows: np.ndarray
    padded_len: np.ndarray
    shape: np.ndarray
    offsets: np.ndarray
    sample: np.ndarray
    packing: Packing | None = None
    counts: np.ndarray | None = None
    repetition: np.ndarray | None = None

    def of_step(self, step: int) -> slice:
        """The micro-batches of one step, as a slice of the columns [W]."""
        start, stop = np.searchsorted(self.step, [step, step + 1])
        return slice(int(start), int(stop))

    def only(self, step: int) -> "EpochPlan":
        """One step as an epoch of its own."""
        work = self.of_step(step)
        parts = slice(int(self.offsets[work.start]), int(self.offsets[work.stop]))
        packing = self.packing and replace(
            self.packing,
            split_tokens=self.packing.split_tokens[work],
            tokens=self.packing.tokens[parts],
            offset=self.packing.offset[parts],
            is_split=self.packing.is_split[parts],
        )
        return replace(
            self,
            steps=1,
            step=self.step[work] - step,
            micro_batch=self.micro_batch[work],
            rank=self.rank[work],
            rows=self.rows[work],
            padded_len=self.padded_len[work],
            shape=self.shape[work],
            offsets=self.offsets[work.start : work.stop + 1] - self.offsets[work.start],
            sample=self.sample[parts],
            packing=packing,
            repetition=None if self.repetition is None else self.repetition[parts],
        )

    def parts_of(self, micro_batch: int) -> slice:
        """The parts of the micro-batch at one position of the columns [W], as a slice of [P]."""
        return slice(int(self.offsets[micro_batch]), int(self.offsets[micro_batch + 1]))

    def micro_batch_of_part(self) -> np.ndarray:
        """[P] int64: the position in the columns [W] that each part belongs to."""
        return np.repeat(np.arange(len(self.step)), np.diff(self.offsets))

    def slots(self) -> np.ndarray:
        """[W] int64: samples that each packed row has room for, those it shares included."""
        if self.packing is None:
            return np.zeros(len(self.step), np.int64)
        shared = np.where(self.packing.split_tokens > 0, self.packing.region_segments, 0)
        return self.packing.segments + shared

    def repetitions(self) -> np.ndarray:
        """[P] int64: which of the sample's times in the epoch each part belongs to."""
        return np.zeros(len(self.sample), np.int64) if self.repetition is None else self.repetition

    def part_tokens(self, seq_len: np.ndarray) -> np.ndarray:
        """[P] int64: tokens of each part, from those of every sample of the manifest ([N])."""
        return self.packing.tokens if self.packing else seq_len[self.sample]

    def part_offsets(self) -> np.ndarray:
        """[P] int64: where each part begins in its micro-batch, rows laid end to end."""
        if self.packing:
            return self.packing.offset
        owner = self.micro_batch_of_part()
        return (np.arange(len(owner)) - self.offsets[owner]) * self.padded_len[owner]
