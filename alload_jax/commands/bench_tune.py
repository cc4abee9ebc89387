"""`alload bench tune`: finds how the norm kernels run fastest on this GPU, and keeps it."""

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alload_jax.bench.harness import Record, console, table_of
from alload_jax.commands.flags import ABOVE_0, COUNT, require_place
from alload_jax.files import Json

if TYPE_CHECKING:
    from alload_jax.bench.kernel_tuning import Best, Timed

HELP = "Measure how the norm kernels run fastest on this GPU, for model.norm auto and triton."

_COMMAND = "alload bench tune"
_MOST_PROCESSES = 14
_KERNELS = ("forward", "backward", "residual_forward", "residual_backward", "sum_backward")
_DIMS = (1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 8192)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add(
        "--dims",
        nargs="+",
        type=COUNT,
        default=_DIMS,
        help="widths, as model.dim, the most important first; default: common ones",
    )
    add(
        "--kernels",
        nargs="+",
        choices=_KERNELS,
        default=_KERNELS,
        help="which are searched; default: all",
    )
    add(
        "--check",
        nargs="+",
        type=COUNT,
        default=(),
        metavar="DIM",
        help="widths that are then timed as they run, without a search: are they near enough?",
    )
    add("--seconds", type=ABOVE_0, default=600.0, help="no kernel of a width is begun after them")
    add(
        "--processes",
        type=COUNT,
        default=max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) - 1)),
        help="that compile at the same time; each takes about 0.6 GB of the GPU's memory; default: "
        f"one less than the machine has cores, at most {_MOST_PROCESSES}",
    )
    add(
        "--without-xla",
        action="store_true",
        help="do not time XLA's fusion of each width, by which model.norm auto chooses",
    )
    add("--out", help="JSON of all measurements; default: none")


def run(options: argparse.Namespace) -> int:
    """Searches, prints a table, and writes the device's file, which later runs read."""
    if options.out:
        require_place(_COMMAND, "--out", Path(options.out))
    # The processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Only now: `alload --help` needs neither JAX nor a GPU.
    import jax

    from alload_jax.bench.device import copy_bandwidth, require_gpu
    from alload_jax.bench.kernel_tuning import check, search, times_xla, tuned
    from pallas_kernels.layernorm_modulate import tuning

    require_gpu()
    device, copy = jax.devices()[0].device_kind, copy_bandwidth()
    before = tuning.read(device)
    packages = ("jax", "jaxlib", "numpy")
    record = Record(options.out or os.devnull, packages, copy_bytes_per_second=copy)
    details, found, columns = record.content, [], _columns(copy)
    dims = list(dict.fromkeys(options.dims))
    for best in search(dims, options.kernels, device, options.seconds, options.processes):
        found.append(best)
        console().print(" ".join(read(best) for read in columns.values()))
        # After each, so that a failure loses nothing that was measured.
        path = tuning.write(device, tuned(found, before), details)
    found.sort(key=lambda each: (each.best.dim, each.best.kernel))
    searched = sorted({best.dim for _, best in found})
    ratios = {} if options.without_xla else times_xla(searched)
    path = tuning.write(device, tuned(found, before, ratios), details)
    checked = sorted(check(options.check, device, options.processes))
    if options.out:
        details["widths"] = [[_fields(each, copy) for each in best] for best in found]
        details["checked"] = [_fields(each, copy) for each in checked]
        details["times_xla"] = ratios
        record.write()
    console().print(table_of("bytes a second, of those of a copy", columns, found))
    if ratios:
        against: dict[str, Callable[[tuple[int, tuple[float, float]]], str]] = {
            "width": lambda row: str(row[0]),
            "forward": lambda row: f"{row[1][0]:.2f}",
            "backward": lambda row: f"{row[1][1]:.2f}",
        }
        console().print(table_of("times as fast as XLA's fusion", against, ratios.items()))
    for each in checked:
        share = each.bytes_per_second / copy
        console().print(f"checked: {each.dim} {each.kernel} {share:.2f} of copy")
    print(f"written: {path}")
    return 0


def _columns(copy: float) -> "dict[str, Callable[[Best], str]]":
    return {
        "width": lambda each: f"{each.best.dim}",
        "kernel": lambda each: each.best.kernel,
        "of copy before": lambda each: f"{each.used.bytes_per_second / copy:.2f}",
        "of copy": lambda each: f"{each.best.bytes_per_second / copy:.2f}",
        "tile": lambda each: f"{each.best.division.max_tile}",
        "warps": lambda each: f"{each.best.division.num_warps}",
        "programs a core": lambda each: f"{each.best.division.per_core}",
    }


def _fields(timed: "Timed", copy: float) -> Json:
    fields = {"kernel": timed.kernel, "dim": timed.dim, "us": timed.us}
    return fields | dataclasses.asdict(timed.division) | {"of_copy": timed.bytes_per_second / copy}
