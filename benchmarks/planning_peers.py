"""Our policies beside lhotse's bucketing and grain's packing, on one workload in one run.

    python benchmarks/planning_peers.py

Every planner lays out the same samples for the same ranks under the same M_mem, and one function
(`alload_jax.planning.metrics`) measures all by the same cost model. The peers' settings are tuned
first for most tokens a second by that model: lhotse's synchronous sampler, the strongest, on the
workload itself, the others on fewer samples. Needs the extra `benchmark`. Writes
benchmarks/results/planning_peers.json and prints the table in Markdown.

How the peers are used is said in benchmarks/peers.py. Samples a second are those of one core.
lhotse's ranks all plan for all; grain's may each plan a share. For grain `planned/s` is its choice
of rows alone, without the copying of tokens that it does meanwhile; `packed/s` has it, at one byte
for a token.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from peers import M_MEM, Case, Grain, Lhotse, Planner

from alload_jax.bench.provenance import provenance
from alload_jax.errors import InputError, run_command
from alload_jax.planning.cost import CostFile, QuadraticCost, read_cost_file
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.factory import m_comp_curve, make_plan
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.study import policy_config
from alload_jax.planning.topology import RankTopology

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COST_MODEL = RESULTS / "calibration_wan_1_3b_h200.json"

OURS: tuple[tuple[str, Any], ...] = (
    ("first_fit", None),
    ("balanced", None),
    ("dual_constraint:synchronous", "longest"),
    ("dual_constraint:synchronous", "auto"),
    ("dual_constraint:independent", "longest"),
    ("dual_constraint:independent", "auto"),
)
"""Policy and M_comp."""

T = TypeVar("T")


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
        topology = RankTopology(case.ranks, config.ranks_mode)
        chosen = m_comp_curve(config, case.samples, topology, costs).chosen
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
    costs = read_cost_file(options.cost_model)
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
    content = provenance(("lhotse", "grain", "numpy", "torch")) | {
        "device": f"none (planning only); {_processor()}, {os.cpu_count()} cores",
        "command": "python benchmarks/planning_peers.py " + shlex.join(argv),
        "cost_model": {
            "source": f"{options.cost_model.name}, for {costs.device}",
            "quadratic": dataclasses.asdict(cost),
        },
        "cases": results,
    }
    options.out.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
