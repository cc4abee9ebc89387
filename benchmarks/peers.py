"""lhotse's bucketing and grain's packing, as planners of epochs that ours are measured beside.

- lhotse's `DynamicBucketingSampler`, its durations standing for tokens, at most M_mem of them in a
  batch, padding included; where a bucket mixes lengths, the last cut may exceed that, for it is
  taken before it is looked at. A batch is padded to its longest cut. At an uneven end the last
  batches' cuts are shared among all ranks, some twice. Every rank plans for all.
- grain's `FirstFitPackIterDataset` and `BestFitPackIterDataset` with rows of M_mem tokens. Either
  each rank packs a strided share of the shuffled samples, or the ranks take the rows of
  one stream in turn. Ranks that run out of rows wait; no sample is dropped for it.
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

M_MEM = {"mixed-resolution": 81_920, "wan-480p": 66_816}
"""Workload → most tokens of a micro-batch."""

SECONDS_OF_TOKEN = 1 / 1024
"""A power of two: sums of durations are exact."""

TIMED = 20_000
"""Samples after which the timing of a peer ends, if its epoch has not."""

Steps = list[list[np.ndarray]]
"""[steps][ranks] → sample numbers; an empty array where a rank has no work."""


@dataclass(frozen=True)
class Case:
    """What is planned: a workload for a number of ranks."""

    workload: str
    size: int
    ranks: int

    @property
    def samples(self) -> Samples:
        """The workload's samples, in random order."""
        return _samples(self.workload, self.size)

    @property
    def m_mem(self) -> int:
        """Most tokens of a micro-batch."""
        return M_MEM[self.workload]


class Planner(Protocol):
    """A peer with its settings."""

    def epoch(self, case: Case) -> EpochPlan:
        """Plans an epoch."""
        ...

    def rates(self, case: Case) -> dict[str, float]:
        """Samples a second, by column of the table."""
        ...


@dataclass(frozen=True)
class Lhotse:
    """`DynamicBucketingSampler`.

    Attributes:
      sync_buckets: ranks draw from one bucket.
      num_buckets: of equal total duration; None for a bucket for each length.
      quadratic: tokens at which the quadratic penalty doubles a sample's size; None for none.
      buffer: cuts that wait in buckets, as a share of the data set; of 100,000 cuts lhotse's
        default is 0.2.
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
        """See `Planner.rates`; making the cuts does not count."""
        cuts = _cuts(case)
        counts = (sum(map(len, step)) for step in self._steps(cuts, case))
        return {"planned_per_second": rate(counts)}

    def _steps(self, cuts: list[Any], case: Case) -> Iterator[list[Any]]:
        with warnings.catch_warnings():
            # Of batches of one sample that the penalty lifts over the bound.
            warnings.simplefilter("ignore")
            yield from self._sampler(cuts, case)

    def _sampler(self, cuts: list[Any], case: Case) -> Any:
        """Yields the batches of all ranks of a step at once.

        lhotse's sampler makes them all on every rank, then takes its own by `batches[self.rank]`.
        """
        from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

        class AllRanks(DynamicBucketingSampler):
            def _log_diagnostics(self, batch: Any) -> None:
                """Expects a single batch."""

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
      best_fit: which of the two.
      bins: rows that are open at once.
      shared: the ranks take the rows of one stream in turn; else each packs its own share.
      grouped: rows leave by the mean of their samples' lengths (`shuffle_bins_group_by_feature`)
        in place of random order, so that ranks get similar rows at a time.
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
        # What the public classes are, but for the packer that can be exchanged.
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
    """The same choice of rows; only the samples' numbers and lengths are kept."""

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
    """Step i takes every rank's i-th row; ranks that have run out get none."""
    none = np.zeros(0, np.int64)
    return [
        [stream[i] if i < len(stream) else none for stream in streams]
        for i in range(max(map(len, streams)))
    ]


def padded_epoch(steps: Steps, seq_len: np.ndarray) -> EpochPlan:
    """Batches of a row for each sample, all as long as the longest."""
    work = _columns(steps)
    work["rows"] = np.diff(work["offsets"])
    work["padded_len"] = np.maximum.reduceat(seq_len[work["sample"]], work["offsets"][:-1])
    return EpochPlan(shape=np.zeros((len(work["rows"]), 3), np.int64), **work)


def packed_epoch(steps: Steps, seq_len: np.ndarray, row_capacity: int) -> EpochPlan:
    """Rows of `row_capacity` tokens in which samples lie one after another."""
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
    """Fields of `EpochPlan` that padded and packed epochs share; ranks without work have none."""
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
    """Samples a second, from the samples of each batch as it comes; after a while it stops."""
    begin, done = time.perf_counter(), 0
    for count in counts:
        done += count
        if done >= TIMED:
            break
    return done / (time.perf_counter() - begin)


@functools.lru_cache(maxsize=2)
def _samples(workload: str, size: int) -> Samples:
    return make_workload(workload, size)


def _cuts(case: Case) -> list[Any]:
    from lhotse.cut import MonoCut

    lengths = case.samples.seq_len.tolist()
    return [
        MonoCut(id=str(number), start=0.0, duration=length * SECONDS_OF_TOKEN, channel=0)
        for number, length in enumerate(lengths)
    ]
