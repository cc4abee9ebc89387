"""Pictures of what `alload bench` and `alload calibrate` measure.

    python -m alload_jax.bench.pictures JSON PNG

draws a JSON of `alload bench epoch` again. Imported late: matplotlib takes a second.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alload_jax.bench.kernel import Entry, share_of_copy
from alload_jax.bench.sparse_attention import Speed, preferred
from alload_jax.bench.step_profile.attribution import ELSE, ORDER
from alload_jax.bench.step_profile.summary import Row, totals
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json, read_json
from alload_jax.planning.cost import CostFile, CostModel, bucketed_cost

Case = Json
"""A case of a measurement's JSON."""
_COLOURS = ("#1f6feb", "#f0883e", "#3fb950", "#a371f7")
_INK, _QUIET = "#1f2328", "#8b949e"
_BUSY, _BUSY_LESS = "#3b7dd8", "#a9c8f0"


# ---------------------------------------------------------------- alload bench epoch


def draw_epoch(path: Path, content: Json) -> None:
    """Draws each case's tokens/s: of its steps, and of the same from the start of the command on.

    Args:
      path: the PNG to write.
      content: the JSON of `alload bench epoch`.

    Raises:
      ValueError: no case was measured.
    """
    cases = [case for case in content["cases"] if "tokens_per_second" in case]
    if not cases:
        raise ValueError(f"{path}: no case was measured")
    cases.sort(key=lambda case: case["tokens_per_second"])
    steps = [case["tokens_per_second"] for case in cases]
    whole = [case["tokens"] / (case["first_step_seconds"] + case["seconds"]) for case in cases]
    figure = Figure(figsize=(9, 1.2 + 0.62 * len(cases)), layout="tight")
    axis, places = figure.subplots(), np.arange(len(cases))
    for up, values, colour, label in (
        (0.2, steps, _BUSY, "the steps alone"),
        (-0.2, whole, _BUSY_LESS, "with start and compilation"),
    ):
        bars = axis.barh(places + up, values, height=0.38, color=colour, label=label)
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, color=_INK)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False)
    axis.set_yticks(places, [case["case"].replace("-", " ") for case in cases])
    axis.set_xlim(0, 1.12 * steps[-1])
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    where = f"{cases[0]['devices']} × {cases[0]['device'] or 'CPU device'}"
    axis.set_title(f"Tokens per second, {where}", loc="left", fontsize=13, color=_INK)
    figure.savefig(path, dpi=150, format="png")


# ---------------------------------------------------------------- alload calibrate


