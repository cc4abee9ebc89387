"""Packed policies, of which `first_fit`: rows of a fixed number of tokens hold many samples.

The last window places all that remains, so that every epoch holds each of its samples once. Steps
of all windows stand in random order, so that it does not matter for how long one was deferred.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np
from typing_extensions import override

from alload_jax.errors import InputError, require_positive
from alload_jax.planning.cost import CostFile
from alload_jax.planning.epoch import EpochPlan, Packing, RowShape
from alload_jax.planning.policies.policy import (
    MOST,
    PlanSettings,
    Policy,
    RankTopology,
    named,
)
from alload_jax.planning.samples import Samples

_LAST = 1.5
"""Windows of samples that remain, up to which they are the last window."""
EASING = 4.0
"""Factor by which the tolerance grows where a window yields no step."""


@dataclass(frozen=True)
class Window:
    """Samples to place now.

    Attributes:
      sample: [N] int64, the manifest's row numbers, longest footprint first.
      footprint: [N] int64, tokens that each takes.
      is_last: whether all must be placed; else some may be deferred.
      easing: factor of the tolerance of rows of unlike cost in a step.
    """

    sample: np.ndarray
    footprint: np.ndarray
    is_last: bool
    easing: float

    def taken(self, order: np.ndarray) -> "Window":
        """The samples in another order: [N] int64."""
        return replace(self, sample=self.sample[order], footprint=self.footprint[order])


MOST_CORRELATION = 0.1
"""Correlation of a step's place with the mean length of its samples above which another order is
drawn."""
_DRAWS = 16


def even_order(
    step: np.ndarray, tokens: np.ndarray, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """The place of each step: the first of some random orders that has little correlation.

    Args:
      step: [P] int64, the step of each sample or part.
      tokens: [P] int64, of each.
      steps: K, their number.
      rng: draws the orders.

    Returns:
      [K] int64, a permutation; of the orders that were drawn the one with least correlation, if
      all have more than `MOST_CORRELATION`.
    """
    count = np.maximum(np.bincount(step, minlength=steps), 1)
    mean = np.bincount(step, weights=tokens, minlength=steps) / count
    draws = []
    for _ in range(_DRAWS):
        place = rng.permutation(steps)
        found = abs(correlation(place, mean))
        if found <= MOST_CORRELATION:
            return place
        draws.append((found, place))
    return min(draws, key=lambda draw: draw[0])[1]


def correlation(place: np.ndarray, mean: np.ndarray) -> float:
    """Pearson's correlation of two [K]; 0 where one does not vary."""
    if len(mean) < 2 or np.ptp(mean) == 0:
        return 0.0
    return float(np.corrcoef(place, mean)[0, 1])


def row_shape(
    samples: Samples,
    capacity: int,
    segments: int | None,
    align: int,
    slot_factor: float,
    setting: str = "m_mem",
) -> RowShape:
    """The row that a policy fills with whole samples.

    Args:
      samples: of the manifest.
      capacity: T.
      segments: M; None for `slot_factor` times the samples of a mean row, at most what fits.
      align: of samples' beginnings.
      slot_factor: see `segments`.
      setting: name of the setting that gives `capacity`, for messages.

    Raises:
      InputError: `align` does not divide `capacity`.
    """
    if align > capacity:
        raise InputError(
            f"planning.align is {align}, more than {setting} = {capacity}; make it smaller"
        )
    if capacity % align:
        raise InputError(
            f"planning.align is {align}, which does not divide {setting} = {capacity}; "
            f"set {setting} to {capacity // align * align}"
        )
    if segments is None:
        segments = slots_for(samples, capacity, slot_factor)
    return RowShape(capacity, segments, align)


SLOTS_UNIT = 4
"""Slots of a row are a multiple of this, unless fewer are as good."""


