"""Our policies beside lhotse's bucketing and grain's packing, on one workload in one run.

    python benchmarks/planning_peers.py

Every planner lays out the same samples for the same ranks under the same M_mem, and one function
(`alload_jax.planning.metrics`) measures all by the same cost model. The peers' settings are tuned
first for most tokens a second by that model: lhotse's synchronous sampler, the strongest, on the
workload itself, the others on fewer samples. Needs the extra `benchmark`. Writes
benchmarks/results/planning_peers.json and prints the table in Markdown.

How the peers are used:

- lhotse's `DynamicBucketingSampler`, its durations standing for tokens, at most M_mem of them in a
  batch, padding included; where a bucket mixes lengths, the last cut may exceed that, for it is
  taken before it is looked at. A batch is padded to its longest cut. At an uneven end the last
  batches' cuts are shared among all ranks, some twice. Every rank plans for all.
- grain's `FirstFitPackIterDataset` and `BestFitPackIterDataset` with rows of M_mem tokens. Either
  each rank packs a strided share of the shuffled samples, or one stream of rows is dealt to the
  ranks in turn. Ranks that run out of rows wait; no sample is dropped for it.

Samples a second are those of one core. lhotse's ranks all plan for all; grain's may each plan a
share. For grain `planned/s` is its choice of rows alone, without the copying of tokens that it does
meanwhile; `packed/s` has it, at one byte for a token.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from alload_jax.bench.surroundings import surroundings
from alload_jax.errors import InputError, run_command
from alload_jax.planning.analytic import analytic_costs
from alload_jax.planning.architecture import NAMED
from alload_jax.planning.cost import CostFile, QuadraticCost, read_cost_file
from alload_jax.planning.devices import device_named
from alload_jax.planning.epoch import EpochPlan, Packing
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.policies.policy import RankLayout
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig, m_comp_curve, make_plan
from alload_jax.planning.study import policy_config
from alload_jax.planning.workloads import make_workload

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COST_MODEL = RESULTS / "calibration_wan_1_3b_h200.json"
M_MEM = {"mixed-resolution": 81_920, "wan-480p": 66_816}
"""Workload → most tokens of a micro-batch."""

OURS: tuple[tuple[str, Any], ...] = (
    ("first_fit", None),
    ("balanced", None),
    ("dual_constraint:synchronous", "longest"),
    ("dual_constraint:synchronous", "auto"),
    ("dual_constraint:independent", "longest"),
    ("dual_constraint:independent", "auto"),
)
"""Policy and M_comp."""

SECONDS_OF_TOKEN = 1 / 1024
"""A power of two: sums of durations are exact."""

TIMED = 20_000
"""Samples after which the timing of a peer ends, if its epoch has not."""

Steps = list[list[np.ndarray]]
"""[steps][ranks] → sample numbers; an empty array where a rank has no work."""
T = TypeVar("T")


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
      shared: one stream of rows is dealt to the ranks in turn; else each packs its own share.
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


def packed_epoch(steps: Steps, seq_len: np.ndarray, row_tokens: int) -> EpochPlan:
    """Rows of `row_tokens` in which samples lie one after another."""
    work = _columns(steps)
    rows, tokens = len(work["rank"]), seq_len[work["sample"]]
    before = np.cumsum(tokens) - tokens
    return EpochPlan(
        rows=np.ones(rows, np.int64),
        padded_len=np.full(rows, row_tokens),
        shape=np.zeros((rows, 3), np.int64),
        packing=Packing(
            segments=int(np.diff(work["offsets"]).max()),
            region_segments=0,
            align=1,
            context=1,
            levels=(0,),
            longest_whole=int(tokens.max()),
            anchor_tokens=np.zeros(rows, np.int64),
            tokens=tokens,
            offset=before - np.repeat(before[work["offsets"][:-1]], np.diff(work["offsets"])),
            anchor=np.zeros(len(tokens), bool),
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


def measure(epoch: EpochPlan, case: Case, cost: QuadraticCost) -> dict[str, Any]:
    """An epoch's metrics, and what only the peers' epochs can have.

    over_memory: micro-batches of more than M_mem computed tokens. uneven_steps: steps in which
    some rank has no work; uneven_samples: the samples in them, which are lost to a trainer that
    stops at the first such step. tokens_per_second: of the distinct samples placed.
    """
    seq_len = case.samples.seq_len
    metrics = plan_metrics(epoch, seq_len, cost, case.m_mem)
    uneven = np.bincount(epoch.step, minlength=epoch.steps) < epoch.ranks
    once = int(seq_len[np.unique(epoch.sample)].sum())
    return dataclasses.asdict(metrics) | {
        "seconds": metrics.cost,
        "tokens_per_second": once / metrics.cost,
        "over_memory": int((epoch.rows * epoch.padded_len > case.m_mem).sum()),
        "uneven_steps": int(uneven.sum()),
        "uneven_samples": int(uneven[epoch.step[epoch.micro_batch_of_part()]].sum()),
    }


def rate(counts: Iterable[int]) -> float:
    """Samples a second, from the samples of each batch as it comes; after a while it stops."""
    begin, done = time.perf_counter(), 0
    for count in counts:
        done += count
        if done >= TIMED:
            break
    return done / (time.perf_counter() - begin)


def best(rows: Sequence[dict[str, Any]]) -> int:
    """Which row has most tokens a second."""
    return max(range(len(rows)), key=lambda i: rows[i]["tokens_per_second"])


def lhotse_sweep(sync: bool, cost: QuadraticCost) -> list[list[Lhotse]]:
    """Rounds of settings: each starts from the best so far (`_tune`)."""
    # With this penalty a batch at the bound costs the same whatever its lengths.
    equal = cost.c1 / cost.c2
    return [
        [Lhotse(sync, buckets) for buckets in (10, 30, None)],
        [Lhotse(sync, quadratic=round(equal * share)) for share in (16, 4, 1)],
        [Lhotse(sync, buffer=1.0)],
    ]


def grain_sweep(best_fit: bool) -> list[list[Grain]]:
    """Rounds of settings, as in `lhotse_sweep`; here one."""
    return [
        [
            Grain(best_fit, bins, shared, grouped)
            for shared in (False, True)
            for grouped in (False, True)
            for bins in (64, 256, 1024)
        ]
    ]


def merged(chosen: T, tried: T) -> T:
    """`chosen` with what `tried` has other than the defaults."""
    fields = [f for f in dataclasses.fields(tried) if f.default is not dataclasses.MISSING]  # type: ignore[arg-type]
    changed = {
        f.name: getattr(tried, f.name) for f in fields if getattr(tried, f.name) != f.default
    }
    return dataclasses.replace(chosen, **changed)  # type: ignore[type-var]


def smaller(case: Case, size: int) -> Case:
    """For tuning: fewer samples, and fewer ranks so that steps stay as many, but 8 if there are."""
    if size >= case.size:
        return case
    return Case(case.workload, size, min(case.ranks, max(8, case.ranks * size // case.size)))


def tuned_on(case: Case, peer: str, size: int) -> Case:
    """The case itself for the strongest peer, a smaller one for the others."""
    return case if peer == LHOTSE[0] else smaller(case, size)


def _tune(
    case: Case, peer: str, cost: QuadraticCost, size: int
) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The best settings, their epoch's figures, and all that were tried."""
    variant = peer.endswith(("synchronous", "best-fit"))
    rounds: Sequence[Sequence[Any]] = (
        lhotse_sweep(variant, cost) if peer in LHOTSE else grain_sweep(variant)
    )
    small = tuned_on(case, peer, size)
    chosen = rounds[0][0]
    tried: list[Any] = []
    found: list[dict[str, Any]] = []
    for settings in rounds:
        if found:
            settings = [merged(chosen, other) for other in settings]
        for other in settings:
            row = measure(other.epoch(small), small, cost)
            tried.append(other)
            found.append({"settings": dataclasses.asdict(other)} | {k: row[k] for k in SWEPT})
        chosen = tried[best(found)]
    return chosen, measure(chosen.epoch(case), case, cost), found


