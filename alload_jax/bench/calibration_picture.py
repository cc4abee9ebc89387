"""Draws a calibration: measured steps, fitted curves and residuals."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.planning.cost import CostFile, CostModel, bucketed_cost

_INK, _QUIET = "#1f2328", "#8b949e"
_COLOURS = ("#1f6feb", "#3fb950", "#f0883e", "#a371f7")
"""Colours of the groups of points: one row, then increasing tokens per micro-batch."""


def write_calibration_picture(path: Path, costs: CostFile) -> None:
    """Draws seconds over sequence length, and below them the residual of each point.

    Args:
      path: the PNG to write.
      costs: a cost model with a quadratic form, and `details` as `alload calibrate` writes them.
    """
    # Imported here because matplotlib takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert costs.quadratic
    assert costs.details
    points = costs.details["points"]
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 7.6), sharex=True, height_ratios=(3, 1.1)
    )
    groups = _groups(points)
    for (label, members), colour in zip(groups.items(), itertools.cycle(_COLOURS), strict=False):
        _draw_curve(upper, costs.quadratic, members, colour)
        _draw_points(upper, members, "seconds", colour, label)
        _draw_points(lower, members, "residual_percent", colour, None)
    if costs.power:
        _draw_power(upper, costs.power, points)
    _label_axes(upper, lower, costs, points)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _groups(points: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Groups the points: one row, or several rows by their tokens rounded to a power of two."""
    groups: dict[str, list[dict[str, Any]]] = {"one sequence": []}
    for point in sorted(points, key=lambda p: (p["rows"] * p["seq_len"], p["seq_len"])):
        tokens = 2 ** round(np.log2(point["rows"] * point["seq_len"]))
        name = "one sequence" if point["rows"] == 1 else f"B·S ≈ {tokens:,} tokens"
        shown = point | {"residual_percent": 100 * point["residual"]}
        groups.setdefault(name, []).append(shown)
    return groups


def _draw_points(axis: Any, members: Any, field: str, colour: str, label: str | None) -> None:
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


def _draw_curve(axis: Any, model: CostModel, members: Any, colour: str) -> None:
    """Draws the quadratic form for a group, with rows interpolated between its points."""
    if not members:
        return
    lengths = np.geomspace(*_range(members, "seq_len"), 200)
    rows = np.exp(
        np.interp(
            np.log(lengths),
            np.log([p["seq_len"] for p in sorted(members, key=lambda p: p["seq_len"])]),
            np.log([p["rows"] for p in sorted(members, key=lambda p: p["seq_len"])]),
        )
    )
    axis.plot(lengths, bucketed_cost(model, rows, lengths), color=colour, linewidth=1.5, zorder=2)


def _draw_power(axis: Any, model: Any, points: Sequence[dict[str, Any]]) -> None:
    lengths = np.geomspace(*_range(points, "seq_len"), 50)
    axis.plot(
        lengths,
        bucketed_cost(model, np.ones(50), lengths),
        color=_QUIET,
        linestyle="--",
        linewidth=1.2,
        zorder=1,
        label=f"a·B·S^{model.p:.2f}, one sequence",
    )


def _label_axes(upper: Any, lower: Any, costs: CostFile, points: Sequence[dict[str, Any]]) -> None:
    assert costs.details
    assert costs.quadratic
    form, model = costs.details["fits"]["quadratic"], costs.model or {}
    size = f"{model.get('num_layers')} layers of width {model.get('dim')}"
    held = form["held_out_mape"]
    figures = f"R² {form['r2']:.5f}, mean error {form['mape']:.1%}"
    figures += "" if held is None else f", held out {held:.1%}"
    upper.set(xscale="log", yscale="log", ylabel="seconds of a step")
    upper.scatter([], [], s=46, facecolor="white", edgecolor=_INK, linewidth=1.6, label="held out")
    terms = costs.quadratic
    formula = (
        f"{terms.c0:.3g}  +  {terms.c_sequence:.3g}·B  +  {terms.c1:.3g}·ΣS"
        f"  +  {terms.c2:.3g}·ΣS²  seconds"
    )
    upper.set_title(f"{formula}\n{figures}", loc="left", fontsize=10, color=_INK)
    title = f"One training step of {size} on {costs.device}"
    upper.figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", color=_INK)
    upper.legend(frameon=False, loc="lower right", fontsize=9)
    most = max(5.0, *(110 * abs(p["residual"]) for p in points))
    lower.axhline(0, color=_INK, linewidth=0.8)
    lower.set(
        ylim=(-most, most),
        ylabel="predicted against\nmeasured, %",
        xlabel="tokens of a sequence, S",
    )
    lengths = sorted({p["seq_len"] for p in points})
    # Drop ticks that would overlap that of the longest sequence.
    ticks = [s for s in lengths[:-1] if 1.4 * s < lengths[-1]] + lengths[-1:]
    lower.set_xticks(ticks, [_short(s) for s in ticks])
    lower.minorticks_off()
    for axis in (upper, lower):
        axis.grid(color="#d0d7de", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)


def _short(tokens: int) -> str:
    return f"{tokens / 1024:g}k" if tokens % 1024 == 0 else f"{tokens:,}"


def _range(members: Sequence[dict[str, Any]], field: str) -> tuple[float, float]:
    values = [p[field] for p in members]
    return min(values), max(values)
