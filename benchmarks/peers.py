"""Planners of other libraries and of the scheduling literature, for comparison with our policies.

- lhotse's `DynamicBucketingSampler` with durations in place of tokens: at most M_mem tokens in a
  batch, including padding. If a bucket mixes lengths, a batch can exceed M_mem, because the sampler
  adds the last cut before it checks the bound. A batch is padded to its longest cut. If the last
  batches do not suffice for all ranks, the sampler redistributes their cuts and repeats some. Every
  rank plans for all ranks.

Planners of packed rows:

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
import functools
import heapq
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from alload_jax.files import Json
from alload_jax.planning.cost import QuadraticCost, marginal_cost
from alload_jax.planning.epoch import EpochPlan, Packing, RowShape
from alload_jax.planning.policies.packed import first_fit_decreasing
from alload_jax.planning.samples import Samples
from alload_jax.planning.workloads import make_workload

CLIPS = "wan-480p, clips of 20,000 tokens or more"
"""The clips of `wan-480p` of 20,280 to 33,390 tokens: rows hold two or three."""

M_MEM = {"mixed-resolution": 81_920, "wan-480p": 66_816, CLIPS: 66_816, "long-video-V60": 350_000}
"""Workload → maximum tokens of a micro-batch."""

SECONDS_OF_TOKEN = 1 / 1024
"""Seconds per token: a power of two, so that sums of durations are exact."""

Steps = list[list[np.ndarray]]
"""[steps][ranks] → sample numbers; an empty array where a rank has no work."""


@dataclass(frozen=True)
class Case:
    """A workload of `size` samples, planned for `ranks` ranks."""

    workload: str
    size: int
    ranks: int

    @property
    def samples(self) -> Samples:
        """The workload's samples, in random order."""
        return _samples(self.workload, self.size)

    @property
    def m_mem(self) -> int:
        """Maximum tokens of a micro-batch."""
        return M_MEM[self.workload]


@dataclass(frozen=True)
class Lhotse:
    """`DynamicBucketingSampler`.

    Attributes:
      sync_buckets: whether all ranks draw from the same bucket in a step.
      num_buckets: number of buckets of equal total duration; None for a bucket for each length.
      quadratic: tokens at which the quadratic penalty doubles a sample's size; None for no penalty.
      buffer: cuts in the buckets' buffer, as a share of the data set; lhotse's default corresponds
        to 0.2 for 100,000 cuts.
    """

    sync_buckets: bool
    num_buckets: int | None = 30
    quadratic: float | None = None
    buffer: float = 0.2

    def epoch(self, case: Case) -> EpochPlan:
        """Plans an epoch."""
        # Single samples may exceed the bound through the penalty, with a warning.
        warnings.simplefilter("ignore")
        # Repeated cuts are named 123_dup0.
        steps = [
            [np.asarray([int(cut.id.split("_")[0]) for cut in batch]) for batch in step]
            for step in self._sampler(_cuts(case), case)
        ]
        return padded_epoch(steps, case.samples.seq_len)

    def _sampler(self, cuts: list[Any], case: Case) -> Any:
        """Yields the batches of all ranks of a step at once.

        lhotse's sampler makes the batches of all ranks on every rank and selects its own by
        `batches[self.rank]`.
        """
        from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

        class AllRanks(DynamicBucketingSampler):
            def _log_diagnostics(self, batch: Any) -> None:
                """Disabled because it expects a single batch."""

        lengths = np.unique(case.samples.seq_len)
        sampler = AllRanks(
            cuts,
            max_duration=case.m_mem * SECONDS_OF_TOKEN,
            num_buckets=self.num_buckets,
            duration_bins=None if self.num_buckets else (lengths[:-1] * SECONDS_OF_TOKEN).tolist(),
            quadratic_duration=self.quadratic and self.quadratic * SECONDS_OF_TOKEN,
            buffer_size=round(self.buffer * case.size),
            sync_buckets=self.sync_buckets,
            shuffle=True,
            drop_last=False,
            world_size=case.ranks,
            rank=0,
            seed=0,
        )
        sampler.rank = slice(None)
        return sampler


def padded_epoch(steps: Steps, seq_len: np.ndarray) -> EpochPlan:
    """An epoch of padded batches: one row per sample, padded to the longest of the batch."""
    work = _columns(steps)
    work["rows"] = np.diff(work["offsets"])
    work["padded_len"] = np.maximum.reduceat(seq_len[work["sample"]], work["offsets"][:-1])
    return EpochPlan(shape=np.zeros((len(work["rows"]), 3), np.int64), seq_len=seq_len, **work)


