"""Compares our policies with planners of other libraries and of the scheduling literature.

    python benchmarks/planning_peers.py

Every planner places the same samples on the same ranks under the same M_mem, and
`alload_jax.planning.metrics` evaluates all plans with the same cost model. The peers' settings are
tuned first for the highest throughput under this model, on fewer samples and ranks except those
that plan a window of steps. Needs the extra `benchmark`. `--peers` measures some peers, and
`--update` keeps the other rows of the JSON; each row has its date.

benchmarks/peers.py describes how the libraries are used, and has the algorithms.
"""

import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from peers import M_MEM, Case, FirstFitGrouped, KarmarkarKarp, Lhotse, LongestFirst

from alload_jax.bench.harness import Record, benchmark_parser, provenance
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json
from alload_jax.planning.cost import CostFile, QuadraticCost, read_cost_file
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.study import policy_config

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COST_MODEL = RESULTS / "calibration_wan_1_3b_h200.json"

OURS: tuple[tuple[str, Json], ...] = (
    ("first_fit", {}),
    ("balanced", {}),
    ("balanced", {"sample_spread": None}),
    ("balanced", {"look_ahead": 128}),
    ("sorted:independent", {}),
    ("dual_constraint:synchronous", {"m_comp": "longest"}),
    ("dual_constraint:synchronous", {"m_comp": "auto"}),
    ("dual_constraint:independent", {"m_comp": "longest"}),
    ("dual_constraint:independent", {"m_comp": "auto"}),
)
"""Policies and settings of our plans."""

LHOTSE = ("lhotse, synchronous", "lhotse, independent")
ROW_PLANNERS = (
    "LPT over a window, rows grouped by cost",
    "LPT per step",
    "FFD over a window, rows grouped by cost",
    "Karmarkar–Karp per step",
    "Karmarkar–Karp, 8 micro-batches a step",
)
PEERS = (*LHOTSE, *ROW_PLANNERS)

SAMPLES, SAMPLES_PER_RANK = 100_000, 3000
"""Samples of a workload, and least samples for each rank."""

T = TypeVar("T")


def measure(epoch: EpochPlan, case: Case, cost: QuadraticCost) -> Json:
    """The metrics of an epoch, with counts that can be nonzero only for peers.

    `over_memory` counts micro-batches of more than M_mem computed tokens. `uneven_steps` counts
    steps in which some rank has no work, and `uneven_samples` the samples in them, which a trainer
    that stops at the first such step would miss. `tokens_per_second` counts each sample once; where
    an epoch drops samples or leaves them over, time is taken in proportion to their cost.
    """
    seq_len, ranks = case.samples.seq_len, epoch.ranks
    metrics = plan_metrics(epoch, cost, case.m_mem)
    busy = np.unique(epoch.step * ranks + epoch.rank) // ranks
    uneven = np.bincount(busy, minlength=epoch.steps) < ranks
    work = cost.sequence_cost(seq_len)
    once = float(work[np.unique(epoch.sample)].sum() / work.sum())
    return dataclasses.asdict(metrics) | {
        "seconds": metrics.cost,
        "tokens_per_second": float(seq_len.sum()) * once / metrics.cost,
        "over_memory": int((epoch.rows * epoch.padded_len > case.m_mem).sum()),
        "uneven_steps": int(uneven.sum()),
        "uneven_samples": int(uneven[epoch.step[epoch.micro_batch_of_part()]].sum()),
    }


def sweep(peer: str, cost: QuadraticCost) -> list[list[Any]]:
    """Rounds of settings of one of `PEERS`; each starts from the best settings so far (`_tune`)."""
    if peer in LHOTSE:
        kind: Any = functools.partial(Lhotse, peer == LHOTSE[0])
        # With this penalty, a batch at the bound costs the same for all lengths.
        equal = cost.c1 / cost.c2
        return [
            [kind(buckets) for buckets in (10, 30, None)],
            [kind(quadratic=round(equal * share)) for share in (16, 4, 1)],
            [kind(buffer=1.0)],
        ]
    fills: tuple[float, ...] = (0.95, 0.98, 0.99, 0.995, 1.0)
    windows: tuple[int, ...] = (8, 64, 128, 512)
    if peer.startswith("Karmarkar"):
        micro_batches = 8 if peer.endswith("8 micro-batches a step") else 1
        kind = functools.partial(KarmarkarKarp, cost, micro_batches=micro_batches)
        fills, windows = (0.85, 0.9, 0.95, 1.0), ()
    elif peer.endswith("per step"):
        kind = functools.partial(LongestFirst, cost, window=1)
        fills, windows = (0.9, *fills), ()
    elif peer.startswith("FFD"):
        kind, fills = functools.partial(FirstFitGrouped, cost), (1.0,)
    else:
        kind = functools.partial(LongestFirst, cost)
    return [
        [kind(fill=fill) for fill in fills],
        [kind(slot_factor=factor) for factor in (1.5, 2.0, 4.0, 8.0)],
        [kind(window=window) for window in windows],
        [kind(by_total=not kind().by_total), kind(row_share=0.9)],
    ]


def merged(chosen: T, tried: T) -> T:
    """`chosen` with the fields of `tried` that differ from their defaults."""
    fields = [f for f in dataclasses.fields(tried) if f.default is not dataclasses.MISSING]  # type: ignore[arg-type]
    changed = {
        f.name: getattr(tried, f.name) for f in fields if getattr(tried, f.name) != f.default
    }
    return dataclasses.replace(chosen, **changed)  # type: ignore[type-var]


