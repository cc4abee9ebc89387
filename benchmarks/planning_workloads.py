"""Measures the plans of all policies for the named workloads on 8 to 1,024 ranks.

    python benchmarks/planning_workloads.py

The costs are predictions of the cost model that `alload calibrate` measured on an H200. Writes
benchmarks/results/planning_workloads.json, and prints its tables. Takes
about ten minutes on one core, and 3 GB of memory for the plan of ten million samples. `--parts`
measures some parts and keeps the others of the JSON; each part has its date and command there.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.bench.harness import benchmark_parser, markdown, provenance, typed
from alload_jax.files import Json
from alload_jax.planning.cost import (
    largest_indivisible_cost,
    micro_batch_costs,
    rank_costs,
    read_cost_file,
)
from alload_jax.planning.metrics import excess_over_bound
from alload_jax.planning.policies.bucketed import DualConstraint
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.policies.search import draw_samples, predicted_time
from alload_jax.planning.samples import Geometry, read_samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.study import Case, Study
from alload_jax.planning.workloads import make_workload

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "benchmarks" / "results" / "calibration_wan_1_3b_h200.json"
RESULT = ROOT / "benchmarks" / "results" / "planning_workloads.json"

M_MEM = {
    "wan-480p": 66_816,
    "mixed-resolution": 81_920,
    "long-video-V35": 350_000,
    "long-video-V60": 350_000,
}
RANKS = (8, 16, 64, 1024)
SAMPLES_PER_RANK = {"wan-480p": 1200, "mixed-resolution": 1200}
LONG_VIDEO_SAMPLES_PER_RANK = 4000
"""Enough for sixty or more steps per epoch, so that the less balanced last steps matter little."""
POLICIES = (
    "equal_tokens:independent",
    "dual_constraint:independent",
    "dual_constraint:synchronous",
    "sorted:independent",
    "first_fit",
    "balanced",
)
CONTEXT = 4
PAPER_M_MEM = {
    "wan-480p": (66_816, 133_632),
    "mixed-resolution": (81_920, 156_916),
    "long-video-V35": (350_000, 700_000, 1_050_000),
    "long-video-V60": (350_000, 700_000, 1_050_000),
}
"""Tokens of one to four longest samples: with more memory, M_comp is the bound of more buckets."""

SMALL = {
    "lora200": (184_000, 8, Geometry()),
    "opensora636": (60_000, 8, Geometry()),
    "tiny50": (98_304, 8, Geometry()),
    "mixed32": (4_352, 1, Geometry((1, 1, 1), (1, 8, 8))),
}
"""Sets of benchmarks/small_sets: M_mem, ranks, and how pixels become tokens.

