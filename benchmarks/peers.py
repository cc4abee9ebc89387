"""Plans epochs with lhotse's bucketing and grain's packing, for comparison with our policies.

- lhotse's `DynamicBucketingSampler` with durations in place of tokens: at most M_mem tokens in a
  batch, including padding. If a bucket mixes lengths, a batch can exceed M_mem, because the sampler
  adds the last cut before it checks the bound. A batch is padded to its longest cut. If the last
  batches do not suffice for all ranks, the sampler redistributes their cuts and repeats some. Every
  rank plans for all ranks.
- grain's `FirstFitPackIterDataset` and `BestFitPackIterDataset` with rows of M_mem tokens. Either
  each rank packs a strided share of the shuffled samples, or the ranks take the rows of one stream
  in turn. Ranks without rows wait at the end; no sample is dropped.
"""

import functools
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from alload_jax.planning.epoch import EpochPlan, Packing
from alload_jax.planning.samples import Samples
from alload_jax.planning.workloads import make_workload

CLIPS = "wan-480p, clips of 20,000 tokens or more"
"""The clips of `wan-480p` of 20,280 to 33,390 tokens: rows hold two or three."""

M_MEM = {
    "mixed-resolution": 81_920,
    "wan-480p": 66_816,
    CLIPS: 66_816,
    "long-video-V60": 350_000,
}
"""Workload → maximum tokens of a micro-batch."""

SECONDS_OF_TOKEN = 1 / 1024
"""Seconds per token: a power of two, so that sums of durations are exact."""

TIMED = 20_000
"""Maximum number of samples for which the planning of a peer is timed."""

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


class Planner(Protocol):
    """Another library's planner with its settings."""

    def epoch(self, case: Case) -> EpochPlan:
        """Plans an epoch."""
        ...

    def rates(self, case: Case) -> dict[str, float]:
        """Planned samples per second, by column of the table."""
        ...


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
        """See `Planner.epoch`."""
        # Repeated cuts are named 123_dup0.
        steps = [
            [np.asarray([int(cut.id.split("_")[0]) for cut in batch]) for batch in step]
            for step in self._steps(_cuts(case), case)
        ]
        return padded_epoch(steps, case.samples.seq_len)

    def rates(self, case: Case) -> dict[str, float]:
        """See `Planner.rates`; the time to make the cuts does not count."""
        cuts = _cuts(case)
        counts = (sum(map(len, step)) for step in self._steps(cuts, case))
        return {"planned_per_second": rate(counts)}

    def _steps(self, cuts: list[Any], case: Case) -> Iterator[list[Any]]:
        with warnings.catch_warnings():
            # Ignores warnings about single samples that exceed the bound through the penalty.
            warnings.simplefilter("ignore")
            yield from self._sampler(cuts, case)

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


@dataclass(frozen=True)
class Grain:
    """`FirstFitPackIterDataset` or `BestFitPackIterDataset`.

    Attributes:
      best_fit: whether to use the best-fit variant.
      bins: number of rows that are filled at the same time.
      shared: whether the ranks take the rows of one stream in turn; otherwise each rank packs its
        own share of the samples.
      grouped: whether rows are emitted in order of the mean length of their samples
        (`shuffle_bins_group_by_feature`) instead of random order, so that the ranks of a step get
        similar rows.
    """

    best_fit: bool
    bins: int = 64
    shared: bool = False
    grouped: bool = False

    def epoch(self, case: Case) -> EpochPlan:
        """See `Planner.epoch`."""
        streams = [list(self._rows(case, shard)) for shard in self._shards(case)]
        if self.shared:
            streams = [streams[0][rank :: case.ranks] for rank in range(case.ranks)]
        return packed_epoch(turns(streams), case.samples.seq_len, case.m_mem)

    def rates(self, case: Case) -> dict[str, float]:
        """See `Planner.rates`."""
        first = self._shards(case)[0]
        return {
            name: rate(map(len, self._rows(case, first, copy)))
            for name, copy in (("planned_per_second", False), ("packed_per_second", True))
        }

    def _shards(self, case: Case) -> list[slice]:
        if self.shared:
            return [slice(None)]
        return [slice(rank, None, case.ranks) for rank in range(case.ranks)]

    def _rows(self, case: Case, shard: slice, copy: bool = False) -> Iterator[np.ndarray]:
        import grain
        from grain._src.python.dataset.transformations import packing, packing_packed_batch

        seq_len, tokens = case.samples.seq_len, np.zeros(case.m_mem, np.int8)

        def element(number: int) -> dict[str, Any]:
            length = seq_len[number]
            return {"tokens": tokens[:length], "sample": number, "length": int(length)}

        parent = grain.MapDataset.range(case.size).shuffle(seed=0)[shard].map(element)
        packer = (
            packing_packed_batch.BestFitPackedBatch
            if self.best_fit
            else packing_packed_batch.FirstFitPackedBatch
        )
        # Equivalent to the public classes, but with a replaceable packer.
        packed = packing.PackIterDataset(
            parent.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
            packer_cls=packer if copy else _without_copies(packer),
            length_struct={"tokens": case.m_mem},
            num_packing_bins=self.bins,
            meta_features=("sample", "length"),
            shuffle_bins_group_by_feature="length" if self.grouped else None,
        )
        for row in packed:
            yield np.asarray(row["sample"], np.int64)


def _without_copies(packer: Any) -> Any:
    """A packer with the same choice of rows that stores only numbers and lengths of samples."""

    class Counting(packer):
        def add_element_to_batch(self, element: Any, row: int) -> None:
            self._flat_first_free_cell_per_row[0][row] += len(element["tokens"])
            self._num_examples_per_row[row] += 1
            for name in self._non_sequence_meta_features:
                self._non_sequence_meta_values[name][row].append(element[name])

        def get_packed_batch(self) -> dict[str, np.ndarray]:
            rows = np.count_nonzero(self._num_examples_per_row)
            found = {name: np.empty(rows, object) for name in self._non_sequence_meta_features}
            for name, column in found.items():
                column[:] = self._non_sequence_meta_values[name][:rows]
            return found

    return Counting


def turns(streams: Sequence[Sequence[np.ndarray]]) -> Steps:
    """Makes step i from every rank's i-th row; ranks without further rows get an empty one."""
    none = np.zeros(0, np.int64)
    return [
        [stream[i] if i < len(stream) else none for stream in streams]
        for i in range(max(map(len, streams)))
    ]


def padded_epoch(steps: Steps, seq_len: np.ndarray) -> EpochPlan:
    """An epoch of padded batches: one row per sample, padded to the longest of the batch."""
    work = _columns(steps)
    work["rows"] = np.diff(work["offsets"])
    work["padded_len"] = np.maximum.reduceat(seq_len[work["sample"]], work["offsets"][:-1])
    return EpochPlan(shape=np.zeros((len(work["rows"]), 3), np.int64), **work)


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
        **work,
    )


def _columns(steps: Steps) -> dict[str, Any]:
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


def rate(counts: Iterable[int]) -> float:
    """Samples per second over at most `TIMED` samples; `counts` yields the samples per batch."""
    begin, done = time.perf_counter(), 0
    for count in counts:
        done += count
        if done >= TIMED:
            break
    return done / (time.perf_counter() - begin)


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
