"""The kernel benchmark as one picture."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alload_jax.bench.kernel import Entry, share_of_copy

_COLOURS = {"triton": "#1f6feb", "mosaic": "#39c5cf", "xla": "#f0883e"}
_RIVALS = ("#c9d1d9", "#8b949e", "#3fb950", "#a371f7", "#d29922")
"""Colours of other implementations, in the order in which they were measured."""
_LABELS = {
    "triton": "this kernel (Pallas)",
    "mosaic": "its backward through Mosaic GPU",
    "xla": "XLA's fusion",
}


def write_picture(
    path: Path, entries: Sequence[Entry], copy_bytes_per_second: float, device: str
) -> None:
    """Bars of bandwidth as a share of the device's own copy, a panel for each function and pass."""
    # Only here: matplotlib takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((e.function, e.direction) for e in entries))
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(6.2 * columns, 3.4 * rows), squeeze=False, sharex=True
    )
    colours = _colours(entries)
    for axis, panel in zip(axes.flat, panels, strict=False):
        chosen = [e for e in entries if (e.function, e.direction) == panel]
        _draw_panel(axis, chosen, copy_bytes_per_second, colours)
        axis.set_title(f"{panel[0]}, {panel[1]}", fontsize=10, loc="left")
    for axis in axes[-1]:
        axis.set_xlabel("bytes that must move ÷ time, as a share of a plain copy")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.suptitle(
        f"{device}: copy {copy_bytes_per_second / 1e12:.2f} TB/s; x bfloat16, scale float32",
        fontsize=11,
    )
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _colours(entries: Sequence[Entry]) -> dict[str, str]:
    """A colour for each implementation."""
    rivals = [n for n in dict.fromkeys(e.implementation for e in entries) if n not in _COLOURS]
    return _COLOURS | dict(zip(rivals, itertools.cycle(_RIVALS), strict=False))


def _draw_panel(
    axis: Any, entries: Sequence[Entry], copy_bytes_per_second: float, colours: dict[str, str]
) -> None:
    workloads = list(dict.fromkeys(e.workload for e in entries))
    shown = [name for name in colours if any(e.implementation == name for e in entries)]
    height = 0.8 / len(shown)
    shapes = {e.workload: "×".join(map(str, e.shape)) for e in entries}
    for place, name in enumerate(shown):
        mine = [e for e in entries if e.implementation == name]
        at = [workloads.index(e.workload) + place * height for e in mine]
        shares = [share_of_copy(e, copy_bytes_per_second) for e in mine]
        bars = axis.barh(
            at, shares, height * 0.92, color=colours[name], label=_LABELS.get(name, name)
        )
        axis.bar_label(
            bars,
            [f"{share:.2f}  {e.us:,.0f} µs" for share, e in zip(shares, mine, strict=True)],
            fontsize=7,
            padding=2,
        )
    axis.axvline(1, color="#444", linewidth=0.8, linestyle=":")
    axis.set_yticks(
        [n + 0.4 - height / 2 for n in range(len(workloads))],
        [f"{name}\n{shapes[name]}" for name in workloads],
        fontsize=8,
    )
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