60 clips and 100 stills of 480p with 40 clips of 720p; 16 clips of Open-Sora's example; 50 lengths
of a log-normal distribution; 32 clips and stills of mixed aspect, trained in pixels.
"""
SMALL_POLICIES = (
    *("equal_tokens", "dual_constraint", "equal_tokens:independent", "dual_constraint:independent"),
    *("sorted:independent", "first_fit", "balanced", "auto"),
)

PARTS = ("plans", "paper", "accumulation", "small", "speed")
"""Of the JSON."""
MICRO_BATCHES = (1, 4, 16)
"""Micro-batches of a step: with more, the sum over them evens out between ranks."""
EXPONENTS = (1.5, 2.0)
"""Values of p."""
ACCUMULATION_RANKS = 16
ACCUMULATION_STEPS = 20
"""Steps of the most micro-batches in an epoch, if all were full."""
M_COMP_VALUES, M_COMP_SAMPLES = 25, 200_000
"""Values of M_comp that are tried, and most samples that are planned with each."""

_PAPER_CASES: tuple[tuple[str, Any], ...] = (
    ("equal_tokens", None),
    ("dual_constraint", "longest"),
    ("dual_constraint", "auto"),
    ("sorted", None),
    ("balanced", None),
)


def main() -> None:
    """Measures, writes JSON, and prints the tables."""
    parser = benchmark_parser(__doc__, RESULT)
    parser.add_argument("--cost-model", default=str(COSTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--workloads", nargs="+", choices=tuple(M_MEM), default=tuple(M_MEM))
    parser.add_argument("--ten-million", action="store_true", help="plan only ten million samples")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    if options.ten_million:
        print(json.dumps(_ten_million(options.cost_model)))
        return
    content = _measured(options)
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print("\n\n".join(_tables(content)))


def _measured(options: argparse.Namespace) -> Json:
    """The JSON: the parts asked for, and the others as they were."""
    header = {
        "command": typed(),
        **provenance(["numpy"]),
        "device": f"none (planning only); {platform.machine()}",
    }
    content = json.loads(options.out.read_text()) if set(options.parts) < set(PARTS) else {}
    content |= {"cost_model": Path(options.cost_model).name, "m_mem": M_MEM}
    measured = content.setdefault("measured", {})
    for part in options.parts:
        if part == "speed":
            content[part] = _speed(options.cost_model)
        else:
            work = {"plans": _plans, "paper": _paper, "accumulation": _accumulation}
            content[part] = list((work | {"small": _small})[part](options))
        measured[part] = header
    return content


def _study(cost_model: str, workload: str, size: int, m_mem: int, **fields: Any) -> Study:
    config = PlanningConfig(policy="balanced", m_mem=m_mem, cost_model=cost_model, **fields)
    return Study(make_workload(workload, size), config, read_cost_file(cost_model))


def _plans(options: argparse.Namespace) -> Iterator[Json]:
    """Figures of every policy for every workload and number of ranks."""
    for workload in options.workloads:
        for ranks in options.ranks:
            each = SAMPLES_PER_RANK.get(workload, LONG_VIDEO_SAMPLES_PER_RANK)
            size = max(100_000, each * ranks)
            study = _study(options.cost_model, workload, size, M_MEM[workload], m_comp="auto")
            split_study = replace(study, config=replace(study.config, m_comp=None, context=CONTEXT))
            open_bound = replace(study, config=replace(study.config, m_comp=None))
            cases = [study.case(policy, ranks) for policy in POLICIES[:4]]
            cases += [open_bound.case(policy, ranks) for policy in POLICIES[4:]]
            for case in [*cases, split_study.case("balanced", ranks)]:
                found = {"workload": workload, "ranks": ranks} | _figures(case, study)
                print(workload, ranks, case.name, f"{case.metrics.imbalance:.4f}", flush=True)
                yield found


def _figures(case: Case, study: Study) -> Json:
    """Metrics, and the excess over the bound in steps with at least 4 samples per rank."""
    epoch, seq_len = case.epoch, study.samples.seq_len
    seconds = case.config.seconds_per_split_token(study.costs)
    cost = rank_costs(epoch, micro_batch_costs(epoch, seq_len, study.predictor, seconds))
    excess = excess_over_bound(cost, largest_indivisible_cost(epoch, seq_len, study.predictor))
    held = rank_costs(epoch, np.diff(epoch.offsets).astype(np.float64))
    enough = excess[held.mean(axis=1) >= 4]
    return {
        "policy": case.name,
        "metrics": asdict(case.metrics),
        "tokens_per_second": case.metrics.tokens_per_second,
        "repeated_neighbours": case.neighbours._asdict(),
        "steps_of_4_samples_a_rank": len(enough),
        "excess_of_4": float(enough.mean()) if len(enough) else None,
        "excess_max_of_4": float(enough.max()) if len(enough) else None,
        "steps_above_3_percent": int((enough > 0.03).sum()),
    }


def _paper(options: argparse.Namespace) -> Iterator[Json]:
    """AdaptiveLoad's policies on independent ranks, with M_comp of the longest sample and the best.

    AdaptiveLoad does not say how M_comp and p are chosen.
    """
    sizes = ((name, m_mem) for name in options.workloads for m_mem in PAPER_M_MEM[name])
    for workload, m_mem in sizes:
        study = _study(options.cost_model, workload, 60_000, m_mem, ranks_mode="independent")
        for ranks in (8, 16):
            found: Json = {"workload": workload, "ranks": ranks, "m_mem": m_mem}
            for policy, m_comp in _PAPER_CASES:
                config = replace(study.config, m_comp=m_comp)
                case = replace(study, config=config).case(policy, ranks)
                found[f"{policy} {m_comp}" if m_comp else policy] = {
                    "imbalance": case.metrics.imbalance,
                    "step_cv": case.metrics.step_cv,
                    "compute_cv": case.metrics.compute_cv,
                    "tokens_per_second": case.metrics.tokens_per_second,
                    "m_comp": getattr(case.plan.policy, "m_comp", None),
                }
            yield found


def _small(options: argparse.Namespace) -> Iterator[Json]:
    """Figures of every policy for small sets."""
    for name, (m_mem, ranks, geometry) in SMALL.items():
        samples = read_samples(ROOT / "benchmarks" / "small_sets" / f"{name}.csv", geometry)
        config = PlanningConfig(policy="balanced", m_mem=m_mem, cost_model=options.cost_model)
        study = Study(samples, config, read_cost_file(options.cost_model))
        for policy in SMALL_POLICIES:
            case = study.case(policy, ranks)
            metrics = asdict(case.metrics) | {"first_step_seconds": case.first_step_seconds}
            found = {"set": name, "samples": len(samples), "ranks": ranks, "m_mem": m_mem}
            shown = case.name if policy != "auto" else f"auto: {case.name}"
            yield found | {"policy": shown, "metrics": metrics}


def _accumulation(options: argparse.Namespace) -> Iterator[Json]:
    """AdaptiveLoad's policies with several micro-batches a step, over `balanced` with one row."""
    sizes = ((name, m_mem) for name in options.workloads for m_mem in PAPER_M_MEM[name])
    for workload, m_mem in sizes:
        mean = float(make_workload(workload, 20_000).seq_len.mean())
        rows = ACCUMULATION_STEPS * ACCUMULATION_RANKS * max(MICRO_BATCHES)
        size = round(rows * m_mem / mean)
        study = _study(options.cost_model, workload, size, m_mem, ranks_mode="independent")
        base = study.case("balanced", ACCUMULATION_RANKS).metrics
        for micro_batches in MICRO_BATCHES:
            config = replace(study.config, micro_batches_per_step=micro_batches)
            several = replace(study, config=config)
            found = [_accumulated(several, "equal_tokens", None, None)]
            found += [_best_m_comp(several, p) for p in EXPONENTS]
            for row in found:
                row |= {"over_balanced": row["tokens_per_second"] / base.tokens_per_second}
                row |= {"samples_over_balanced": row["samples_per_step"] * base.steps / size}
                row = {"workload": workload, "m_mem": m_mem, "size": size} | row
                print({k: v for k, v in row.items() if k != "m_comp"}, flush=True)
                yield row


