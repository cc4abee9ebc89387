"""Measures the plans of all policies for the named workloads on 8 to 1,024 ranks.

    python benchmarks/planning_workloads.py

The costs are predictions of the cost model that `alload calibrate` measured on an H200.

Takes about ten minutes on one core, and 3 GB of memory for the plan of ten million samples.
`--parts` measures some parts and keeps the others of the JSON; each has its date and command there.
"""

import itertools
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grain
import numpy as np

from alload_jax.bench.harness import benchmark_parser, provenance, typed
from alload_jax.data.sources.grain_samples import SIZE, SIZES, GrainStream, SizeColumn
from alload_jax.files import Json
from alload_jax.planning.cost import read_cost_file
from alload_jax.planning.factory import make_plan
from alload_jax.planning.policies import balanced
from alload_jax.planning.policies.policy import RankTopology, makespan
from alload_jax.planning.samples import Geometry, Samples, read_samples, samples_from_columns
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.stream import StreamPlan, enough_samples
from alload_jax.planning.study import Study
from alload_jax.planning.workloads import make_workload

BENCHMARKS = Path(__file__).parent
COSTS = BENCHMARKS / "results" / "calibration_wan_1_3b_h200.json"

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
STREAMS = ("mixed-resolution", "wan-480p", "long-video-V60")
STREAM_RANKS = (8, 64, 1024)
_PER_ENTRY, _WINDOWS, _BILLION = 8192, 17, 10**9
"""Samples that a stream lists at a time; windows of it: the first one, and two rounds; samples."""
PAPER_CASES: tuple[tuple[str, Any], ...] = (
    ("equal_tokens", None),
    ("dual_constraint", "longest"),
    ("dual_constraint", "auto"),
    ("sorted", None),
    ("balanced", None),
)


GIANT_M_MEM, GIANT_CONTEXTS, GIANT_RANKS = 163_840, (4, 8, 16), (8, 64, 256, 1024)
"""Of sets whose longest samples no rank can hold: a row, and ranks over which they are split."""


def main() -> None:
    """Measures the parts that are asked for, and writes the JSON after each."""
    parser = benchmark_parser(__doc__, BENCHMARKS / "results" / "planning_workloads.json")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    options = parser.parse_args()
    header = {
        "command": typed(),
        **provenance(["numpy"]),
        "device": f"none (planning only); {platform.machine()}",
    }
    kept = options.out.exists() and set(options.parts) < set(PARTS)
    content: Json = json.loads(options.out.read_text()) if kept else {}
    content |= {"cost_model": COSTS.name, "m_mem": M_MEM}
    for part in options.parts:
        content[part] = []
        for row in PARTS[part]():
            content[part].append(row)
            print(part, {k: v for k, v in row.items() if not isinstance(v, dict)}, flush=True)
        content.setdefault("measured", {})[part] = header
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def _study(samples: Samples, m_mem: int, **fields: Any) -> Study:
    config = PlanningConfig(policy="balanced", m_mem=m_mem, cost_model=str(COSTS), **fields)
    return Study(samples, config, read_cost_file(COSTS))


def _plans() -> Iterator[Json]:
    """Figures of every policy for every workload and number of ranks."""
    for workload, m_mem in M_MEM.items():
        for ranks in RANKS:
            each = SAMPLES_PER_RANK.get(workload, LONG_VIDEO_SAMPLES_PER_RANK)
            samples = make_workload(workload, max(100_000, each * ranks))
            bound = _study(samples, m_mem, m_comp="auto")
            unbound = replace(bound, config=replace(bound.config, m_comp=None))
            split = replace(unbound, config=replace(unbound.config, context=CONTEXT))
            studies = [*[bound] * 4, *[unbound] * 2, split]
            for study, policy in zip(studies, (*POLICIES, "balanced"), strict=True):
                case = study.case(policy, ranks)
                yield {
                    "workload": workload,
                    "ranks": ranks,
                    "policy": case.name,
                    "metrics": asdict(case.metrics),
                    "tokens_per_second": case.metrics.tokens_per_second,
                    "repeated_neighbours": case.neighbours._asdict(),
                }