LHOTSE = ("lhotse, synchronous", "lhotse, independent")
GRAIN = ("grain, first-fit", "grain, best-fit")
SWEPT = (
    "steps",
    "imbalance",
    "idle",
    "padding",
    "dropped",
    "duplicated",
    "over_memory",
    "order_correlation",
    "length_share",
    "seconds",
    "tokens_per_second",
)


def _tune_all(
    cases: Sequence[Case], cost: QuadraticCost, size: int, jobs: int
) -> dict[tuple[Case, str], Any]:
    """`_tune` for every peer and case; no times are taken, so all cores may be busy."""
    # The slowest first.
    asked = [(case, peer) for peer in (*LHOTSE, *GRAIN) for case in cases]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        jobs_of = {key: pool.submit(_tune, *key, cost, size) for key in asked}
        found = {}
        for key, job in jobs_of.items():
            found[key] = job.result()
            chosen = found[key][0]
            print(f"{key[0].workload}, {key[0].ranks} ranks: {chosen}", file=sys.stderr, flush=True)
    return found


def _of_peer(
    case: Case, name: str, planner: Planner, figures: dict[str, Any], repeats: int
) -> dict[str, Any]:
    rates = [planner.rates(case) for _ in range(repeats)]
    medians = {column: statistics.median(r[column] for r in rates) for column in rates[0]}
    settings = dataclasses.asdict(planner)  # type: ignore[call-overload]
    return {"planner": name, "settings": settings} | figures | medians


