"""`alload bench kernel`: what the kernels gain on this device."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table

from alload_jax.bench.harness import Record, console, table_of
from alload_jax.commands.flags import require_outputs, triple
from alload_jax.errors import InputError

if TYPE_CHECKING:
    from alload_jax.bench.kernel import Entry, Rival

HELP = "Measure kernels on this device against XLA's fusion."

_FUNCTIONS = (
    *("layernorm_modulate", "residual_layernorm_modulate"),
    *("segment_layernorm_modulate", "token_layernorm_modulate"),
)
_PACKAGES = ("jax", "jaxlib", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--workloads", nargs="+", metavar="NAME", help="named shapes; default: all")
    add(
        "--shape",
        action="append",
        type=partial(triple, example="1,4096,1536", least=1),
        help="a shape of your own, as 1,32760,1536 (B,S,D)",
    )
    add(
        "--functions",
        nargs="+",
        choices=_FUNCTIONS,
        default=_FUNCTIONS[:2],
        help="default: the first two; the others are for packed rows, and with a scale per token",
    )
    add("--out", default="layernorm_modulate", help="written: OUT.json and OUT.png")


def run(
    options: argparse.Namespace, rivals: "Sequence[Rival]" = (), packages: Sequence[str] = ()
) -> int:
    """Measures, prints a table, writes JSON and PNG.

    Args:
      options: of the command line.
      rivals: other libraries' implementations to measure beside ours.
      packages: whose versions the JSON notes for that.
    """
    # Only now: `alload plan` and `--help` need neither JAX nor a GPU.
    import jax

    from alload_jax.bench import kernel
    from alload_jax.bench.device import copy_bandwidth, require_gpu
    from alload_jax.bench.pictures import draw_kernels
    from pallas_kernels.layernorm_modulate.tuning import WORKLOADS, Workload

    own = {
        f"{batch}×{seq_len}×{dim}": Workload(batch, seq_len, dim, "given with --shape")
        for batch, seq_len, dim in options.shape or []
    }
    names = options.workloads or ([] if own else list(WORKLOADS))
    for name in names:
        if name not in WORKLOADS:
            raise InputError(
                f"alload bench kernel: --workloads {name} is unknown; there are "
                f"{', '.join(WORKLOADS)}"
            )
    workloads = {name: WORKLOADS[name] for name in names} | own
    out, picture = require_outputs("alload bench kernel", options.out)
    require_gpu()
    device, copy = jax.devices()[0].device_kind, copy_bandwidth()
    record = Record(out, [*_PACKAGES, *packages], copy_bytes_per_second=copy, summary=[])
    entries: list[kernel.Entry] = []
    for entry in kernel.measure(workloads, options.functions, [kernel.mosaic, *rivals]):
        entries.append(entry)
        where = f"{entry.workload} {entry.function} {entry.direction} {entry.implementation}"
        share = kernel.share_of_copy(entry, copy)
        console().print(f"{where}: {entry.us:,.1f} µs, {share:.2f} of copy")
        record.content["summary"] = kernel.summary(entries, copy)
        record.add(entry._asdict(), to="entries")
    draw_kernels(picture, entries, copy, device)
    console().print(_table(entries, copy, device))
    for row in kernel.summary(entries, copy):
        times, least = row["times_xla_mean"], row["times_xla_least"]
        console().print(
            f"{row['function']} {row['direction']}: {times:.2f}× XLA's fusion in the geometric "
            f"mean, {least:.2f}× at least; {row['least_share_of_copy']:.2f} of a copy at least"
        )
    print(f"written: {out}, {picture}")
    return 0


def _table(entries: "list[Entry]", copy: float, device: str) -> Table:
    from alload_jax.bench.kernel import ratios, share_of_copy

    def times(other: str) -> "Callable[[Entry], str]":
        gains = ratios(entries, other)

        def gain(entry: "Entry") -> str:
            found = gains.get((entry.workload, entry.function, entry.direction))
            return "–" if found is None else f"{found:.2f}×"

        return gain

    columns: dict[str, Callable[[Entry], str]] = {
        "workload": lambda entry: entry.workload,
        "shape": lambda entry: "×".join(map(str, entry.shape)),
        "function": lambda entry: entry.function,
        "pass": lambda entry: entry.direction,
        "µs": lambda entry: f"{entry.us:,.1f}",
        "TB/s": lambda entry: f"{entry.bytes_moved / entry.us / 1e6:.2f}",
        "of copy": lambda entry: f"{share_of_copy(entry, copy):.2f}",
    }
    others = [n for n in dict.fromkeys(e.implementation for e in entries) if n != "triton"]
    title = f"{device}, copy {copy / 1e12:.2f} TB/s; times faster than …"
    ours = (entry for entry in entries if entry.implementation == "triton")
    return table_of(title, columns | {other: times(other) for other in others}, ours)
