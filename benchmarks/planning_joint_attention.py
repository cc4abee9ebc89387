"""Plans of all policies for HunyuanVideo 1.5, where conditions count in the length of a sample.

    python benchmarks/planning_joint_attention.py

Costs are predicted for the model on H200s, eight of which share its weights (`step_cost`, within
13 % of the steps measured in benchmarks/results/hunyuan_video_step_*.json). Samples are those of
named workloads, text-to-video, with texts of random lengths. Packed rows hold each sample's own
tokens; bucketed rows have room for the longest condition. Writes
benchmarks/results/planning_joint_attention.json and prints a table.
"""

import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from alload_jax.bench.harness import Record, benchmark_parser, markdown
from alload_jax.files import Json
from alload_jax.planning.analytic import analytic_costs
from alload_jax.planning.architecture import architecture_named
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.policies import find_policy
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.study import Study
from alload_jax.planning.workloads import make_workload

RESULT = Path(__file__).parent / "results" / "planning_joint_attention.json"
WORKLOADS = {"wan-480p": 71_680, "mixed-resolution": 155_648, "long-video-V35": 350_208}
"""M_mem of each, at least the tokens of the longest sample with its condition."""
RANKS = (8, 64)
SAMPLES_PER_RANK = 1200
SHARDS = 8
POLICIES = (
    "equal_tokens:independent",
    "dual_constraint:independent",
    "dual_constraint:synchronous",
    "sorted:independent",
    "first_fit",
    "balanced",
)
TEXT_TOKENS, TEXT_SIGMA, MOST_TEXT = 180, 0.6, 1000
"""Median and spread of a lognormal distribution of text lengths, and the model's limit."""
GLYPHS_SHARE, GLYPH_TOKENS = 0.1, (8, 64)
"""Samples that have characters to draw, and the range of their tokens."""
FIELDS = ("steps", "imbalance", "idle", "padding", "cost")


def condition_tokens(count: int, seed: int = 0) -> np.ndarray:
    """[count] tokens of each sample's text and glyphs."""
    rng = np.random.default_rng(seed)
    text = np.exp(rng.normal(np.log(TEXT_TOKENS), TEXT_SIGMA, count))
    glyphs = rng.integers(*GLYPH_TOKENS, count) * (rng.random(count) < GLYPHS_SHARE)
    return np.clip(text.astype(np.int64), 1, MOST_TEXT) + glyphs


def with_conditions(samples: Samples, packed: bool) -> Samples:
    """The samples with their own conditions in packed rows, else with room for the longest one."""
    tokens = condition_tokens(len(samples))
    return replace(samples, seq_len=samples.seq_len + (tokens if packed else tokens.max()))


def cases(workload: str, ranks: int) -> Iterator[Json]:
    """Figures of every policy. Throughput counts samples, as tokens differ by layout."""
    samples = make_workload(workload, SAMPLES_PER_RANK * ranks)
    costs = analytic_costs(
        architecture_named("hunyuan-video-1.5"), DEVICES["h200"], "full", shards=SHARDS
    )
    config = PlanningConfig(policy="balanced", m_mem=WORKLOADS[workload], p=2.0)
    for policy in POLICIES:
        packed = find_policy(policy.partition(":")[0]).packed
        case = Study(with_conditions(samples, packed), config, costs).case(policy, ranks)
        figures = case.figures()["metrics"]
        row = {"workload": workload, "ranks": ranks, "policy": case.name}
        row |= {field: figures[field] for field in FIELDS}
        yield row | {"samples_per_second": len(samples) / figures["cost"]}


def table(rows: list[Json]) -> str:
    """The rows in Markdown, throughput relative to AdaptiveLoad's baseline, `equal_tokens`."""
    lines = []
    base: dict[tuple[str, int], float] = {}
    for row in rows:
        speed = row["samples_per_second"]
        first = base.setdefault((row["workload"], row["ranks"]), speed)
        shares = (f"{row[name]:.1%}" for name in ("imbalance", "padding"))
        case = (f"`{row['workload']}`", row["ranks"], row["policy"])
        lines.append([*case, *shares, f"{speed / first:.2f}×"])
    return markdown(("data", "GPUs", "policy", "imbalance", "padding", "throughput"), lines, left=3)


def main() -> None:
    """Plans all cases, writes JSON and prints the table."""
    parser = benchmark_parser(__doc__, RESULT)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=WORKLOADS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    rows = [
        row
        for workload in options.workloads
        for ranks in options.ranks
        for row in cases(workload, ranks)
    ]
    Record(
        options.out,
        ["numpy"],
        device=f"none (planning only); {platform.machine()}",
        m_mem=WORKLOADS,
        shards=SHARDS,
        samples_per_rank=SAMPLES_PER_RANK,
        rows=rows,
    ).write()
    print(table(rows))


if __name__ == "__main__":
    main()
