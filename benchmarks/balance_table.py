"""Compares ways to train on this host's GPUs: `alload bench balance` for several workloads.

    python benchmarks/balance_table.py --suffix h200_x8

Writes benchmarks/results/balance_{workload}_{suffix}.json and their pictures in
docs/results/planning. Other flags are passed on to `alload bench balance`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

from alload_jax.cli import main as alload
from alload_jax.errors import run_command

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
METHOD = "dual_constraint-independent"
CASES = (
    *("equal_tokens-independent", METHOD, "sorted-independent", "dual_constraint"),
    *("balanced", "balanced-split", "everything-split"),
)
"""AdaptiveLoad's baseline and method, then ours; "everything split" is Ulysses."""


def main(argv: list[str]) -> int:
    """Measures the workloads."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suffix", required=True, help="of the file names, such as h200_x8")
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=[*WORKLOADS])
    options, others = parser.parse_known_args(argv)
    # Level 2 times kernels without the comparison of their results that is XLA's default.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    for workload in options.workloads:
        size = WORKLOADS[workload]
        out = RESULTS / f"balance_{workload.replace('-', '_').lower()}_{options.suffix}.json"
        sizes = {"m-mem": size.m_mem, "layers": size.layers, "steps": 4, "repeats": 3}
        files = {"cost-model": COSTS, "out": out, "picture": PICTURES / f"{out.stem}.png"}
        given = {"workload": workload, "samples": 4000} | sizes | files
        flags = ["--one-aspect", *(f"--{name}={value}" for name, value in given.items())]
        if "--cases" not in others:
            larger = [f"{METHOD}:{size.method_m_mem}"] if size.method_m_mem else []
            flags += ["--cases", *CASES, *larger]
        alload(["bench", "balance", *flags, *others])
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
