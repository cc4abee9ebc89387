"""One epoch of a plan, as columns: which rank takes which samples in which micro-batch.

A sample of weight w stands floor(w) or ceil(w) times in an epoch, and in any k epochs in a row
floor(k·w) or ceil(k·w) times. So do n samples alike: together floor(n·w) or ceil(n·w) times, so
that epochs hold about equally many of each length. This is systematic sampling: sample i of n has
the phase (i + u)/n, and stands in epoch e as often as e·w + phase to (e + 1)·w + phase pass whole
numbers; by Hermite's identity Σ floor(x + i/n) = floor(n·x) over the n samples.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from alload_jax.errors import InputError


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
      seconds_per_split_token: of communication, for each of the A tokens of a rank that are split.
    """

    capacity: int
    segments: int
    align: int = 1
    context: int = 1
    split_sizes: tuple[int, ...] = (0,)
    region_segments: int = 0
    longest_whole: int = 0
    seconds_per_split_token: float = 0.0

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
      seq_len: [N] int64, tokens of every sample of the manifest.
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
    seq_len: np.ndarray
    packing: Packing | None = None
    counts: np.ndarray | None = None
    repetition: np.ndarray | None = None

    def of_step(self, step: int) -> slice:
        """The micro-batches of one step, as a slice of the columns [W]."""
        start, stop = np.searchsorted(self.step, [step, step + 1])
        return slice(int(start), int(stop))

    def only(self, step: int, stop: int | None = None) -> "EpochPlan":
        """One step, or those from `step` up to `stop`, as an epoch of its own."""
        stop = step + 1 if stop is None else stop
        work = slice(self.of_step(step).start, self.of_step(stop).start)
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
            steps=stop - step,
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

    def samples_per_step(self) -> np.ndarray:
        """[steps] float64: samples of each step; a split sample counts by its parts."""
        share = self.part_tokens() / self.seq_len[self.sample]
        step = self.step[self.micro_batch_of_part()]
        return np.bincount(step, weights=share, minlength=self.steps)

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

    def part_tokens(self) -> np.ndarray:
        """[P] int64: tokens of each part."""
        return self.packing.tokens if self.packing else self.seq_len[self.sample]

    def part_offsets(self) -> np.ndarray:
        """[P] int64: where each part begins in its micro-batch, rows laid end to end."""
        if self.packing:
            return self.packing.offset
        owner = self.micro_batch_of_part()
        return (np.arange(len(owner)) - self.offsets[owner]) * self.padded_len[owner]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one shape, or one packed row, that one rank computes at once.

    Attributes:
      rank: the rank that computes it.
      index: its index among the rank's micro-batches of the step.
      rows: number of rows, including padding rows; 1 if packed.
      seq_len: tokens of each row.
      shape: (frames, height, width) in pixels; zeros where unknown or packed.
      samples: the manifest's row numbers, one for each row or each part of a packed row.
      row_plan: positions of the parts, in the order of `samples`; None if not packed.
      repetitions: which of the sample's times in the epoch each of `samples` is, from 0; empty
        if the plan repeats no sample.
    """

    rank: int
    index: int
    rows: int
    seq_len: int
    shape: tuple[int, int, int]
    samples: tuple[int, ...]
    row_plan: "RowPlan | None" = None
    repetitions: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowPlan:
    """Positions of the parts of a packed row (see `RowShape`).

    Attributes:
      split_tokens: A, tokens of the row that are reserved for split samples.
      tokens: tokens of each part.
      offsets: position of each part's first token in the row.
      is_split: whether each part belongs to a split sample.
      first: index of each part's first token within its sample.
      split_segments: (offset, tokens) of the samples among the split tokens of the rank's group.
      split_samples: the manifest's row number of each of these samples.
      split_slots: which of these samples each part belongs to; −1 for parts of whole samples.
    """

    split_tokens: int
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    is_split: tuple[bool, ...]
    first: tuple[int, ...]
    split_segments: tuple[tuple[int, int], ...]
    split_samples: tuple[int, ...]
    split_slots: tuple[int, ...]


class WindowContent(NamedTuple):
    """The samples of a window of a stream, in the order of their numbers.

    Attributes:
      rows: [n] int64, for each the number of one of its size among the plan's samples.
      keys: [n], by which their content is read.
    """

    rows: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
      index: number of the step, counted from the start of training.
      epoch: number of the epoch, or window of a stream, counted from 0.
      micro_batches: micro-batches ordered by (index, rank).
      window: the samples of the window; None unless they are those of a stream.
    """

    index: int
    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    window: WindowContent | None = None


def micro_batch(plan: EpochPlan, position: int) -> MicroBatch:
    """The micro-batch at a position of an epoch's plan."""
    frames, height, width = plan.shape[position].tolist()
    return MicroBatch(
        rank=int(plan.rank[position]),
        index=int(plan.micro_batch[position]),
        rows=int(plan.rows[position]),
        seq_len=int(plan.padded_len[position]),
        shape=(frames, height, width),
        samples=tuple(plan.sample[plan.parts_of(position)].tolist()),
        row_plan=_row_plan(plan, position),
        repetitions=()
        if plan.repetition is None
        else tuple(plan.repetition[plan.parts_of(position)].tolist()),
    )


