"""What packed policies share: rows of a fixed number of tokens that hold many samples each."""

from dataclasses import dataclass, field

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.epoch import EpochPlan, Packing
from alload_jax.planning.samples import Samples

_NAMED = 5


@dataclass(frozen=True)
class RowShape:
    """A packed row, the same in every step: one compiled program.

    Attributes:
      tokens: T, of which samples take at most all.
      segments: M, most samples of a row.
      align: samples begin at multiples of this many tokens.
    """

    tokens: int
    segments: int
    align: int = 1

    def footprint(self, seq_len: np.ndarray) -> np.ndarray:
        """Tokens that samples take of a row, alignment included: [N] → [N] int64."""
        return -(-np.asarray(seq_len, np.int64) // self.align) * self.align


def row_shape(
    samples: Samples, tokens: int, segments: int | None, align: int, slot_factor: float
) -> RowShape:
    """The row that a policy fills.

    Args:
      samples: of the manifest.
      tokens: T.
      segments: M; None for `slot_factor` times the samples of a mean row, at most what fits.
      align: of samples' beginnings.
      slot_factor: see `segments`.

    Raises:
      InputError: `align` does not divide `tokens`.
    """
    if align > tokens:
        raise InputError(f"planning.align is {align}, more than m_mem = {tokens}; make it smaller")
    if tokens % align:
        raise InputError(
            f"planning.align is {align}, which does not divide m_mem = {tokens}; "
            f"set m_mem to {tokens // align * align}"
        )
    if segments is None:
        typical = tokens / max(1.0, float(samples.seq_len.mean()))
        most = max(1, tokens // int(samples.seq_len.min()))
        segments = min(most, -(-int(np.ceil(slot_factor * typical)) // 4) * 4)
    return RowShape(tokens, segments, align)


def refuse_unplaceable(
    samples: Samples, shape: RowShape, policy: str, ranks: int, context: int = 1
) -> None:
    """Raises InputError, naming the samples, where one is too long even if split `context`-fold."""
    most = shape.tokens * context
    needed = shape.footprint(samples.seq_len)
    too_long = np.flatnonzero(needed > most)
    if not len(too_long):
        return
    longest = int(needed.max())
    named = ", ".join(f"{k} ({samples.seq_len[k]} tokens)" for k in too_long[:_NAMED])
    more = f" and {len(too_long) - _NAMED} more" if len(too_long) > _NAMED else ""
    per_rank = -(-longest // (context * shape.align)) * shape.align
    remedy = f"set m_mem to at least {per_rank}"
    wider = [c for c in range(1, ranks + 1) if ranks % c == 0 and c * shape.tokens >= longest]
    if wider and policy == "balanced":
        remedy += f", or context to at least {wider[0]}"
    split = f", and {context} ranks hold {most}" if context > 1 else ""
    raise InputError(
        f"policy {policy}: m_mem is {shape.tokens} tokens{split}, shorter than sample "
        f"{named}{more}; {remedy}"
    )


@dataclass(frozen=True)
class PlacedSteps:
    """Steps of one window, by their parts (see `Packing`).

    Attributes:
      sample, step, rank, tokens: [P] int64; steps count from 0 in each window.
      offset: [P] int64, where a part of a split sample begins; ignored of whole samples.
      is_split: [P] bool.
      split_tokens: [K] int64, A of each step.
    """

    sample: np.ndarray
    step: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray
    offset: np.ndarray
    is_split: np.ndarray
    split_tokens: np.ndarray


def whole_samples(
    sample: np.ndarray, seq_len: np.ndarray, step: np.ndarray, rank: np.ndarray, steps: int
) -> PlacedSteps:
    """Steps without split samples; `seq_len` is that of every sample of the manifest."""
    none = np.zeros(len(sample), np.int64)
    return PlacedSteps(
        sample, step, rank, seq_len[sample], none, none.astype(bool), np.zeros(steps, np.int64)
    )


@dataclass
class PackedEpoch:
    """Gathers the windows' steps into an epoch."""

    shape: RowShape
    ranks: int
    micro_batches_per_step: int
    longest_whole: int
    region_segments: int
    context: int = 1
    split_sizes: tuple[int, ...] = (0,)
    _windows: list[PlacedSteps] = field(default_factory=list)

    def add(self, steps: PlacedSteps) -> None:
        """Appends a window's steps."""
        if len(steps.split_tokens):
            self._windows.append(steps)

    def finish(self) -> EpochPlan:
        """The epoch."""
        counts = [len(window.split_tokens) for window in self._windows]
        firsts = np.cumsum([0, *counts[:-1]])

        def column(name: str) -> np.ndarray:
            return np.concatenate([getattr(window, name) for window in self._windows])

        turn = np.concatenate(
            [window.step + first for window, first in zip(self._windows, firsts, strict=True)]
        )
        work = turn * self.ranks + column("rank")
        is_split = column("is_split")
        # Within a row: split samples by their place, then whole ones in the order of assignment.
        order = np.lexsort((np.where(is_split, column("offset"), 0), ~is_split, work))
        part = {name: column(name)[order] for name in ("sample", "tokens", "offset", "is_split")}
        turns, row = int(sum(counts)), work[order]
        split_tokens = np.repeat(column("split_tokens"), self.ranks)
        offsets = np.searchsorted(row, np.arange(turns * self.ranks + 1))
        behind = _behind_split_region(
            part["is_split"], self.shape.footprint(part["tokens"]), row, offsets
        )
        step, micro_batch = np.divmod(np.arange(turns), self.micro_batches_per_step)
        return EpochPlan(
            ranks=self.ranks,
            steps=int(step[-1]) + 1,
            step=np.repeat(step, self.ranks),
            micro_batch=np.repeat(micro_batch, self.ranks),
            rank=np.tile(np.arange(self.ranks), turns),
            rows=np.ones(turns * self.ranks, np.int64),
            padded_len=np.full(turns * self.ranks, self.shape.tokens),
            shape=np.zeros((turns * self.ranks, 3), np.int64),
            offsets=offsets,
            sample=part["sample"],
            packing=Packing(
                segments=self.shape.segments,
                align=self.shape.align,
                context=self.context,
                split_sizes=self.split_sizes,
                longest_whole=self.longest_whole,
                region_segments=self.region_segments,
                split_tokens=split_tokens,
                tokens=part["tokens"],
                offset=np.where(part["is_split"], part["offset"], split_tokens[row] + behind),
                is_split=part["is_split"],
            ),
        )


def _behind_split_region(
    is_split: np.ndarray, footprint: np.ndarray, row: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """[P]: where each whole sample begins, counted from the end of its row's split samples."""
    taken = np.where(is_split, 0, footprint)
    before = np.cumsum(taken) - taken
    start = np.r_[before, before[-1:] + taken[-1:]][offsets[:-1]]
    return before - start[row]