def slots_for(samples: Samples, tokens: int, factor: float) -> int:
    """So many times the samples of a mean row, in whole `SLOTS_UNIT`; at most what fits."""
    mean = tokens / max(1.0, float(samples.seq_len.mean()))
    fit = max(1, tokens // int(samples.seq_len.min()))
    return min(fit, -(-int(np.ceil(factor * mean)) // SLOTS_UNIT) * SLOTS_UNIT)


def refuse_unplaceable(
    samples: Samples,
    shape: RowShape,
    policy: Policy,
    ranks: int,
    context: int = 1,
    setting: str = "m_mem",
) -> None:
    """Raises InputError, naming the samples, where one is too long even if split `context`-fold."""
    most = shape.capacity * context
    needed = shape.footprint(samples.seq_len)
    too_long = np.flatnonzero(needed > most)
    if not len(too_long):
        return
    longest = int(needed.max())
    per_rank = -(-longest // (context * shape.align)) * shape.align
    remedy = f"set {setting} to at least {per_rank}"
    wider = [c for c in range(1, ranks + 1) if ranks % c == 0 and c * shape.capacity >= longest]
    if wider and policy.splits_samples:
        remedy += f", or context to at least {wider[0]}"
    split = f", and {context} ranks hold {most}" if context > 1 else ""
    raise InputError(
        f"policy {policy.name}: {setting} is {shape.capacity} tokens{split}, shorter than sample "
        f"{named(too_long, samples.seq_len[too_long])}; {remedy}"
    )


@dataclass(frozen=True)
class PlacedSteps:
    """Steps of one window, by their parts (see `RowShape`).

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


PlaceWindow = Callable[[Window], tuple[PlacedSteps, np.ndarray]]
"""Places what it can of a window, all of the last one: its steps, and a mask [N] of what it placed.
"""


def place_windows(
    order: np.ndarray, footprint: np.ndarray, window_tokens: float, place: PlaceWindow
) -> list[PlacedSteps]:
    """Places window after window, until all samples are placed.

    Args:
      order: [N] int64, sample numbers of the epoch, shuffled.
      footprint: tokens that each sample of the manifest takes.
      window_tokens: of a window, deferred samples included.
      place: places a window.
    """
    upto, found = np.r_[0, np.cumsum(footprint[order])], []
    waiting, taken, easing = order[:0], 0, 1.0
    while taken < len(order) or len(waiting):
        ready = int(footprint[waiting].sum())
        stop = len(order)
        room = window_tokens * easing  # more, if the last window could place nothing
        if ready + int(upto[-1] - upto[taken]) > _LAST * room:
            most = int(upto[taken]) + max(0, int(room) - ready)
            stop = int(np.searchsorted(upto, most, side="right")) - 1
            if not len(waiting):  # one sample may be more than a window
                stop = max(stop, taken + 1)
        waiting, taken = np.r_[waiting, order[taken:stop]], stop
        waiting = waiting[np.argsort(-footprint[waiting], kind="stable")]
        steps, placed = place(Window(waiting, footprint[waiting], taken == len(order), easing))
        found.append(steps)
        easing = 1.0 if placed.any() else easing * EASING
        waiting = waiting[~placed]
    return found


def packed_epoch(
    windows: Sequence[PlacedSteps],
    shape: RowShape,
    topology: RankTopology,
    seq_len: np.ndarray,
    rng: np.random.Generator | None = None,
) -> EpochPlan:
    """Joins the steps of windows into an epoch.

    Args:
      windows: their steps; some may have none.
      shape: of the rows.
      topology: ranks and steps.
      seq_len: [N] int64, tokens of every sample of the manifest.
      rng: puts the steps of all windows in random order; None leaves them as they are.
    """
    windows, ranks = [each for each in windows if len(each.split_tokens)], topology.ranks
    order, row, split_tokens = _rows_of_parts(windows, ranks, rng)
    turns = len(split_tokens) // ranks
    sample, tokens, is_split, offset = (
        _column(windows, name)[order] for name in ("sample", "tokens", "is_split", "offset")
    )
    offsets = np.searchsorted(row, np.arange(turns * ranks + 1))
    # Where each whole sample begins, counted from the end of its row's split samples.
    taken = np.where(is_split, 0, shape.footprint(tokens))
    before = np.cumsum(taken) - taken
    after = before - np.r_[before, before[-1:] + taken[-1:]][offsets[:-1]][row]
    step, micro_batch = np.divmod(np.arange(turns), topology.micro_batches_per_step)
    return EpochPlan(
        ranks=ranks,
        steps=int(step[-1]) + 1,
        step=np.repeat(step, ranks),
        micro_batch=np.repeat(micro_batch, ranks),
        rank=np.tile(np.arange(ranks), turns),
        rows=np.ones(turns * ranks, np.int64),
        padded_len=np.full(turns * ranks, shape.capacity),
        shape=np.zeros((turns * ranks, 3), np.int64),
        offsets=offsets,
        sample=sample,
        seq_len=seq_len,
        packing=Packing(
            **vars(shape),
            split_tokens=split_tokens,
            tokens=tokens,
            offset=np.where(is_split, offset, split_tokens[row] + after),
            is_split=is_split,
        ),
    )


def _column(windows: Sequence[PlacedSteps], name: str) -> np.ndarray:
    return np.concatenate([getattr(window, name) for window in windows])


def _rows_of_parts(
    windows: Sequence[PlacedSteps], ranks: int, rng: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How the parts [P] are sorted by row, the row of each of them then, and A of each row.

    Apart from `packed_epoch`, whose memory would else hold what is only needed here.
    """
    counts = [len(window.split_tokens) for window in windows]
    turns = sum(counts)  # steps of windows: a micro-batch of every rank
    firsts = np.cumsum([0, *counts[:-1]])
    turn = np.concatenate([w.step + n for w, n in zip(windows, firsts, strict=True)])
    place = np.arange(turns)
    if rng is not None:
        place = even_order(turn, _column(windows, "tokens"), turns, rng)
    row, is_split = place[turn] * ranks + _column(windows, "rank"), _column(windows, "is_split")
    # Within a row: split samples by their place, then whole ones in the order of assignment.
    if is_split.any():
        order = np.lexsort((np.where(is_split, _column(windows, "offset"), 0), ~is_split, row))
    else:
        order = stable_order(row)
    split_tokens = np.empty(turns, np.int64)
    split_tokens[place] = _column(windows, "split_tokens")
    return order, row[order], np.repeat(split_tokens, ranks)


def stable_order(numbers: np.ndarray) -> np.ndarray:
    """`np.argsort` of numbers from 0, stable; fast where they are below 65,536: [N] → [N] int64."""
    most = np.min_scalar_type(int(numbers.max(initial=0)))
    return np.argsort(numbers.astype(most), kind="stable")


_SLOT_FACTOR = 4.0
"""Rows of short samples alone are common: nothing mixes long and short."""


@dataclass(frozen=True)
class PackedSettings(PlanSettings):
    """The settings of packed policies.

    Attributes:
      align: samples in packed rows begin at multiples of this many tokens.
      max_segments: maximum samples of a packed row; null for the number with the least predicted
        time (`first_fit`: 4 times the mean).
      look_ahead: steps in a window, within which packed policies place samples.
    """

    align: int = 1
    max_segments: int | None = None
    look_ahead: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("planning.", self, "align", "max_segments", "look_ahead", most=MOST)


@dataclass(frozen=True)
class FirstFit(Policy):
    """Packs each window's samples, the longest first, each into the first row that it fits.

    Attributes:
      m_mem: tokens of a row.
      align, max_segments, look_ahead: see `PackedSettings`.
    """

    name: ClassVar[str] = "first_fit"
    packed: ClassVar[bool] = True

    m_mem: int
    align: int = 1
    max_segments: int | None = None
    look_ahead: int = 32

    @classmethod
    @override
    def from_config(cls, config: PackedSettings, costs: CostFile) -> Self:
        m_mem = config.required_m_mem(costs)
        return cls(m_mem, config.align, config.max_segments, config.look_ahead)

    @override
    def plan_epoch(
        self, samples: Samples, topology: RankTopology, rng: np.random.Generator
    ) -> EpochPlan:
        typical = samples.typical()
        shape = row_shape(typical, self.m_mem, self.max_segments, self.align, _SLOT_FACTOR)
        refuse_unplaceable(samples, shape, self, topology.ranks)
        shape = replace(shape, longest_whole=int(samples.seq_len.max()))

        def place(window: Window) -> tuple[PlacedSteps, np.ndarray]:
            row, rows = first_fit_decreasing(window.footprint, shape)
            steps = -(-rows // topology.ranks) if window.is_last else rows // topology.ranks
            placed = row < steps * topology.ranks
            step, rank = np.divmod(rng.permutation(steps * topology.ranks), topology.ranks)
            where, sample = row[placed], window.sample[placed]
            found = PlacedSteps(
                sample=sample,
                step=step[where],
                rank=rank[where],
                tokens=samples.seq_len[sample],
                offset=np.zeros(len(sample), np.int64),
                is_split=np.zeros(len(sample), bool),
                split_tokens=np.zeros(steps, np.int64),
            )
            return found, placed

        window_tokens = self.look_ahead * topology.ranks * shape.capacity
        order, footprint = samples.shuffled(rng), shape.footprint(samples.seq_len)
        windows = place_windows(order, footprint, window_tokens, place)
        return packed_epoch(windows, shape, topology, samples.seq_len, rng)


def first_fit_decreasing(footprint: np.ndarray, shape: RowShape) -> tuple[np.ndarray, int]:
    """The row of each item, and how many rows there are.

    Filling one row after another, each time with the longest item that still fits, gives the same
    rows as offering each item, the longest first, to the rows in turn.

    Args:
      footprint: [N] int64, largest first, none over `shape.capacity`.
      shape: of the rows.
    """
    lengths, counts = np.unique(footprint, return_counts=True)
    stock = Stock[int](lengths.tolist(), counts.tolist())
    rows_of_length: list[list[np.ndarray]] = [[] for _ in lengths]
    left, rows = len(footprint), 0
    while left:
        content: dict[int, int] = {}
        free, free_slots = shape.capacity, shape.segments
        while free_slots and (kind := stock.longest_within(free)) >= 0:
            taken = min(stock.counts[kind], free // stock.lengths[kind], free_slots)
            stock.take(kind, taken)
            content[kind] = taken
            free -= taken * stock.lengths[kind]
            free_slots -= taken
        # Further rows are the same while there are enough of each length in it.
        more = min(stock.counts[kind] // taken for kind, taken in content.items())
        for kind, taken in content.items():
            rows_of_length[kind].append(np.repeat(np.arange(rows, rows + 1 + more), taken))
            stock.take(kind, taken * more)
        left -= sum(content.values()) * (1 + more)
        rows += 1 + more
    by_length = [row for kind in reversed(rows_of_length) for row in kind]
    return np.concatenate(by_length), rows


Length = TypeVar("Length", bound=float)


class Stock(Generic[Length]):
    """Items by length, which may be a time; finds the longest that fits in near-constant time."""

    def __init__(self, lengths: list[Length], counts: list[int]):
        self.lengths = lengths
        self.counts = counts
        self._at_or_below = list(range(len(lengths)))  # a kind in stock, or a step towards one

    def longest_within(self, free: float) -> int:
        """The longest kind in stock that is no longer than `free`, or −1."""
        kind = bisect_right(self.lengths, free) - 1
        passed = []
        while kind >= 0 and self._at_or_below[kind] != kind:
            passed.append(kind)
            kind = self._at_or_below[kind]
        for other in passed:
            self._at_or_below[other] = kind
        return kind

    def take(self, kind: int, count: int) -> None:
        """Removes items."""
        self.counts[kind] -= count
        if not self.counts[kind]:
            self._at_or_below[kind] = kind - 1