def _paper() -> Iterator[Json]:
    """AdaptiveLoad's policies on independent ranks, with M_comp of the longest sample and the best.

    AdaptiveLoad does not say how M_comp and p are chosen.
    """
    sizes = ((name, m_mem) for name, sizes in PAPER_M_MEM.items() for m_mem in sizes)
    for workload, m_mem in sizes:
        study = _study(make_workload(workload, 60_000), m_mem, ranks_mode="independent")
        for ranks in (8, 16):
            found: Json = {"workload": workload, "ranks": ranks, "m_mem": m_mem}
            for policy, m_comp in PAPER_CASES:
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


def _small() -> Iterator[Json]:
    """Figures of every policy for small sets."""
    for name, (m_mem, ranks, geometry) in SMALL.items():
        samples = read_samples(BENCHMARKS / "small_sets" / f"{name}.csv", geometry)
        study = _study(samples, m_mem)
        for policy in SMALL_POLICIES:
            case = study.case(policy, ranks)
            metrics = asdict(case.metrics) | {"first_step_seconds": case.first_step_seconds}
            found = {"set": name, "samples": len(samples), "ranks": ranks, "m_mem": m_mem}
            shown = case.name if policy != "auto" else f"auto: {case.name}"
            yield found | {"policy": shown, "metrics": metrics}


def _giants() -> Iterator[Json]:
    """Tokens/s by ranks of a context-parallel group, over a bound that no plan passes.

    In the bound each rank has an equal share of the samples' costs, and nothing else. A plan that
    splits samples of one step over groups of several sizes cannot pass it either.
    """
    for ranks in GIANT_RANKS:
        for name, seq_len in _giant_lengths(800 * ranks).items():
            samples = samples_from_columns({"seq_len": seq_len}, Geometry(), name)
            found: Json = {"set": name, "ranks": ranks, "samples": len(samples)}
            found |= {"longest_over_mean": float(seq_len.max() / seq_len.mean())}
            for context in GIANT_CONTEXTS:
                if context > ranks:
                    continue
                study = _study(samples, GIANT_M_MEM, context=context)
                share = ranks * float(seq_len.sum() / study.predictor.sequence_cost(seq_len).sum())
                for policy in ("balanced", "knapformer:KnapFormer"):
                    metrics = study.case(policy, ranks).metrics
                    figures = {"idle": metrics.idle, "padding": metrics.padding}
                    figures["share_of_bound"] = metrics.tokens_per_second / share
                    found[f"{policy.split(':')[0]} {context}"] = figures
            yield found


