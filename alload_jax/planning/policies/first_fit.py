"""First-fit decreasing, as in other data loaders: fills rows without regard to their cost."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from alload_jax.planning.cost import CostFile
from alload_jax.planning.epoch import EpochPlan, RowShape
from alload_jax.planning.policies.packed import (
    PackedEpochBuilder,
    refuse_unplaceable,
    row_shape,
    whole_samples,
)
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.policies.queue import Window, place_epoch
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.topology import RankTopology

_SLOT_FACTOR = 4.0
"""Rows of short samples alone are common: nothing mixes long and short."""


@dataclass(frozen=True)
class FirstFit(Policy):
    """Packs each window's samples, the longest first, each into the first row that it fits.

    Attributes:
      m_mem: tokens of a row.
      align: samples begin at multiples of this.
      max_segments: most samples of a row; None for four times the mean.
      look_ahead: steps of a window.
    """

    name: ClassVar[str] = "first_fit"
    packed: ClassVar[bool] = True

    m_mem: int
    align: int = 1
    max_segments: int | None = None
    look_ahead: int = 32

    @classmethod
    def from_config(cls, config: PlanningConfig, costs: CostFile) -> Self:
        """See `Policy.from_config`."""
        m_mem = config.required_m_mem(costs)
        return cls(m_mem, config.align, config.max_segments, config.look_ahead)

    def plan_epoch(
        self,
        samples: Samples,
        topology: RankTopology,
        rng: np.random.Generator,
    ) -> EpochPlan:
        """See `Policy.plan_epoch`."""
        typical = samples.typical()
        shape = row_shape(typical, self.m_mem, self.max_segments, self.align, _SLOT_FACTOR)
        refuse_unplaceable(samples, shape, self, topology.ranks)
        shape = replace(shape, longest_whole=int(samples.seq_len.max()))
        epoch = PackedEpochBuilder(shape, topology)

        def place(window: Window) -> np.ndarray:
            row, rows = first_fit_decreasing(window.footprint, shape)
            steps = -(-rows // topology.ranks) if window.is_last else rows // topology.ranks
            placed = row < steps * topology.ranks
            step, rank = np.divmod(rng.permutation(steps * topology.ranks), topology.ranks)
            where, sample = row[placed], window.sample[placed]
            epoch.add(whole_samples(sample, samples.seq_len, step[where], rank[where], steps))
            return placed

        window_tokens = self.look_ahead * topology.ranks * shape.capacity
        place_epoch(samples.shuffled(rng), shape.footprint(samples.seq_len), window_tokens, place)
        return epoch.finish(rng)


def first_fit_decreasing(footprint: np.ndarray, shape: RowShape) -> tuple[np.ndarray, int]:
    """The row of each item, and how many rows there are.

    Filling one row after another, each time with the longest item that still fits, gives the same
    rows as offering each item, the longest first, to the rows in turn.

    Args:
      footprint: [N] int64, largest first, none over `shape.capacity`.
      shape: of the rows.
    """
    lengths, counts = np.unique(footprint, return_counts=True)
    stock = _Stock(lengths.tolist(), counts.tolist())
    rows_of_length: list[list[np.ndarray]] = [[] for _ in lengths]
    left, rows = len(footprint), 0
    while left:
        content = _fill_row(stock, shape)
        # Further rows are the same while there are enough of each length in it.
        more = min(stock.counts[kind] // taken for kind, taken in content.items())
        for kind, taken in content.items():
            rows_of_length[kind].append(np.repeat(np.arange(rows, rows + 1 + more), taken))
            stock.take(kind, taken * more)
        left -= sum(content.values()) * (1 + more)
        rows += 1 + more
    by_length = [row for kind in reversed(rows_of_length) for row in kind]
    return np.concatenate(by_length), rows


def _fill_row(stock: "_Stock", shape: RowShape) -> dict[int, int]:
    """Takes a row's items out of the stock; returns how many of each kind."""
    content: dict[int, int] = {}
    free, free_slots = shape.capacity, shape.segments
    while free_slots and (kind := stock.longest_within(free)) >= 0:
        taken = min(stock.counts[kind], free // stock.lengths[kind], free_slots)
        stock.take(kind, taken)
        content[kind] = taken
        free -= taken * stock.lengths[kind]
        free_slots -= taken
    return content


class _Stock:
    """Items by length; finds the longest that fits in near-constant time."""

    def __init__(self, lengths: list[int], counts: list[int]):
        self.lengths = lengths
        self.counts = counts
        self._at_or_below = list(range(len(lengths)))  # a kind in stock, or a step towards one

    def longest_within(self, free: int) -> int:
        """The longest kind in stock of at most `free` tokens, or −1."""
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