def smaller(case: Case, size: int) -> Case:
    """A smaller case for tuning: fewer samples, and fewer ranks (8 or more) for as many steps."""
    if size >= case.size:
        return case
    return Case(case.workload, size, min(case.ranks, max(8, case.ranks * size // case.size)))


def updated(cases: list[Json], earlier: Json) -> list[Json]:
    """The cases with the rows and cases of an earlier result that were not measured again."""
    key = ("workload", "size", "ranks", "m_mem")
    found = {tuple(case[name] for name in key): case for case in cases}
    for old in earlier["cases"]:
        rows = [{"date": earlier["date"]} | row for row in old["rows"]]
        case = found.setdefault(tuple(old[name] for name in key), old | {"rows": []})
        known = {row["planner"] for row in case["rows"]}
        case["rows"] += [row for row in rows if row["planner"] not in known]
    return list(found.values())


def with_ratios(case: Json) -> Json:
    """The case with every row's throughput over that of `balanced`."""
    base = next(row for row in case["rows"] if row["planner"] == "balanced")["tokens_per_second"]
    rows = [row | {"over_balanced": row["tokens_per_second"] / base} for row in case["rows"]]
    return case | {"rows": rows}


def _tune(case: Case, peer: str, cost: QuadraticCost, size: int) -> tuple[Any, Json]:
    """The best settings, and the figures of their epoch."""
    rounds = [settings for settings in sweep(peer, cost) if settings]
    # All steps where it plans a window of them, else fewer.
    small = case if "over a window" in peer else smaller(case, size)
    chosen = rounds[0][0]
    speeds: dict[Any, float] = {}
    for settings in rounds:
        for planner in [merged(chosen, other) for other in settings] if speeds else settings:
            speeds[planner] = measure(planner.epoch(small), small, cost)["tokens_per_second"]
        chosen = max(speeds, key=speeds.__getitem__)
    return chosen, measure(chosen.epoch(case), case, cost)


def _tune_all(
    cases: Sequence[Case], peers: Sequence[str], cost: QuadraticCost, size: int, jobs: int
) -> dict[tuple[Case, str], Any]:
    """Runs `_tune` for every peer and case on several cores, as it measures no times."""
    # The slowest peers start first.
    keys = [(case, peer) for peer in PEERS if peer in peers for case in cases]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        jobs_of = {key: pool.submit(_tune, *key, cost, size) for key in keys}
        found = {}
        for key, job in jobs_of.items():
            found[key] = job.result()
            chosen = found[key][0]
            print(f"{key[0].workload}, {key[0].ranks} ranks: {chosen}", file=sys.stderr, flush=True)
    return found


def _own_row(case: Case, policy: str, fields: Json, costs: CostFile, cost: QuadraticCost) -> Json:
    config = PlanningConfig(policy="balanced", m_mem=case.m_mem, ranks=case.ranks, **fields)
    config = policy_config(config, policy)
    plan = make_plan(config, case.samples, case.ranks, 0, costs)
    titles = {"m_comp": "M_comp", "sample_spread": "bound on samples", "look_ahead": "look-ahead"}
    words = [f"{titles[field]} {value or 'none'}" for field, value in fields.items()]
    row: Json = {"planner": ", ".join([policy.replace(":", ", "), *words])}
    return row | {"settings": dataclasses.asdict(config)} | measure(plan.epoch(0), case, cost)


def main(argv: list[str]) -> int:
    """Tunes the peers, measures all planners and writes JSON."""
    parser = benchmark_parser(__doc__, RESULTS / "planning_peers.json")
    add = parser.add_argument
    add("--workloads", nargs="+", choices=tuple(M_MEM), default=tuple(M_MEM))
    add("--ranks", type=int, nargs="+", default=[8, 64])
    add("--size", type=int, help="samples of a workload; by default by its ranks")
    add("--tune-size", type=int, default=8_000, help="samples that peers are tuned on")
    add("--jobs", type=int, default=2, help="number of processes for tuning")
    add("--peers", nargs="+", choices=PEERS, default=PEERS)
    add("--update", action="store_true", help="keep the rows of --out that are not measured")
    options = parser.parse_args(argv)
    if set(LHOTSE) & set(options.peers) and importlib.util.find_spec("lhotse") is None:
        raise InputError("lhotse is not installed; run `pip install -e .[benchmark]`")
    costs = read_cost_file(COST_MODEL)
    assert costs.quadratic is not None
    cost = costs.quadratic
    cases = [
        Case(name, options.size or max(SAMPLES, ranks * SAMPLES_PER_RANK), ranks)
        for ranks in options.ranks
        for name in options.workloads
    ]
    tuned = _tune_all(cases, options.peers, cost, options.tune_size, options.jobs)
    header = provenance(("lhotse", "numpy", "torch"))
    results = []
    for case in cases:
        rows = [_own_row(case, *own, costs, cost) for own in OURS]
        for peer in options.peers:
            planner, figures = tuned[case, peer]
            fields = dataclasses.asdict(planner)
            fields.pop("cost", None)  # the cost model stands in the JSON once
            rows.append({"planner": peer, "settings": fields} | figures)
        today = [{"date": header["date"]} | row for row in rows]
        results.append(dataclasses.asdict(case) | {"m_mem": case.m_mem, "rows": today})
    if options.update:
        results = updated(results, json.loads(options.out.read_text()))
    results = [with_ratios(case) for case in results]
    for found in results:
        for row in found["rows"]:
            where = f"{found['workload']}, {found['ranks']} ranks"
            print(f"{where}, {row['planner']}: {row['over_balanced']:.3f}")
    source = f"{COST_MODEL.name}, for {costs.device}"
    content = header | {
        "device": "none (planning only)",
        "cost_model": {"source": source, "quadratic": dataclasses.asdict(cost)},
        "cases": results,
    }
    Record(options.out, **content).write()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