def _giant_lengths(count: int) -> dict[str, np.ndarray]:
    """Tokens of samples, by name of the set; the longest has 32 to 41 times the mean."""
    random = np.random.default_rng(0)
    trace = np.minimum(np.exp(random.normal(0, 1.2, count)) * 5_840, 480_000)
    trace[: count // 1000] = 480_000
    clips = random.choice(np.arange(5, 22), count) * 1_560
    stills = random.random(count) < 0.5
    mixed = np.where(random.random(count) < 0.01, 520_000, np.where(stills, 1_560, clips))
    sets = {"log-normal trace": trace, "1 % of 520,000 tokens": mixed}
    sets["long-video-V60"] = make_workload("long-video-V60", count).seq_len
    return {name: np.maximum(1, tokens).astype(np.int64) // 4 * 4 for name, tokens in sets.items()}


def _speed() -> Iterator[Json]:
    """Time and memory, in a process of its own, of planning ten million samples."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool.submit(_ten_million).result()


def _ten_million() -> Json:
    samples, ranks = make_workload("mixed-resolution", 10_000_000), 1024
    study, before = _study(samples, M_MEM["mixed-resolution"]), _peak_memory()
    begin = time.perf_counter()
    study.case("balanced", ranks)
    seconds = time.perf_counter() - begin
    memory = {"bytes_before": before, "bytes_most": _peak_memory()}
    return {"samples": len(samples), "ranks": ranks, "seconds": seconds} | memory


class _Listed:
    """A data source of Grain that lists samples, some at a time."""

    def __init__(self, shape: np.ndarray):
        self._shape = shape

    def __len__(self) -> int:
        return -(-len(self._shape) // _PER_ENTRY)

    def __getitem__(self, entry: int) -> dict[str, np.ndarray]:
        first = entry * _PER_ENTRY
        frames, height, width = self._shape[first : first + _PER_ENTRY].T
        keys = np.arange(first, first + len(frames))
        return {"key": keys, "frames": frames, "height": height, "width": width}


def _streams() -> Iterator[Json]:
    """Plans of streams in windows of 64 steps, beside those of the same samples in a manifest."""
    for workload, ranks in itertools.product(STREAMS, STREAM_RANKS):
        each = SAMPLES_PER_RANK.get(workload, LONG_VIDEO_SAMPLES_PER_RANK)
        samples = make_workload(workload, max(100_000, each * ranks))
        whole = _study(samples, M_MEM[workload]).case("balanced", ranks)
        grids = samples.shape[np.random.default_rng(0).permutation(len(samples))]
        entries = grain.MapDataset.source(_Listed(grids)).seed(0).shuffle().repeat()
        given = (entries.to_iter_dataset(), np.unique(grids, axis=0), int(samples.seq_len.sum()))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(_stream, workload, ranks, *given).result()
        by_manifest = whole.metrics.tokens_per_second
        ratio = {"ratio": found["tokens_per_second"] / by_manifest}
        yield found | {"manifest_tokens_per_second": by_manifest} | ratio


def _billion() -> Iterator[Json]:
    """A stream of a billion samples from a memory-mapped column of sizes, 2 GB on disk."""
    workload = "mixed-resolution"
    shape = make_workload(workload, 10**7).shape
    sizes, rows = np.unique(shape, axis=0, return_inverse=True)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / SIZES, sizes)
        column = np.lib.format.open_memmap(Path(folder) / SIZE, "w+", np.uint16, (_BILLION,))
        column.reshape(-1, len(rows))[:] = rows.ravel()
        column.flush()
        for ranks in (8, 1024):
            listed = SizeColumn(folder)
            given = (listed.entries(), listed.sizes, 0)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                yield pool.submit(_stream, workload, ranks, *given).result() | {"samples": _BILLION}


def _stream(workload: str, ranks: int, entries: Any, sizes: np.ndarray, least_tokens: int) -> Json:
    """Figures of two rounds of windows, or more that hold so many tokens."""
    balanced._FEWEST_SAMPLES = 1  # else windows of few ranks would have more than 64 steps
    began, costs, m_mem = time.perf_counter(), read_cost_file(COSTS), M_MEM[workload]
    config = PlanningConfig(policy="balanced", m_mem=m_mem, cost_model=str(COSTS), look_ahead=64)
    stream, model = GrainStream(entries, _content, sizes, (4, 8, 8)), config.predictor(costs)
    samples = stream.manifest.samples(Geometry().patch_size)
    samples = enough_samples(samples, m_mem, ranks, config.look_ahead)
    policy = make_plan(config, samples, ranks, 0, costs).policy
    plan = StreamPlan(samples, policy, RankTopology(ranks), 0, stream)
    first, used = time.perf_counter() - began, time.process_time()
    seconds, steps, tokens, cost, window = [], 0, 0, 0.0, 1
    while window < _WINDOWS or tokens < least_tokens:
        began = time.perf_counter()
        part, window = plan.epoch_of_steps(window), window + 1
        seconds.append((time.perf_counter() - began) / part.steps)
        steps, tokens = steps + part.steps, tokens + int(part.part_tokens().sum())
        cost += makespan(part, model)
    return {
        "workload": workload,
        "ranks": ranks,
        "windows": window - 1,
        "steps_of_window": steps / (window - 1),
        "tokens_per_second": tokens / cost,
        "first_step_seconds": first,
        "planning_seconds_per_step": float(np.mean(seconds)),
        "planning_cpu_seconds_per_step": (time.process_time() - used) / steps,
        "most_planning_seconds_per_step": max(seconds),
        "bytes_most": _peak_memory(),
    }


def _content(key: int) -> dict[str, np.ndarray]:
    """No sample is trained; only the manifest asks for the first."""
    return {"latents": np.zeros((1, 2, 2, 16)), "labels": np.zeros(1, np.int32)}


def _peak_memory() -> int:
    """Peak memory of this process in bytes; rusage would include its parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


PARTS: dict[str, Callable[[], Iterator[Json]]] = {
    "plans": _plans,
    "paper": _paper,
    "small": _small,
    "giants": _giants,
    "speed": _speed,
    "streams": _streams,
    "billion": _billion,
}
"""Of the JSON."""

if __name__ == "__main__":
    main()
