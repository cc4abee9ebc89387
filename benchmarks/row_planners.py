"""Planners of packed rows from the scheduling literature, for comparison with `balanced`.

- Longest processing time first (LPT): each sample, the longest first, goes to the row of least load
  that has room. Over one step it is the greedy partition of RL trainers such as verl. Over a window
  of steps the rows are then sorted by cost, and neighbours form a step.
- First-fit decreasing (FFD) over a window, with rows sorted by cost in the same way.
- Karmarkar–Karp's largest differencing method over one step, as verl's
  `get_seqlen_balanced_partitions(..., equal_size=False)`: a partition for each rank, which is
  divided into rows where it exceeds M_mem.

All of them know the cost model, get shuffled samples, and leave what fills no step at the end of an
epoch to the next one, as `balanced` does. They don't bound the number of samples of a step.
"""

import dataclasses
import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from peers import Case, packed_epoch

from alload_jax.planning.cost import QuadraticCost, marginal_cost
from alload_jax.planning.epoch import EpochPlan, RowShape
from alload_jax.planning.policies.first_fit import first_fit_decreasing

UNPLACED = -1

Rows = list[np.ndarray]
"""Positions of samples, for each row."""


@dataclass(frozen=True)
class Limits:
    """What a planner may use.

    Attributes:
      ranks: data-parallel ranks.
      capacity: T, tokens of a row.
      slots: most samples of a row.
    """

    ranks: int
    capacity: int
    slots: int

    def first_fit(self, seq_len: np.ndarray) -> tuple[np.ndarray, int]:
        """The row of each sample, the longest first, and the number of rows."""
        return first_fit_decreasing(seq_len, RowShape(self.capacity, self.slots))


