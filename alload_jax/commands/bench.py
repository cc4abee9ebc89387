"""`alload bench`: measures kernels and whole training steps on this device.

JAX is imported where they run: `alload plan` and `--help` need neither it nor a GPU.
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from alload_jax.bench.harness import Record, console, table_of
from alload_jax.commands import add_command, bench_epoch, bench_step
from alload_jax.commands.flags import ABOVE_0, COUNT, SHARE, require_outputs, require_place, triple
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.processes import cpus
from alload_jax.sharding.host_memory import set_xla_flags

if TYPE_CHECKING:
    from alload_jax.bench import kernel, kernel_tuning, sparse_attention

_PACKAGES = ("jax", "jaxlib", "numpy")
_KERNEL = "Measure kernels on this device against XLA's fusion."
_SPARSE = "Measure block-sparse attention on this device against cuDNN's dense attention."
_TUNE = "Measure how the norm kernels run fastest on this GPU, for model.norm auto and triton."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a subcommand with its own flags for each benchmark."""
    choices = parser.add_subparsers(required=True, metavar="WHAT")
    for name, words, add, run in (
        ("kernel", _KERNEL, add_kernel_arguments, run_kernel),
        ("step", bench_step.HELP, bench_step.add_arguments, bench_step.run),
        ("epoch", bench_epoch.HELP, bench_epoch.add_arguments, bench_epoch.run),
        ("sparse-attention", _SPARSE, add_sparse_arguments, run_sparse),
        ("tune", _TUNE, add_tune_arguments, run_tune),
    ):
        add(add_command(choices, name, words, partial(_run, run)))


