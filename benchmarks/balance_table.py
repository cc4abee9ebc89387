"""Compares ways to train on this host's GPUs and prints the table in docs/results.md.

    python benchmarks/balance_table.py --suffix h200_x8

Runs `alload bench balance` for each workload and prints the table's rows; `--print` prints them
from existing results. Other flags are passed on to `alload bench balance`.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from alload_jax.cli import main as alload
from alload_jax.commands.bench_balance import COLUMNS, cells
from alload_jax.errors import InputError, run_command

RESULTS = Path("benchmarks/results")
PICTURES = Path("docs/results/planning")
COSTS = RESULTS / "calibration_wan_1_3b_h200.json"


class Size(NamedTuple):
    """Size of the measurement of a workload.

    Attributes:
      m_mem: maximum tokens of a micro-batch.
      layers: layers of the model; the time of a step is linear in them.
      method_m_mem: a larger M_mem with which AdaptiveLoad's method is measured as well.
    """

    m_mem: int
    layers: int
    method_m_mem: int | None = None


WORKLOADS = {
    "wan-480p": Size(133_632, 4),
    "mixed-resolution": Size(156_928, 2),
    "long-video-V35": Size(350_208, 1, method_m_mem=700_416),
    "long-video-V60": Size(350_208, 1, method_m_mem=700_416),
}
"""With M_mem of two or more longest samples, M_comp is the tighter bound of some shorter ones, and
AdaptiveLoad's method is predicted faster than its baseline. Not all of our cases fit so many tokens
of long video."""
BASELINE, METHOD = "equal_tokens-independent", "dual_constraint-independent"
NAMES = {
    BASELINE: "AdaptiveLoad's baseline, independent",
    METHOD: "its method, M_comp auto, independent",
    "sorted-independent": "`sorted`, independent",
    "dual_constraint": "`dual_constraint`, synchronous",
    "balanced": "`balanced`, packed",
    "balanced-split": "`balanced`, long samples split",
    "everything-split": "everything split (Ulysses)",
}
SAME = "AdaptiveLoad's method = its baseline, independent"
SHOWN = [name for name in COLUMNS if name != "exposed"]


def main(argv: list[str]) -> int:
    """Measures the workloads and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suffix", required=True, help="suffix of the results' file names, such as h200_x8"
    )
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=[*WORKLOADS])
    parser.add_argument(
        "--print", action="store_true", help="print existing results without measuring"
    )
    options, others = parser.parse_known_args(argv)
    if not options.print:
        # Level 2 times kernels without the comparison of their results that is XLA's default.
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=2")
        for workload in options.workloads:
            measure(workload, options.suffix, others)
    lines = [row for name in options.workloads for row in rows(name, place(name, options.suffix))]
    print("| " + " | ".join(["data", "case", *SHOWN]) + " |")
    print("|---|---|" + "---:|" * len(SHOWN), *lines, sep="\n")
    return 0


def place(workload: str, suffix: str) -> Path:
    """Path of a workload's results."""
    return RESULTS / f"balance_{workload.replace('-', '_').lower()}_{suffix}.json"


def measure(workload: str, suffix: str, others: list[str]) -> None:
    """Runs all cases of a workload; `others` are flags for `alload bench balance`."""
    size, out = WORKLOADS[workload], place(workload, suffix)
    flags = {"m-mem": size.m_mem, "layers": size.layers, "steps": 4, "repeats": 3, "samples": 4000}
    files = {"cost-model": COSTS, "out": out, "picture": PICTURES / out.with_suffix(".png").name}
    given = [f"--{name}={value}" for name, value in (flags | files).items()]
    cases = [] if "--cases" in others else ["--cases", *names(size)]
    alload(["bench", "balance", "--workload", workload, "--one-aspect", *given, *cases, *others])


def names(size: Size) -> dict[str, str]:
    """The cases of a workload, and what the table calls them."""
    found = []
    for name, words in NAMES.items():
        found.append((name, words))
        if name == METHOD and size.method_m_mem:
            at = f"its method with M_mem {size.method_m_mem:,}"
            found.append((f"{METHOD}:{size.method_m_mem}", at))
    return dict(found)


def rows(workload: str, results: Path) -> list[str]:
    """A line for each measured case, its speed relative to the best of AdaptiveLoad's method."""
    if not results.exists():
        raise InputError(f"{results}: no such file; run without --print to measure it")
    content = json.loads(results.read_text())
    cases = {case["case"]: case for case in content["cases"]}
    same = cases.get(METHOD, {}).get("same_as") == BASELINE
    methods = [c for n, c in cases.items() if n.startswith((METHOD, BASELINE if same else METHOD))]
    speeds = [case["figures"]["tokens_per_second"] for case in methods if "figures" in case]
    method_speed = max(speeds, default=None)
    found = []
    for name, words in names(WORKLOADS[workload]).items():
        case = cases.get(name, {})
        if "figures" in case:
            words = SAME if same and name == BASELINE else words
            found.append([words, *shown(case, method_speed)])
        elif "error" in case:
            found.append([f"{words}: {case['error']}", *[""] * len(SHOWN)])
    begins = [workload.removeprefix("long-video-"), *[""] * len(found)]
    lines = (" | ".join([begin, *row]) for begin, row in zip(begins, found, strict=False))
    return [f"| {line} |".replace("|  |", "| |") for line in lines]


def shown(case: dict[str, Any], method_speed: float | None) -> list[str]:
    """A case's figures as text, with its speed relative to the method's (tokens/s)."""
    texts = cells(case)
    if method_speed:
        texts["tokens/s"] += f" ({case['figures']['tokens_per_second'] / method_speed:.2f}×)"
    return [texts[name].replace("%", " %") for name in SHOWN]


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