def _best_m_comp(study: Study, p: float) -> Json:
    """`dual_constraint` with this p and the M_comp of least predicted time."""
    m_mem, seq_len = study.config.required_m_mem(), study.samples.seq_len
    least, most = DualConstraint(m_mem, p=p).m_comp_range(np.unique(seq_len))
    topology = RankTopology(ACCUMULATION_RANKS, "independent", study.config.micro_batches_per_step)

    drawn = draw_samples(study.samples, M_COMP_SAMPLES)

    def time_at(m_comp: float) -> float:
        policy = DualConstraint(m_mem, m_comp, p)
        return predicted_time(policy, drawn, topology, study.predictor)

    m_comp = min(np.geomspace(least, most, M_COMP_VALUES).tolist(), key=time_at)
    return _accumulated(study, "dual_constraint", m_comp, p)


def _accumulated(study: Study, policy: str, m_comp: float | None, p: float | None) -> Json:
    """Figures of one policy."""
    config = replace(study.config, m_comp=m_comp, p=p)
    metrics = replace(study, config=config).case(policy, ACCUMULATION_RANKS).metrics
    return {
        "ranks": ACCUMULATION_RANKS,
        "policy": policy,
        "micro_batches": config.micro_batches_per_step,
        "p": p,
        "m_comp": m_comp,
        "imbalance": metrics.imbalance,
        "tokens_per_second": metrics.tokens_per_second,
        "samples_per_step": metrics.samples / metrics.steps,
    }


