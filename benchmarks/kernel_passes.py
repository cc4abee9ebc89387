"""Times both passes of a kernel beside XLA's fusion, by device time."""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from alload_jax.bench.device_time import copy_bandwidth, device_time, require_gpu, rotating
from alload_jax.bench.provenance import provenance

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
_ROTATED_BYTES = 256 << 20
"""What the sets of arguments together exceed, if eight do: several times the L2 cache."""


class Case(Protocol):
    """A named tuple whose `shape` is that of x, which is bfloat16."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of x."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


def main(
    argv: list[str],
    document: str,
    default: str,
    cases: Mapping[str, Any],
    arguments: Callable[[Any, int], tuple[Any, ...]],
    passes: Callable[[Any, str], Mapping[str, Callable[..., Any]]],
) -> int:
    """Measures all cases and writes the result.

    Args:
      argv: the command line.
      document: the program's docstring.
      default: name of the result's file.
      cases: named `Case`s.
      arguments: (case, seed) → those of the functions of `passes`.
      passes: (case, "triton" or "xla") → functions by name, `forward` and `backward`.
    """
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / default)
    options = parser.parse_args(argv)
    require_gpu()
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        **provenance(("jax", "jaxlib")),
        "copy_bytes_per_second": copy_bandwidth(),
        "rows": [],
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, case in cases.items():
            times = _times(case, arguments, passes, pool)
            result["rows"] += _rows(name, case, times, result["copy_bytes_per_second"])
            # After each, so that a failure loses nothing that was measured.
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _times(
    case: Case, arguments: Callable, passes: Callable, pool: ThreadPoolExecutor
) -> dict[tuple[str, str], float]:
    """µs of each pass of each implementation."""
    size = _bytes_of(case)
    count = min(8, max(2, math.ceil(_ROTATED_BYTES / (2 * size))))
    sets = [arguments(case, seed) for seed in range(count)]
    pending = {
        (direction, implementation): pool.submit(rotating, function, sets)
        for implementation in ("triton", "xla")
        for direction, function in passes(case, implementation).items()
    }
    return {key: device_time(each.result(), sets, 5).median for key, each in pending.items()}


def _rows(
    name: str, case: Case, us: Mapping[tuple[str, str], float], copy: float
) -> list[dict[str, Any]]:
    """What the JSON says of a case; prints it."""
    rows = []
    for direction, tensors in (("forward", 2), ("backward", 3)):
        kernel, xla = us[direction, "triton"], us[direction, "xla"]
        of_copy = tensors * _bytes_of(case) / kernel * 1e6 / copy
        rows.append(
            {"case": name, **case._asdict(), "pass": direction, "us": kernel}
            | {"of_copy": of_copy, "xla_us": xla, "times_xla": xla / kernel}
        )
        print(f"{name}, {direction}: {kernel:.1f} µs, {of_copy:.3f} of copy, "
              f"{xla / kernel:.2f} times XLA", flush=True)  # fmt: skip
    return rows


def _bytes_of(case: Case) -> int:
    return 2 * math.prod(case.shape)