def draw_calibration(path: Path, costs: CostFile) -> None:
    """Draws seconds over sequence length, and below them the residual of each point.

    Args:
      path: the PNG to write.
      costs: a cost model with a quadratic form, and `details` as `alload calibrate` writes them.
    """
    assert costs.quadratic
    assert costs.details
    points = costs.details["points"]
    figure = Figure(figsize=(9, 7.6), layout="tight")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    groups = _groups(points)
    for (label, members), colour in zip(groups.items(), itertools.cycle(_COLOURS), strict=False):
        _draw_curve(upper, costs.quadratic, members, colour)
        _draw_points(upper, members, "seconds", colour, label)
        _draw_points(lower, members, "residual_percent", colour, None)
    if power := costs.power:
        along = _lengths(points)
        style: Json = {"color": _QUIET, "linestyle": "--", "linewidth": 1.2, "zorder": 1}
        style["label"] = f"a·B·S^{power.p:.2f}, one sequence"
        upper.plot(along, bucketed_cost(power, np.ones(len(along)), along), **style)
    terms, form = costs.quadratic, costs.details["fits"]["quadratic"]
    formula = (
        f"{terms.c0:.3g}  +  {terms.c_sequence:.3g}·B  +  {terms.c1:.3g}·ΣS"
        f"  +  {terms.c2:.3g}·ΣS²  seconds"
    )
    figures = f"R² {form['r2']:.5f}, mean error {form['mape']:.1%}"
    if (held := form["held_out_mape"]) is not None:
        figures += f", held out {held:.1%}"
    upper.set(xscale="log", yscale="log", ylabel="seconds of a step")
    upper.scatter([], [], s=46, facecolor="white", edgecolor=_INK, linewidth=1.6, label="held out")
    upper.set_title(f"{formula}\n{figures}", loc="left", fontsize=10, color=_INK)
    upper.legend(frameon=False, loc="lower right", fontsize=9)
    most = max(5.0, *(110 * abs(p["residual"]) for p in points))
    lower.axhline(0, color=_INK, linewidth=0.8)
    lower.set(ylim=(-most, most), ylabel="predicted against\nmeasured, %")
    lower.set_xlabel("tokens of a sequence, S")
    lengths = sorted({p["seq_len"] for p in points})
    # Drop ticks that would overlap that of the longest sequence.
    ticks = [s for s in lengths[:-1] if 1.4 * s < lengths[-1]] + lengths[-1:]
    lower.set_xticks(ticks, [f"{s / 1024:g}k" if s % 1024 == 0 else f"{s:,}" for s in ticks])
    lower.minorticks_off()
    for axis in (upper, lower):
        axis.grid(color="#d0d7de", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    model = costs.model or {}
    size = f"{model.get('num_layers')} layers of width {model.get('dim')}"
    title = f"One training step of {size} on {costs.device}"
    figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", color=_INK)
    figure.savefig(path, dpi=150)


def _groups(points: Sequence[Case]) -> dict[str, list[Json]]:
    """Groups the points: one row, or several rows by their tokens rounded to a power of two."""
    groups: dict[str, list[Json]] = {"one sequence": []}
    for point in sorted(points, key=lambda p: (p["rows"] * p["seq_len"], p["seq_len"])):
        tokens = 2 ** round(np.log2(point["rows"] * point["seq_len"]))
        name = "one sequence" if point["rows"] == 1 else f"B·S ≈ {tokens:,} tokens"
        shown = {**point, "residual_percent": 100 * point["residual"]}
        groups.setdefault(name, []).append(shown)
    return groups


def _draw_points(
    axis: Axes, members: Sequence[Case], field: str, colour: str, label: str | None
) -> None:
    for held in (False, True):
        chosen = [p for p in members if p["held_out"] is held]
        axis.scatter(
            [p["seq_len"] for p in chosen],
            [p[field] for p in chosen],
            s=46,
            facecolor="white" if held else colour,
            edgecolor=colour,
            linewidth=1.6,
            zorder=3,
            label=None if held else label,
        )


def _draw_curve(axis: Axes, model: CostModel, members: Sequence[Case], colour: str) -> None:
    """Draws the quadratic form for a group, with rows interpolated between its points."""
    if not members:
        return
    lengths, ordered = _lengths(members), sorted(members, key=lambda p: p["seq_len"])
    seq_len, rows_of = (np.log([p[name] for p in ordered]) for name in ("seq_len", "rows"))
    rows = np.exp(np.interp(np.log(lengths), seq_len, rows_of))
    axis.plot(lengths, bucketed_cost(model, rows, lengths), color=colour, linewidth=1.5, zorder=2)


def _lengths(members: Sequence[Case]) -> np.ndarray:
    values = [p["seq_len"] for p in members]
    return np.geomspace(min(values), max(values), 200)


# ---------------------------------------------------------------- alload bench kernel

_KERNELS = {"triton": "#1f6feb", "mosaic": "#39c5cf", "xla": "#f0883e"}
_RIVALS = ("#c9d1d9", "#8b949e", "#3fb950", "#a371f7", "#d29922")
"""Colours of other implementations, in the order in which they were measured."""
_LABELS = {
    "triton": "kernel, Pallas by Triton",
    "mosaic": "kernel, Pallas by Mosaic GPU",
    "xla": "XLA's fusion",
}


def draw_kernels(
    path: Path, entries: Sequence[Entry], copy_bytes_per_second: float, device: str
) -> None:
    """Bars of bandwidth as a share of the device's own copy, a panel for each function and pass."""
    panels = list(dict.fromkeys((e.function, e.direction) for e in entries))
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    height = 1.2 + 0.6 * len({e.workload for e in entries})
    figure = Figure(figsize=(6.2 * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    rivals = [n for n in dict.fromkeys(e.implementation for e in entries) if n not in _KERNELS]
    colours = _KERNELS | dict(zip(rivals, itertools.cycle(_RIVALS), strict=False))
    for axis, panel in zip(axes.flat, panels, strict=False):
        chosen = [e for e in entries if (e.function, e.direction) == panel]
        _draw_panel(axis, chosen, copy_bytes_per_second, colours)
        axis.set_title(f"{panel[0]}, {panel[1]}", fontsize=10, loc="left")
    for axis in axes[-1]:
        axis.set_xlabel("bytes that must move ÷ time, as a share of a plain copy")
    handles: Json = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.suptitle(
        f"{device}: copy {copy_bytes_per_second / 1e12:.2f} TB/s; x bfloat16, scale float32",
        fontsize=11,
    )
    place: Json = {"loc": "outside lower center", "ncols": 5, "frameon": False}
    figure.legend(list(handles.values()), list(handles), **place)
    figure.savefig(path, dpi=130)


def _draw_panel(
    axis: Axes, entries: Sequence[Entry], copy_bytes_per_second: float, colours: Mapping[str, str]
) -> None:
    workloads = list(dict.fromkeys(e.workload for e in entries))
    shown = [name for name in colours if any(e.implementation == name for e in entries)]
    height = 0.8 / len(shown)
    shapes = {e.workload: "×".join(map(str, e.shape)) for e in entries}
    for place, name in enumerate(shown):
        mine = [e for e in entries if e.implementation == name]
        at = [workloads.index(e.workload) + place * height for e in mine]
        shares = [share_of_copy(e, copy_bytes_per_second) for e in mine]
        label = _LABELS.get(name, name)
        bars = axis.barh(at, shares, height * 0.92, color=colours[name], label=label)
        texts = [f"{share:.2f}  {e.us:,.0f} µs" for share, e in zip(shares, mine, strict=True)]
        axis.bar_label(bars, texts, fontsize=7, padding=2)
    axis.axvline(1, color="#444", linewidth=0.8, linestyle=":")
    places = [n + 0.4 - height / 2 for n in range(len(workloads))]
    axis.set_yticks(places, [f"{name}\n{shapes[name]}" for name in workloads], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25)
    axis.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------- alload bench sparse-attention

_LINES = {"random": ("-", "random lists"), "zipf": ("--", "some keys popular")}


def draw_sparse_attention(path: Path, found: Sequence[Speed], device: str) -> None:
    """Draws forward plus backward over cuDNN's dense attention, a line for each length.

    Args:
      path: the PNG to write.
      found: the measured cases; drawn are those of the kernels that "auto" prefers.
      device: name of the device.
    """
    ours = [each for each in found if each.implementation == preferred(found)]
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axis = figure.subplots()
    shapes = list(dict.fromkeys(each.shape for each in ours))
    for shape, colour in zip(shapes, itertools.cycle(_COLOURS), strict=False):
        for popularity, (style, words) in _LINES.items():
            line = sorted(
                (100 * each.sparsity, each.both)
                for each in ours
                if (each.shape, each.popularity) == (shape, popularity)
            )
            if line:
                label = f"{shape.tokens:,} tokens, {words}"
                axis.plot(*zip(*line, strict=True), style, color=colour, marker="o", label=label)
    axis.axhline(1, color="#57606a", lw=1)
    right = axis.get_xlim()[1]
    axis.annotate("cuDNN, dense", (right, 1), ha="right", va="bottom", color="#57606a")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}×")
    axis.set_xlabel("sparsity: pairs of blocks that are left out, %")
    axis.set_ylabel("speed, forward plus backward")
    axis.set_title(f"Block-sparse attention on {device}", loc="left")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


# ---------------------------------------------------------------- alload bench step --profile

_PARTS = (
    *("#1f6feb", "#54aeff", "#0a3069", "#80ccff", "#2da44e", "#f0883e", "#d4a72c"),
    *("#8250df", "#db61a2", "#1b7c83", "#9a6700", "#768390", "#444c56", "#e5534b", "#6fdd8b"),
    *("#b083f0", "#afb8c1", "#a40e26", "#8b949e"),
)
_PART = dict(zip(ORDER, _PARTS, strict=True))
_LIGHT = {"other attention", "optimizer, clipping, EMA", "gradient accumulation", ELSE}
"""Parts whose colours are so light that their text is dark."""
_TINT = 0.35
"""Opacity of what a part takes beyond its roof, and of its passes."""
_CHARACTER = 0.0068
"""Width of a character as a share of the flame graph's."""
_SMALLEST = 0.0004
"""Share of a step below which a part has no bar."""
_BAR_INCHES = 0.29
_COLUMNS = {"ms": 0.89, "share": 0.945, "of roof": 1.0}
"""Right ends of the columns of numbers, as shares of the width."""
_LONGEST_BAR = 0.82


def draw_profile(path: Path, case: Case, title: str) -> None:
    """Draws a profiled case of `alload bench step --profile`.

    Args:
      path: of the picture, such as a PNG.
      case: with `rows`, `seconds`, `traced_seconds`, `roof` and `of_roof`.
      title: what was measured.
    """
    rows = [Row(**row) for row in case["rows"]]
    parts = [row for row in totals(rows) if row.share >= _SMALLEST]
    heights = (1.6, 0.6 + _BAR_INCHES * len(parts))
    figure = Figure(figsize=(12, sum(heights) + 0.9), layout="constrained")
    flame, bars = figure.subplots(2, 1, height_ratios=heights)
    _draw_flame(flame, parts, rows, case["traced_seconds"])
    _draw_bars(bars, parts)
    words = f"{case.get('device') or 'CPU'}: {case['seconds'] * 1e3:,.1f} ms a step"
    if case["roof"] is not None:
        roof = case["roof"]["seconds"] * 1e3
        words += f", roof {roof:,.1f} ms, {case['of_roof']:.3f} of the roof"
    figure.suptitle(f"{title}\n{words}", fontsize=12)
    figure.savefig(path, dpi=130)


def _draw_flame(axis: Axes, parts: Sequence[Row], rows: Sequence[Row], seconds: float) -> None:
    """Three levels: the step, its parts, and their passes or kinds."""
    _block(axis, (2.4, 3), 0.0, 1.0, f"traced step, {seconds * 1e3:,.1f} ms", "#eaeef2", _INK)
    begin = 0.0
    for part in parts:
        colour, inner = _PART[part.part], begin
        details = [row for row in rows if row.part == part.part and row.detail]
        for row in sorted(details, key=lambda each: -each.seconds):
            _block(axis, (0, 1.2), inner, row.share, row.detail, colour, _INK, alpha=_TINT)
            inner += row.share
        text = _INK if part.part in _LIGHT else "white"
        _block(axis, (1.2 if details else 0, 2.4), begin, part.share, part.part, colour, text)
        begin += part.share
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 3)
    ticks = [tenth / 10 for tenth in range(11)]
    axis.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks], fontsize=9)
    axis.set_xlabel("share of the traced step, by part and pass; longest first", fontsize=9)
    axis.set_yticks([])
    axis.spines[["left", "top", "right"]].set_visible(False)