@dataclass(frozen=True)
class RowPlanner(ABC):
    """A planner of packed rows; see `peers.Planner`.

    Attributes:
      cost: the cost model.
      row_share: T over M_mem; at least the longest sample.
      slot_factor: most samples of a row over the mean. Empty slots are computed too.
      fill: share of the rows' tokens that their samples are chosen to have.
      by_total: whether a sample's load includes what its tokens cost as padding too; otherwise only
        the cost beyond that, as rows are computed whole.
    """

    cost: QuadraticCost
    row_share: float = 1.0
    slot_factor: float = 2.5
    fill: float = 1.0
    by_total: bool = False

    @property
    @abstractmethod
    def window_steps(self) -> int:
        """Steps that are planned at once."""

    @abstractmethod
    def place(self, seq_len: np.ndarray, steps: int, limits: Limits) -> list[list[Rows]]:
        """Places the samples of a window.

        Args:
          seq_len: [N] int64, tokens of the samples, the longest first.
          steps: about how many steps they fill.
          limits: of the rows.

        Returns:
          [steps][ranks] → rows; samples in none are placed in a later window. Steps without any
          row are left out.
        """

    def epoch(self, case: Case) -> EpochPlan:
        """See `peers.Planner.epoch`."""
        seq_len, limits = case.samples.seq_len, self._limits(case)
        rng = np.random.default_rng(0)
        steps: list[list[Rows]] = []
        waiting, queue = np.zeros(0, np.int64), rng.permutation(len(seq_len))
        step_tokens = self._step_tokens(limits)
        while len(waiting) + len(queue):
            pool = np.r_[waiting, queue]
            tokens = np.cumsum(seq_len[pool])
            window = max(1, min(self.window_steps, int(tokens[-1] // step_tokens)))
            upto = int(np.searchsorted(tokens, window * step_tokens)) + 1
            taken, queue = pool[:upto], pool[upto:]
            taken = taken[np.argsort(-seq_len[taken], kind="stable")]
            placed = self.place(seq_len[taken], window, limits)
            steps += [
                [[taken[row] for row in rows] for rows in step] for step in placed if any(step)
            ]
            held = np.concatenate([row for step in placed for rows in step for row in rows])
            waiting = np.delete(taken, held)
        order = rng.permutation(len(steps))
        return _epoch([steps[i] for i in order], seq_len, limits.capacity)

    def rates(self, case: Case) -> dict[str, float]:
        """See `peers.Planner.rates`; none, as these planners are written to be short."""
        del case
        return {}

    def load(self, seq_len: np.ndarray) -> np.ndarray:
        """What is balanced: [N] int64 → [N] float64 seconds."""
        if self.by_total:
            return self.cost.sequence_cost(seq_len)
        return marginal_cost(self.cost, seq_len)

    def _step_tokens(self, limits: Limits) -> float:
        return self.fill * limits.ranks * limits.capacity

    def _limits(self, case: Case) -> Limits:
        seq_len = case.samples.seq_len
        capacity = max(int(self.row_share * case.m_mem), int(seq_len.max()))
        slots = int(np.ceil(self.slot_factor * capacity / seq_len.mean()))
        return Limits(case.ranks, capacity, slots)


@dataclass(frozen=True)
class LongestFirst(RowPlanner):
    """Longest processing time first.

    Attributes:
      fill: see `RowPlanner`; with less than 1, a row of low load has room for longer.
      window: steps whose rows are filled at the same time.
    """

    fill: float = 0.99
    window: int = 32

    @property
    def window_steps(self) -> int:
        """See `RowPlanner.window_steps`."""
        return self.window

    def place(self, seq_len: np.ndarray, steps: int, limits: Limits) -> list[list[Rows]]:
        """See `RowPlanner.place`."""
        rows = steps * limits.ranks
        row = longest_first(seq_len, self.load(seq_len), rows, limits)
        return group_by_cost(row, marginal_cost(self.cost, seq_len), rows, limits.ranks)


@dataclass(frozen=True)
class FirstFitGrouped(RowPlanner):
    """First-fit decreasing; the last rows, which may be partly empty, wait for the next window.

    Attributes:
      window: steps whose rows are filled at the same time.
    """

    window: int = 32

    @property
    def window_steps(self) -> int:
        """See `RowPlanner.window_steps`."""
        return self.window

    def place(self, seq_len: np.ndarray, steps: int, limits: Limits) -> list[list[Rows]]:
        """See `RowPlanner.place`."""
        row, rows = limits.first_fit(seq_len)
        rows = max(limits.ranks, rows - rows % limits.ranks)
        row = np.where(row < rows, row, UNPLACED)
        return group_by_cost(row, marginal_cost(self.cost, seq_len), rows, limits.ranks)


@dataclass(frozen=True)
class KarmarkarKarp(RowPlanner):
    """The largest differencing method on the samples of one step.

    Attributes:
      fill: see `RowPlanner`; with less than 1, few partitions exceed M_mem.
      micro_batches: of about this many rows of M_mem tokens a rank's samples of a step consist.
    """

    fill: float = 0.9
    by_total: bool = True
    micro_batches: int = 1

    @property
    def window_steps(self) -> int:
        """See `RowPlanner.window_steps`."""
        return 1

    def place(self, seq_len: np.ndarray, steps: int, limits: Limits) -> list[list[Rows]]:
        """See `RowPlanner.place`."""
        del steps
        step = []
        for part in karmarkar_karp(self.load(seq_len), limits.ranks):
            part = np.sort(part)  # the longest first
            row, rows = limits.first_fit(seq_len[part]) if len(part) else (part, 0)
            step.append([part[row == i] for i in range(rows)])
        return [step]

    def _step_tokens(self, limits: Limits) -> float:
        return self.micro_batches * super()._step_tokens(limits)


def longest_first(seq_len: np.ndarray, load: np.ndarray, rows: int, limits: Limits) -> np.ndarray:
    """The row of each sample, or UNPLACED where no row has room: [N] int64.

    Args:
      seq_len: [N] int64, the longest first.
      load: [N] float64, what each adds to its row.
      rows: their number.
      limits: of the rows.
    """
    free, held = np.full(rows, limits.capacity), np.zeros(rows, np.int64)
    total = np.zeros(rows)
    found = np.full(len(seq_len), UNPLACED)
    for item, (tokens, weight) in enumerate(zip(seq_len.tolist(), load.tolist(), strict=True)):
        row = int(np.argmin(np.where(free >= tokens, total, np.inf)))
        if free[row] < tokens:
            continue
        found[item] = row
        free[row] -= tokens
        total[row] += weight
        held[row] += 1
        if held[row] == limits.slots:
            free[row] = 0
    return found


def group_by_cost(row: np.ndarray, cost: np.ndarray, rows: int, ranks: int) -> list[list[Rows]]:
    """Sorts rows by cost and makes a step of every `ranks` neighbours.

    Args:
      row: [N] int64, the row of each sample, or UNPLACED.
      cost: [N] float64, of the samples.
      rows: their number, a multiple of `ranks`.
      ranks: rows of a step.

    Returns:
      [steps][ranks] → one row, or none where it is empty.
    """
    placed = np.flatnonzero(row != UNPLACED)
    sums = np.bincount(row[placed], weights=cost[placed], minlength=rows)
    in_order = placed[np.argsort(row[placed], kind="stable")]
    bounds = np.cumsum(np.bincount(row[placed], minlength=rows))[:-1]
    samples = np.split(in_order, bounds)
    by_cost = np.argsort(-sums, kind="stable").reshape(-1, ranks)
    return [[[samples[i]] if len(samples[i]) else [] for i in step] for step in by_cost]


def karmarkar_karp(weight: np.ndarray, parts: int) -> Rows:
    """Divides items into parts of about equal weight by the largest differencing method.

    A heap holds partial solutions of `parts` sums each. The two with the largest differences of
    sums are merged, the largest sum of one with the smallest of the other, until one is left.

    Args:
      weight: [N] float64, at least 0.
      parts: number of parts.

    Returns:
      `parts` arrays of item numbers; some are empty if there are fewer items than parts.
    """
    heap: list[tuple[float, int, np.ndarray, list[list[int]]]] = []
    for item, value in enumerate(weight.tolist()):
        sums = np.zeros(parts)  # ascending
        sums[-1] = value
        heap.append((-value, item, sums, [[] for _ in range(parts - 1)] + [[item]]))
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        _, _, sums, items = heapq.heappop(heap)
        _, _, others, other_items = heapq.heappop(heap)
        sums = sums + others[::-1]
        joined = [a + b for a, b in zip(items, reversed(other_items), strict=True)]
        order = np.argsort(sums, kind="stable")
        sums = sums[order]
        merged = [joined[i] for i in order.tolist()]
        heapq.heappush(heap, (float(sums[0] - sums[-1]), count, sums, merged))
        count += 1
    return [np.asarray(part, np.int64) for part in heap[0][3]]


def _epoch(steps: list[list[Rows]], seq_len: np.ndarray, capacity: int) -> EpochPlan:
    """The epoch of [steps][ranks] rows; a rank's n-th row is its n-th micro-batch."""
    none = np.zeros(0, np.int64)
    passes, step_of, micro_batch_of = [], [], []
    for number, step in enumerate(steps):
        for n in range(max(map(len, step))):
            passes.append([rows[n] if n < len(rows) else none for rows in step])
            step_of.append(number)
            micro_batch_of.append(n)
    epoch = packed_epoch(passes, seq_len, capacity)
    return dataclasses.replace(
        epoch,
        steps=len(steps),
        step=np.asarray(step_of)[epoch.step],
        micro_batch=np.asarray(micro_batch_of)[epoch.step],
    )