def _row_plan(plan: EpochPlan, position: int) -> RowPlan | None:
    packing = plan.packing
    if packing is None:
        return None
    parts = plan.parts_of(position)
    is_split, offsets = packing.is_split[parts].tolist(), packing.offset[parts].tolist()
    split_tokens = int(packing.split_tokens[position])
    segments = _split_segments(plan, packing, position) if split_tokens else {}
    numbers = {copy: number for number, copy in enumerate(segments)}
    copies = zip(_copies(plan, parts), is_split, strict=True)
    slots = [numbers[copy] if split else -1 for copy, split in copies]
    placed = tuple(segments.values())
    begin = int(plan.rank[position]) % packing.context * split_tokens
    return RowPlan(
        split_tokens=split_tokens,
        tokens=tuple(packing.tokens[parts].tolist()),
        offsets=tuple(offsets),
        is_split=tuple(is_split),
        first=tuple(
            0 if slot < 0 else begin + offset - placed[slot][0]
            for slot, offset in zip(slots, offsets, strict=True)
        ),
        split_segments=placed,
        split_samples=tuple(sample for sample, *_ in segments),
        split_slots=tuple(slots),
    )


_Copy = tuple[int, int]
"""A sample and its repetition: a group may hold several of one."""


def _copies(plan: EpochPlan, parts: slice) -> list[_Copy]:
    """The copy that each part belongs to."""
    return list(zip(plan.sample[parts].tolist(), plan.repetitions()[parts].tolist(), strict=True))


def _split_segments(
    plan: EpochPlan, packing: Packing, position: int
) -> dict[_Copy, tuple[int, int]]:
    """(offset, tokens) of each sample among the split tokens of a micro-batch's group."""
    first = position - int(plan.rank[position]) % packing.context
    region = int(packing.split_tokens[position])
    laid: dict[_Copy, tuple[int, int]] = {}
    for member in range(packing.context):
        parts = plan.parts_of(first + member)
        copies = _copies(plan, parts)
        for number in np.flatnonzero(packing.is_split[parts]).tolist():
            part, copy = parts.start + number, copies[number]
            here = member * region + int(packing.offset[part])
            offset, before = laid.get(copy, (here, 0))
            laid[copy] = (offset, before + int(packing.tokens[part]))
    return laid


LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Bounds of a sample's weight."""
_UNIT = 10**6
"""Weights and phases are whole millionths, so that sums over epochs are exact."""
_EPOCHS = 2**20
"""Epochs of noise: repetition c of epoch e has the noise of epoch e + c·2^20. With at most
`MOST_WEIGHT` repetitions the numbers fit 31 bits."""


@dataclass(frozen=True)
class Repeats:
    """How often each sample stands in each epoch.

    Attributes:
      weight: [N] int64, millionths.
      phase: [N] int64, from 0 to 999,999.
    """

    weight: np.ndarray
    phase: np.ndarray

    @classmethod
    def of(cls, weight: np.ndarray, kind: np.ndarray, seed: int) -> Self:
        """Draws the phases: evenly spaced over samples of one weight and kind, in random order.

        Args:
          weight: [N] float64, expected times that each sample stands in an epoch.
          kind: [N, K] integers, equal for samples that are alike.
          seed: of the order.

        Raises:
          InputError: an epoch might hold no sample.
        """
        units = np.rint(np.asarray(weight) * _UNIT).astype(np.int64)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))))
        order = np.lexsort((rng.random(len(units)), *kind.T, units))
        ordered = np.column_stack([units, kind])[order]
        first = np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)])
        size = np.diff(np.r_[first, len(order)])
        if not (size * units[order[first]] >= _UNIT).any():
            raise InputError(
                "data.weights: the weights are so small that an epoch might hold no sample; make "
                "all of them larger by one factor"
            )
        within = np.arange(len(order)) - np.repeat(first, size)
        spread = (within + np.repeat(rng.random(len(size)), size)) / np.repeat(size, size)
        phase = np.empty(len(units), np.int64)
        phase[order] = np.minimum((spread * _UNIT).astype(np.int64), _UNIT - 1)
        return cls(units, phase)

    def counts(self, epoch: int) -> np.ndarray:
        """[N] int64: how often each sample stands in an epoch."""
        before = (epoch * self.weight + self.phase) // _UNIT
        return np.asarray(((epoch + 1) * self.weight + self.phase) // _UNIT - before)

    @property
    def is_even(self) -> bool:
        """Whether all epochs hold the same samples: all weights are whole numbers."""
        return not (self.weight % _UNIT).any()


def noise_epoch(epoch: int, repetition: int) -> int:
    """The number that stands for the epoch in the random keys of a sample.

    Args:
      epoch: of the step.
      repetition: which of the sample's times in the epoch this is, from 0.

    Returns:
      The epoch, if the sample is not repeated; a number of its own for each repetition.
    """
    return epoch + repetition * _EPOCHS


def number_repetitions(plan: EpochPlan) -> np.ndarray:
    """Numbers the times that each sample stands in an epoch, from 0 in the order of its steps.

    Returns:
      [P] int64; the parts of a split sample have the same number.
    """
    work, tokens = plan.micro_batch_of_part(), plan.part_tokens()
    whole = ~plan.packing.is_split if plan.packing else np.ones(len(work), bool)
    order = np.lexsort((plan.part_offsets(), work, whole, plan.sample))
    sample = plan.sample[order]
    # In this order, split times before whole ones, the parts of one time lie side by side, and
    # their tokens sum to the sample's.
    opens = np.r_[True, sample[1:] != sample[:-1]]
    before = np.cumsum(tokens[order]) - tokens[order]
    found = np.empty_like(order)
    before -= np.maximum.accumulate(np.where(opens, before, 0))
    found[order] = before // plan.seq_len[sample]
    return found


def times_placed(plan: EpochPlan) -> np.ndarray:
    """[N] float64: how often an epoch holds each sample; parts of split ones count in part."""
    tokens = plan.part_tokens().astype(np.float64)
    return np.bincount(plan.sample, weights=tokens, minlength=len(plan.seq_len)) / plan.seq_len
