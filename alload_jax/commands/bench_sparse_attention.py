"""`alload bench sparse-attention`: block-sparse attention against dense attention."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from alload_jax.bench.harness import Record, console, table_of
from alload_jax.commands.flags import COUNT, SHARE, require_outputs
from alload_jax.errors import InputError

if TYPE_CHECKING:
    from alload_jax.bench.sparse_attention import Entry, Part, Rival, Speed

HELP = "Measure block-sparse attention on this device against cuDNN's dense attention."

_COMMAND = "alload bench sparse-attention"
_KERNELS = ("mosaic", "triton")
_PACKAGES = ("jax", "jaxlib", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    add("--implementations", nargs="+", choices=_KERNELS, default=_KERNELS)
    add("--out", default="sparse_attention", help="written: OUT.json and OUT.png")


def run(
    options: argparse.Namespace, rivals: "Sequence[Rival]" = (), packages: Sequence[str] = ()
) -> int:
    """Measures, prints a table, writes JSON and PNG.

    Args:
      options: of the command line.
      rivals: other libraries' implementations to measure beside ours.
      packages: whose versions the JSON notes for that.
    """
    out, picture = require_outputs(_COMMAND, options.out)
    # Only now: `--help` needs neither JAX nor a GPU.
    import jax

    from alload_jax.bench import sparse_attention as bench
    from alload_jax.bench.device import require_gpu
    from alload_jax.bench.pictures import draw_sparse_attention

    require_gpu()
    sizes = (options.heads, options.width, options.block)
    shapes = [bench.Shape(tokens, *sizes) for tokens in options.tokens]
    kernels = [name for name in bench.runnable_kernels() if name in options.implementations]
    if not kernels:
        names = ", ".join(options.implementations)
        raise InputError(f"{_COMMAND}: --implementations {names}: none of them runs on this device")
    record = Record(out, [*_PACKAGES, *packages], break_even={}, speeds=[])
    entries: list[Entry] = []
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
    console().print(_table(entries, found, device))
    for shape in shapes:
        words = "the measured sparsities do not show where dense is as fast"
        if (sparsity := bench.break_even(found, shape)) is not None:
            words = f"as fast as dense attention at a sparsity of {sparsity:.0%}"
        console().print(f"{shape.tokens:,} tokens: {words}")
    print(f"written: {out}, {picture}")
    return 0


def _table(entries: "Sequence[Entry]", found: "Sequence[Speed]", device: str) -> Table:
    """Each case's speed, and the rate of its computed pairs."""
    rates = {
        (e.shape, e.implementation, e.popularity, e.sparsity, e.part): e.flops_per_second
        for e in entries
    }

    def rate(speed: "Speed", part: "Part") -> str:
        case = (speed.shape, speed.implementation, speed.popularity, speed.sparsity, part)
        return f"{rates[case] / 1e12:,.0f}"

    columns: dict[str, Callable[[Speed], str]] = {
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