def _of_ours(
    case: Case, policy: str, m_comp: Any, costs: CostFile, cost: QuadraticCost, repeats: int
) -> dict[str, Any]:
    config = PlanningConfig(policy="balanced", m_mem=case.m_mem, m_comp=m_comp, ranks=case.ranks)
    config = policy_config(config, policy)
    if m_comp == "auto":
        # Searched for once, as the peers' settings are; searching does not count.
        layout = RankLayout(case.ranks, config.ranks_mode)
        chosen = m_comp_curve(config, case.samples, layout, costs).chosen
        config = dataclasses.replace(config, m_comp=chosen)
    make = functools.partial(make_plan, config, case.samples, case.ranks, 0, costs)
    plan, seconds = make(), []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = make()  # a plan's first epoch is made with it
        seconds.append(time.perf_counter() - begin)
    name = policy.replace(":", ", ") + (f", M_comp {m_comp}" if m_comp else "")
    row = {"planner": name, "settings": dataclasses.asdict(config)}
    row |= measure(plan.epoch(0), case, cost)
    return row | {"planned_per_second": case.size / statistics.median(seconds)}


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


def _costs(path: Path) -> tuple[CostFile, str]:
    """The cost model and where it comes from; the analytic one until there is a measured one."""
    if path == COST_MODEL and not path.exists():
        costs = analytic_costs(NAMED["wan2.1-1.3b"], device_named("h200"))
        return costs, f"analytic, not measured: wan2.1-1.3b on an H200; there was no {path.name}"
    return read_cost_file(path), f"{path.name}, for {read_cost_file(path).device}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", "{:,}".format),
    "imbalance": ("imbalance", "{:.2%}".format),
    "idle": ("idle", "{:.2%}".format),
    "padding": ("padding", "{:.2%}".format),
    "dropped": ("dropped", "{:,}".format),
    "duplicated": ("repeated", "{:,}".format),
    "over_memory": ("over M_mem", "{:,}".format),
    "uneven_steps": ("uneven steps", "{:,}".format),
    "buckets": ("programs", "{:,}".format),
    "length_share": ("lengths of a step", "{:.1%}".format),
    "order_correlation": ("order", "{:+.2f}".format),
    "seconds": ("epoch, s", "{:,.0f}".format),
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "planned_per_second": ("planned/s", "{:,.0f}".format),
    "packed_per_second": ("packed/s", "{:,.0f}".format),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One case's rows in Markdown."""
    lines = [
        "| planner | " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for row in rows:
        cells = [
            show(row[name]) if row.get(name) is not None else ""
            for name, (_, show) in COLUMNS.items()
        ]
        lines.append(f"| {row['planner']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _processor() -> str:
    """The CPU's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def main(argv: list[str]) -> int:
    """Tunes, measures, writes and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cost-model", type=Path, default=COST_MODEL, help="JSON of `alload calibrate`")
    add("--workloads", nargs="+", choices=tuple(M_MEM), default=tuple(M_MEM))
    add("--ranks", type=int, nargs="+", default=[8, 64])
    add("--size", type=int, default=100_000, help="samples of a workload")
    add("--tune-size", type=int, default=10_000, help="samples that most peers are tuned on")
    add("--repeats", type=int, default=3, help="of timings, of which the median is taken")
    add("--jobs", type=int, default=2, help="processes that tune")
    add("--out", type=Path, default=RESULTS / "planning_peers.json")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("lhotse") is None:
        raise InputError("lhotse is not installed; run `pip install -e .[benchmark]`")
    costs, source = _costs(options.cost_model)
    if costs.quadratic is None:
        raise InputError(f"{options.cost_model}: has no quadratic model; run `alload calibrate`")
    cost = costs.quadratic
    cases = [Case(name, options.size, n) for n in options.ranks for name in options.workloads]
    tuned = _tune_all(cases, cost, options.tune_size, options.jobs)
    results = []
    for case in cases:
        rows = [_of_ours(case, *o, costs, cost, options.repeats) for o in OURS]
        for peer in (*LHOTSE, *GRAIN):
            planner, figures, _ = tuned[case, peer]
            rows.append(_of_peer(case, peer, planner, figures, options.repeats))
        sweeps = {
            peer: {
                "on": dataclasses.asdict(tuned_on(case, peer, options.tune_size)),
                "rows": tuned[case, peer][2],
            }
            for peer in (*LHOTSE, *GRAIN)
        }
        of_case = dataclasses.asdict(case) | {"m_mem": case.m_mem}
        results.append(of_case | {"rows": rows, "sweeps": sweeps})
        print(f"\n{case.workload}, {case.ranks} ranks, M_mem {case.m_mem:,}\n\n{table(rows)}")
        sys.stdout.flush()
    content = surroundings(("lhotse", "grain", "numpy", "torch")) | {
        "device": f"none (planning only); {_processor()}, {os.cpu_count()} cores",
        "command": "python benchmarks/planning_peers.py " + shlex.join(argv),
        "cost_model": {"source": source, "quadratic": dataclasses.asdict(cost)},
        "cases": results,
    }
    options.out.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