def _block(
    axis: Axes,
    levels: tuple[float, float],
    begin: float,
    width: float,
    label: str,
    colour: str,
    text: str,
    alpha: float = 1.0,
) -> None:
    """A block from one level to another, with its label where it fits."""
    bottom, top = levels
    style: Json = {"color": colour, "alpha": alpha, "edgecolor": "white"}
    axis.barh(bottom, width, top - bottom, left=begin, align="edge", linewidth=0.8, **style)
    if len(label) * _CHARACTER < width:
        middle = begin + width / 2
        centre: Json = {"ha": "center", "va": "center", "fontsize": 9, "color": text}
        axis.text(middle, (bottom + top) / 2, label, **centre)


def _draw_bars(axis: Axes, parts: Sequence[Row]) -> None:
    """A bar for each part, full up to its roof and pale beyond it, and its numbers.

    Without any roof the bars are full.
    """
    places = range(len(parts))
    colours = [_PART[row.part] for row in parts]
    ms = [row.seconds * 1e3 for row in parts]
    roofs = [min(row.roof_seconds or 0.0, row.seconds) * 1e3 for row in parts]
    axis.barh(places, ms, 0.78, color=colours, alpha=_TINT if any(roofs) else 1)
    axis.barh(places, roofs, 0.78, color=colours)
    _write_numbers(axis, parts)
    axis.set_yticks(places, [row.part for row in parts], fontsize=9)
    axis.set_ylim(len(parts) - 0.4, -1.2)
    axis.set_xlim(0, max(ms) / _LONGEST_BAR)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(axis="x", labelsize=9)
    legend = "; full colour: roof, the same work at the rate measured for it alone"
    axis.set_xlabel(f"ms of a step{legend if any(roofs) else ''}", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def _write_numbers(axis: Axes, parts: Sequence[Row]) -> None:
    """Columns of ms, share of the step and fraction of the roof, right of the bars."""
    style: Json = {"transform": axis.get_yaxis_transform(), "ha": "right"}
    style |= {"va": "center", "fontsize": 9, "color": _INK}
    for name, place in _COLUMNS.items():
        axis.text(place, -0.9, name, fontweight="bold", **style)
    for line, row in enumerate(parts):
        of_roof = "–" if row.of_roof is None else f"{row.of_roof:.2f}"
        shown = (f"{row.seconds * 1e3:,.2f}", f"{row.share:.1%}", of_roof)
        for text, place in zip(shown, _COLUMNS.values(), strict=True):
            axis.text(place, line, text, **style)


def main(argv: list[str]) -> int:
    """Draws a JSON of `alload bench epoch` again."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    options = parser.parse_args(argv)
    content = read_json(options.json)
    if not isinstance(content, dict) or not any("spread" in x for x in content.get("cases", ())):
        raise InputError(f"{options.json}: has no case of `alload bench epoch`; name another file")
    draw_epoch(options.png, content)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