def packed_epoch(steps: Steps, seq_len: np.ndarray, row_capacity: int) -> EpochPlan:
    """An epoch of packed rows of `row_capacity` tokens."""
    work = _columns(steps)
    rows, tokens = len(work["rank"]), seq_len[work["sample"]]
    before = np.cumsum(tokens) - tokens
    return EpochPlan(
        rows=np.ones(rows, np.int64),
        padded_len=np.full(rows, row_capacity),
        shape=np.zeros((rows, 3), np.int64),
        packing=Packing(
            capacity=row_capacity,
            segments=int(np.diff(work["offsets"]).max()),
            longest_whole=int(tokens.max()),
            split_tokens=np.zeros(rows, np.int64),
            tokens=tokens,
            offset=before - np.repeat(before[work["offsets"][:-1]], np.diff(work["offsets"])),
            is_split=np.zeros(len(tokens), bool),
        ),
        seq_len=seq_len,
        **work,
    )


def _columns(steps: Steps) -> Json:
    """Fields of `EpochPlan` that padded and packed epochs share.

    Ranks without work have no micro-batch.
    """
    busy = [(i, r, batch) for i, s in enumerate(steps) for r, batch in enumerate(s) if len(batch)]
    step, rank = np.asarray([(i, r) for i, r, _ in busy], np.int64).T
    return {
        "ranks": len(steps[0]),
        "steps": len(steps),
        "step": step,
        "micro_batch": np.zeros(len(busy), np.int64),
        "rank": rank,
        "offsets": np.r_[0, np.cumsum([len(batch) for _, _, batch in busy])],
        "sample": np.concatenate([batch for _, _, batch in busy]).astype(np.int64),
    }


@functools.lru_cache(maxsize=2)
def _samples(workload: str, size: int) -> Samples:
    if workload != CLIPS:
        return make_workload(workload, size)
    samples = make_workload("wan-480p", 3 * size)  # four in ten are such clips
    clips = np.flatnonzero(samples.seq_len >= 20_000)[:size]
    return Samples(samples.shape[clips], samples.seq_len[clips])


def _cuts(case: Case) -> list[Any]:
    from lhotse.cut import MonoCut

    lengths = case.samples.seq_len.tolist()
    return [
        MonoCut(id=str(number), start=0.0, duration=length * SECONDS_OF_TOKEN, channel=0)
        for number, length in enumerate(lengths)
    ]


# ---------------------------------------------------------------- planners of packed rows

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
    """A planner of packed rows.

    Attributes:
      cost: the cost model.
      row_share: T over M_mem; at least the longest sample.
      slot_factor: most samples of a row over the mean. Empty slots are computed too.
      fill: share of the rows' tokens that their samples are chosen to have.
      window: steps whose rows are filled at the same time.
      by_total: whether a sample's load includes what its tokens cost as padding too; otherwise only
        the cost beyond that, as rows are computed whole.
    """

    cost: QuadraticCost
    row_share: float = 1.0
    slot_factor: float = 2.5
    fill: float = 1.0
    window: int = 32
    by_total: bool = False

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
        """Plans an epoch."""
        seq_len, limits = case.samples.seq_len, self._limits(case)
        rng = np.random.default_rng(0)
        steps: list[list[Rows]] = []
        waiting, queue = np.zeros(0, np.int64), rng.permutation(len(seq_len))
        step_tokens = self._step_tokens(limits)
        while len(waiting) + len(queue):
            pool = np.r_[waiting, queue]
            tokens = np.cumsum(seq_len[pool])
            window = max(1, min(self.window, int(tokens[-1] // step_tokens)))
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
    """Longest processing time first; filled less, a row of low load has room for longer."""

    fill: float = 0.99

    def place(self, seq_len: np.ndarray, steps: int, limits: Limits) -> list[list[Rows]]:
        """See `RowPlanner.place`."""
        rows = steps * limits.ranks
        row = longest_first(seq_len, self.load(seq_len), rows, limits)
        return group_by_cost(row, marginal_cost(self.cost, seq_len), rows, limits.ranks)


@dataclass(frozen=True)
class FirstFitGrouped(RowPlanner):
    """First-fit decreasing; the last rows, which may be partly empty, wait for the next window."""

    def place(self, seq_len: np.ndarray, steps: int, limits: Limits) -> list[list[Rows]]:
        """See `RowPlanner.place`."""
        row, rows = limits.first_fit(seq_len)
        rows = max(limits.ranks, rows - rows % limits.ranks)
        row = np.where(row < rows, row, UNPLACED)
        return group_by_cost(row, marginal_cost(self.cost, seq_len), rows, limits.ranks)


@dataclass(frozen=True)
class KarmarkarKarp(RowPlanner):
    """The largest differencing method on the samples of one step.

    Filled less, few partitions exceed M_mem.

    Attributes:
      micro_batches: of about this many rows of M_mem tokens a rank's samples of a step consist.
    """

    fill: float = 0.9
    window: int = 1
    by_total: bool = True
    micro_batches: int = 1

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