def _speed(cost_model: str) -> Json:
    """Planning speed on one core, and time and memory of a plan of ten million samples."""
    found: Json = {}
    for policy, ranks in (
        ("equal_tokens", 64),
        ("dual_constraint", 64),
        ("first_fit", 64),
        ("balanced", 64),
        ("balanced", 1024),
    ):
        study = _study(cost_model, "mixed-resolution", 400_000, M_MEM["mixed-resolution"])
        plan = study.case(policy, ranks).plan
        seconds = statistics.median(_seconds(plan.epoch, epoch) for epoch in (1, 2, 3))
        found[f"{policy}, {ranks} ranks"] = {
            "samples_per_second": len(study.samples) / seconds,
            "milliseconds_per_step": 1000 * seconds / plan.epoch(3).steps,
        }
    command = [sys.executable, __file__, "--ten-million", "--cost-model", cost_model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return found | {"ten million, 1024 ranks": json.loads(done.stdout)}


def _seconds(work: Any, *arguments: Any) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def _ten_million(cost_model: str) -> Json:
    """Time and memory of an epoch of ten million samples on 1,024 ranks."""
    study = _study(cost_model, "mixed-resolution", 10_000_000, M_MEM["mixed-resolution"])
    before = _peak_memory()
    seconds = _seconds(study.case, "balanced", 1024)
    peak = _peak_memory()
    return {
        "seconds_planned_and_measured": seconds,
        "bytes_before": before,
        "bytes_most": peak,
    }


def _peak_memory() -> int:
    """Peak memory of this process in bytes; rusage would include its parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


_HEAD = (
    *("workload", "ranks", "policy", "imbalance", "idle", "padding", "of M_mem", "programs"),
    *("above bound, mean", "worst", "tokens/s over balanced"),
)


def _tables(content: Json) -> Iterator[str]:
    yield markdown(_HEAD, _plan_rows(content["plans"]))
    cases = [f"{policy} {m_comp}" if m_comp else policy for policy, m_comp in _PAPER_CASES]
    for figure, text in (("imbalance", "{:.1%}".format), ("tokens_per_second", "{:,.0f}".format)):
        yield markdown(
            ("workload", "M_mem", "ranks", *(f"{case}, {figure}" for case in cases)),
            [
                [row["workload"], f"{row['m_mem']:,}", row["ranks"]]
                + [text(row[case][figure]) for case in cases]
                for row in content["paper"]
            ],
        )
    yield markdown(_ACCUMULATION_HEAD, _accumulation_rows(content["accumulation"]))
    yield markdown(_SMALL_HEAD, _small_rows(content["small"]))
    yield json.dumps(content["speed"], indent=1)


_SMALL_HEAD = (
    *("data", "samples", "ranks", "policy", "steps", "idle", "padding", "programs"),
    *("time to the first step", "time of the epoch", "tokens/s"),
)


def _small_rows(found: list[Json]) -> Iterator[list[Any]]:
    """Small sets; tokens/s over those of `balanced`."""
    for row in found:
        metrics = row["metrics"]
        [best] = (
            each["metrics"]["tokens_per_second"]
            for each in found
            if each["set"] == row["set"] and each["policy"] == "balanced"
        )
        yield [
            *(f"`{row['set']}`", row["samples"], row["ranks"], row["policy"], metrics["steps"]),
            *(f"{metrics['idle']:.1%}", f"{metrics['padding']:.1%}", metrics["buckets"]),
            *(f"{metrics['first_step_seconds']:.0f} s", f"{metrics['cost']:.1f} s"),
            f"{metrics['tokens_per_second'] / best:.2f}×",
        ]


_ACCUMULATION_HEAD = (
    "data",
    "M_mem",
    *(f"`equal_tokens`, {count}" for count in MICRO_BATCHES),
    *(f"`dual_constraint`, {count}" for count in MICRO_BATCHES),
    f"samples of a step with {MICRO_BATCHES[-1]}, over `balanced`",
)


def _accumulation_rows(found: list[Json]) -> Iterator[list[str]]:
    """tokens/s over `balanced` by micro-batches of a step; of `dual_constraint` with the best p."""
    for workload, m_mem in dict.fromkeys((row["workload"], row["m_mem"]) for row in found):
        same = [row for row in found if (row["workload"], row["m_mem"]) == (workload, m_mem)]
        cells = [f"`{workload}`", f"{m_mem:,}"]
        for policy in ("equal_tokens", "dual_constraint"):
            for count in MICRO_BATCHES:
                rows = [r for r in same if (r["policy"], r["micro_batches"]) == (policy, count)]
                best = max(rows, key=lambda row: row["over_balanced"])
                cells.append(f"{best['over_balanced']:.2f}×")
        yield [*cells, f"{best['samples_over_balanced']:.0f}×"]


def _plan_rows(plans: list[Json]) -> Iterator[list[Any]]:
    best = {(p["workload"], p["ranks"]): p for p in plans if p["policy"] == "balanced"}
    for plan in plans:
        metrics = plan["metrics"]
        ratio = (
            plan["tokens_per_second"] / best[plan["workload"], plan["ranks"]]["tokens_per_second"]
        )
        row = [plan["workload"], f"{plan['ranks']:,}", f"`{plan['policy']}`"]
        names = ("imbalance", "idle", "padding", "utilisation")
        row += [f"{metrics[name]:.1%}" for name in names]
        bound = [plan["excess_of_4"], plan["excess_max_of_4"]]
        row += [metrics["buckets"], *("–" if v is None else f"{v:.2%}" for v in bound)]
        yield [*row, f"{ratio:.2f}×"]


if __name__ == "__main__":
    main()