def _run(measure: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a benchmark with the flags of XLA that training has."""
    set_xla_flags()
    return measure(options)


# ---------------------------------------------------------------- norms against XLA's fusion

_FUNCTIONS = (
    *("layernorm_modulate", "residual_layernorm_modulate"),
    *("segment_layernorm_modulate", "token_layernorm_modulate"),
)


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_kernel(
    options: argparse.Namespace, rivals: "Sequence[kernel.Rival]" = (), packages: Sequence[str] = ()
) -> int:
    """Measures, prints a table, writes JSON and PNG.

    Args:
      options: of the command line.
      rivals: other libraries' implementations to measure beside ours.
      packages: whose versions the JSON notes for that.
    """
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
    console().print(_kernel_table(entries, copy, device))
    for row in kernel.summary(entries, copy):
        times, least = row["times_xla_mean"], row["times_xla_least"]
        console().print(
            f"{row['function']} {row['direction']}: {times:.2f}× XLA's fusion in the geometric "
            f"mean, {least:.2f}× at least; {row['least_share_of_copy']:.2f} of a copy at least"
        )
    print(f"written: {out}, {picture}")
    return 0


def _kernel_table(entries: "list[kernel.Entry]", copy: float, device: str) -> Table:
    from alload_jax.bench.kernel import ratios, share_of_copy

    def times(other: str) -> "Callable[[kernel.Entry], str]":
        gains = ratios(entries, other)

        def gain(entry: "kernel.Entry") -> str:
            found = gains.get((entry.workload, entry.function, entry.direction))
            return "–" if found is None else f"{found:.2f}×"

        return gain

    columns: dict[str, Callable[[kernel.Entry], str]] = {
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


# ---------------------------------------------------------------- block-sparse attention

_SPARSE_KERNELS = ("mosaic", "triton")


def add_sparse_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--tokens", nargs="+", type=COUNT, default=(32_768, 75_600, 131_072), help="lengths")
    add(
        "--sparsities",
        nargs="+",
        type=SHARE,
        default=(0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
        help="shares of pairs of blocks that are left out",
    )
    add("--lists", nargs="+", choices=("random", "zipf"), default=("random", "zipf"))
    add("--heads", type=COUNT, default=12, help="heads (default 12)")
    add("--width", type=int, choices=(64, 128), default=128, help="width of a head (default 128)")
    add("--block", type=int, choices=(64, 128), default=64, help="tokens of a block (default 64)")
    add("--implementations", nargs="+", choices=_SPARSE_KERNELS, default=_SPARSE_KERNELS)
    add("--out", default="sparse_attention", help="written: OUT.json and OUT.png")


def run_sparse(
    options: argparse.Namespace,
    rivals: "Sequence[sparse_attention.Rival]" = (),
    packages: Sequence[str] = (),
) -> int:
    """Measures, prints a table, writes JSON and PNG.

    Args:
      options: of the command line.
      rivals: other libraries' implementations to measure beside ours.
      packages: whose versions the JSON notes for that.
    """
    out, picture = require_outputs("alload bench sparse-attention", options.out)
    import jax

    from alload_jax.bench import sparse_attention as bench
    from alload_jax.bench.device import require_gpu
    from alload_jax.bench.pictures import draw_sparse_attention

    require_gpu()
    sizes = (options.heads, options.width, options.block)
    shapes = [bench.Shape(tokens, *sizes) for tokens in options.tokens]
    kernels = [name for name in bench.runnable_kernels() if name in options.implementations]
    if not kernels:
        given = f"--implementations {', '.join(options.implementations)}"
        raise InputError(
            f"alload bench sparse-attention: {given}: none of them runs on this device"
        )
    record = Record(out, [*_PACKAGES, *packages], break_even={}, speeds=[])
    entries: list[bench.Entry] = []
    for entry in bench.measure(shapes, options.sparsities, options.lists, kernels, rivals):
        entries.append(entry)
        where = f"{entry.shape.tokens:,} tokens, {entry.popularity}, {entry.sparsity:.0%}"
        console().print(f"{where}, {entry.implementation} {entry.part}: {entry.us:,.0f} µs")
        found = bench.speeds(entries)
        record.content |= {
            "break_even": {str(s.tokens): bench.break_even(found, s) for s in shapes},
            "speeds": [
                speed._asdict()
                | {"shape": speed.shape._asdict()}
                | ({"selection": None} if math.isnan(speed.selection) else {})
                for speed in found
            ],
        }
        record.add(entry._asdict() | {"shape": entry.shape._asdict()}, to="entries")
    device = jax.devices()[0].device_kind
    draw_sparse_attention(picture, found, device)
    console().print(_sparse_table(entries, found, device))
    for shape in shapes:
        words = "the measured sparsities do not show where dense is as fast"
        if (sparsity := bench.break_even(found, shape)) is not None:
            words = f"as fast as dense attention at a sparsity of {sparsity:.0%}"
        console().print(f"{shape.tokens:,} tokens: {words}")
    print(f"written: {out}, {picture}")
    return 0


def _sparse_table(
    entries: "Sequence[sparse_attention.Entry]",
    found: "Sequence[sparse_attention.Speed]",
    device: str,
) -> Table:
    """Each case's speed, and the rate of its computed pairs."""
    rates = {
        (e.shape, e.implementation, e.popularity, e.sparsity, e.part): e.flops_per_second
        for e in entries
    }

    def rate(speed: "sparse_attention.Speed", part: "sparse_attention.Part") -> str:
        case = (speed.shape, speed.implementation, speed.popularity, speed.sparsity, part)
        return f"{rates[case] / 1e12:,.0f}"

    columns: dict[str, Callable[[sparse_attention.Speed], str]] = {
        "tokens": lambda speed: f"{speed.shape.tokens:,}",
        "lists": lambda speed: speed.popularity,
        "sparsity": lambda speed: f"{speed.sparsity:.0%}",
        "implementation": lambda speed: speed.implementation,
        "forward": lambda speed: f"{speed.forward:.2f}×",
        "backward": lambda speed: f"{speed.backward:.2f}×",
        "both": lambda speed: f"{speed.both:.2f}×",
        "TFLOP/s forward": lambda speed: rate(speed, "forward"),
        "TFLOP/s backward": lambda speed: rate(speed, "backward"),
        "selection / both": lambda speed: (
            "–" if math.isnan(speed.selection) else f"{speed.selection:.1%}"
        ),
    }
    return table_of(f"{device}; times as fast as cuDNN's dense attention", columns, found)


# ---------------------------------------------------------------- how norms run fastest

_MOST_PROCESSES = 14
_KERNELS = ("forward", "backward", "residual_forward", "residual_backward", "sum_backward")
_DIMS = (1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 8192)


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
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
        default=max(1, min(_MOST_PROCESSES, cpus() - 1)),
        help="that compile at the same time; each takes about 0.6 GB of the GPU's memory; default: "
        f"one less than the machine has cores, at most {_MOST_PROCESSES}",
    )
    add(
        "--without-xla",
        action="store_true",
        help="do not time XLA's fusion of each width, by which model.norm auto chooses",
    )
    add("--out", help="JSON of all measurements; default: none")


def run_tune(options: argparse.Namespace) -> int:
    """Searches, prints a table, and writes the device's file, which later runs read."""
    if options.out:
        require_place("alload bench tune", "--out", Path(options.out))
    # The processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from alload_jax.bench.device import copy_bandwidth, require_gpu
    from alload_jax.bench.kernel_tuning import check, search, times_xla, tuned
    from pallas_kernels.layernorm_modulate import tuning

    require_gpu()
    device, copy = jax.devices()[0].device_kind, copy_bandwidth()
    before = tuning.read(device)
    record = Record(options.out or os.devnull, _PACKAGES, copy_bytes_per_second=copy)
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


def _columns(copy: float) -> "dict[str, Callable[[kernel_tuning.Best], str]]":
    return {
        "width": lambda each: f"{each.best.dim}",
        "kernel": lambda each: each.best.kernel,
        "of copy before": lambda each: f"{each.used.bytes_per_second / copy:.2f}",
        "of copy": lambda each: f"{each.best.bytes_per_second / copy:.2f}",
        "tile": lambda each: f"{each.best.division.max_tile}",
        "warps": lambda each: f"{each.best.division.num_warps}",
        "programs a core": lambda each: f"{each.best.division.per_core}",
    }


def _fields(timed: "kernel_tuning.Timed", copy: float) -> Json:
    fields = {"kernel": timed.kernel, "dim": timed.dim, "us": timed.us}
    return fields | dataclasses.asdict(timed.division) | {"of_copy": timed.bytes_per_second / copy}
