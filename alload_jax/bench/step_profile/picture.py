"""A profile of a training step as one picture: a flame graph of its parts, and bars by part."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alload_jax.bench.step_profile.attribution import ELSE, ORDER
from alload_jax.bench.step_profile.summary import Row, totals

_COLOURS = (
    *("#1f6feb", "#54aeff", "#0a3069", "#80ccff", "#2da44e", "#f0883e", "#d4a72c"),
    *("#8250df", "#db61a2", "#1b7c83", "#9a6700", "#768390", "#444c56", "#e5534b", "#6fdd8b"),
    *("#b083f0", "#afb8c1", "#a40e26", "#8b949e"),
)
_COLOUR = dict(zip(ORDER, _COLOURS, strict=True))
_INK = "#1f2328"
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


def write_picture(path: Path, case: Mapping[str, Any], title: str) -> None:
    """Draws a profiled case of `alload bench step --profile`.

    Args:
      path: of the picture, such as a PNG.
      case: with `rows`, `seconds`, `traced_seconds`, `roof` and `of_roof`.
      title: what was measured.
    """
    # Only here: matplotlib takes a second to import.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [Row(**row) for row in case["rows"]]
    parts = [row for row in totals(rows) if row.share >= _SMALLEST]
    heights = (1.6, 0.6 + _BAR_INCHES * len(parts))
    figure, (flame, bars) = plt.subplots(
        2, 1, figsize=(12, sum(heights) + 0.9), height_ratios=heights, layout="constrained"
    )
    _draw_flame(flame, parts, rows, case["traced_seconds"])
    _draw_bars(bars, parts)
    figure.suptitle(f"{title}\n{_measured(case)}", fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _measured(case: Mapping[str, Any]) -> str:
    """Device, seconds and roof in words."""
    told = f"{case.get('device') or 'CPU'}: {case['seconds'] * 1e3:,.1f} ms a step"
    if case["roof"] is None:
        return told
    roof = case["roof"]["seconds"] * 1e3
    return f"{told}, roof {roof:,.1f} ms, {case['of_roof']:.3f} of the roof"


def _draw_flame(axis: Any, parts: Sequence[Row], rows: Sequence[Row], seconds: float) -> None:
    """Three levels: the step, its parts, and their passes or kinds."""
    _block(axis, (2.4, 3), 0.0, 1.0, f"traced step, {seconds * 1e3:,.1f} ms", "#eaeef2", _INK)
    begin = 0.0
    for part in parts:
        colour, inner = _COLOUR[part.part], begin
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
    _bare(axis, "left", "top", "right")


def _block(
    axis: Any,
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
    style = {"color": colour, "alpha": alpha, "edgecolor": "white", "linewidth": 0.8}
    axis.barh(bottom, width, top - bottom, left=begin, align="edge", **style)
    if len(label) * _CHARACTER < width:
        middle = begin + width / 2
        centre = {"ha": "center", "va": "center", "fontsize": 9, "color": text}
        axis.text(middle, (bottom + top) / 2, label, **centre)


def _draw_bars(axis: Any, parts: Sequence[Row]) -> None:
    """A bar for each part, full up to its roof and pale beyond it, and its numbers.

    Without any roof the bars are full.
    """
    places = range(len(parts))
    colours = [_COLOUR[row.part] for row in parts]
    ms = [row.seconds * 1e3 for row in parts]
    roofs = [min(row.roof_seconds or 0.0, row.seconds) * 1e3 for row in parts]
    axis.barh(places, ms, 0.78, color=colours, alpha=_TINT if any(roofs) else 1)
    axis.barh(places, roofs, 0.78, color=colours)
    _numbers(axis, parts)
    axis.set_yticks(places, [row.part for row in parts], fontsize=9)
    axis.set_ylim(len(parts) - 0.4, -1.2)
    axis.set_xlim(0, max(ms) / _LONGEST_BAR)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(axis="x", labelsize=9)
    legend = "; full colour: roof, the same work at the rate measured for it alone"
    axis.set_xlabel(f"ms of a step{legend if any(roofs) else ''}", fontsize=9)
    _bare(axis, "top", "right")


def _numbers(axis: Any, parts: Sequence[Row]) -> None:
    """Columns of ms, share of the step and fraction of the roof, right of the bars."""
    style = {"transform": axis.get_yaxis_transform(), "ha": "right", "va": "center"}
    for name, place in _COLUMNS.items():
        axis.text(place, -0.9, name, fontsize=9, fontweight="bold", color=_INK, **style)
    for line, row in enumerate(parts):
        of_roof = "–" if row.of_roof is None else f"{row.of_roof:.2f}"
        shown = (f"{row.seconds * 1e3:,.2f}", f"{row.share:.1%}", of_roof)
        for text, place in zip(shown, _COLUMNS.values(), strict=True):
            axis.text(place, line, text, fontsize=9, color=_INK, **style)


def _bare(axis: Any, *sides: str) -> None:
    for side in sides:
        axis.spines[side].set_visible(False)
