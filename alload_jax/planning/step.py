"""One step of a plan, and how it is read from the plan of its epoch."""

from dataclasses import dataclass

import numpy as np

from alload_jax.planning.epoch import EpochPlan, Packing


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


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
      index: number of the step, counted from the start of training.
      epoch: number of the epoch, counted from 0.
      micro_batches: micro-batches ordered by (index, rank).
    """

    index: int
    epoch: int
    micro_batches: tuple[MicroBatch, ...]


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
