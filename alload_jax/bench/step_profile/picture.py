"""A profile of a training step as one picture: a flame graph of its parts, and bars by part."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alload_jax.bench.step_profile.attribution import IDLE, ORDER
from alload_jax.bench.step_profile.summary import Row, totals

_COLOURS = (
    *("#1f6feb", "#58a6ff", "#388bfd", "#79c0ff", "#3fb950", "#f0883e", "#d29922", "#e3b341"),
    *("#a371f7", "#db61a2", "#bf8700", "#9e6a03", "#8c959f", "#57606a", "#f85149", "#bc4c00"),
    *("#8250df", "#b1bac4", "#cf222e", "#eaeef2"),
)
_COLOUR = dict(zip(ORDER, _COLOURS, strict=True))
_INK = "#1f2328"
_DARK = {IDLE, "everything else"}
"""Parts whose colours are so light that their text is dark."""
_CHARACTER = 0.0062
"""Width of a character as a share of the flame graph's."""
_SMALLEST = 0.0004
"""Share of a step below which a part has no bar."""
_BAR_INCHES = 0.29


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
    heights = (1.8, 0.6 + _BAR_INCHES * len(parts))
    figure, (flame, bars) = plt.subplots(
        2, 1, figsize=(12, sum(heights) + 0.9), height_ratios=heights, layout="constrained"
    )
    _draw_flame(flame, parts, rows, case["traced_seconds"])
    _draw_bars(bars, parts)
    figure.suptitle(f"{title}\n{_measured(case)}", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _measured(case: Mapping[str, Any]) -> str:
    """Device, seconds and roof in words."""
    told = f"{case.get('device') or 'CPU'}: {case['seconds'] * 1e3:,.1f} ms a step"
    if case["roof"] is None:
        return told
    roof = case["roof"]["seconds"] * 1e3
    return f"{told}, roof {roof:,.1f} ms, {case['of_roof']:.2f} of the roof"


def _draw_flame(axis: Any, parts: Sequence[Row], rows: Sequence[Row], seconds: float) -> None:
    """Three levels: the step, its parts, and their passes or kinds."""
    _block(axis, 2, 0.0, 1.0, f"traced step, {seconds * 1e3:,.1f} ms", "#d0d7de", _INK)
    begin = 0.0
    for part in parts:
        colour = _COLOUR[part.part]
        text = _INK if part.part in _DARK else "white"
        _block(axis, 1, begin, part.share, part.part, colour, text)
        inner = begin
        details = [row for row in rows if row.part == part.part and row.detail]
        for row in sorted(details, key=lambda each: -each.seconds):
            _block(axis, 0, inner, row.share, row.detail, colour, text, alpha=0.75)
            inner += row.share
        begin += part.share
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 3)
    ticks = [tenth / 10 for tenth in range(11)]
    axis.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks], fontsize=8)
    axis.set_xlabel("share of the step's device time, by part; longest first", fontsize=9)
    axis.set_yticks([])
    _bare(axis, "left", "top", "right")


def _block(
    axis: Any,
    level: int,
    begin: float,
    width: float,
    label: str,
    colour: str,
    text: str,
    alpha: float = 1.0,
) -> None:
    axis.barh(
        level + 0.5,
        width,
        0.96,
        left=begin,
        color=colour,
        alpha=alpha,
        edgecolor="white",
        linewidth=0.6,
    )
    fits = int(width / _CHARACTER) - 1
    if fits < 4:
        return
    shown = label if len(label) <= fits else f"{label[: fits - 1]}…"
    middle = begin + width / 2
    axis.text(middle, level + 0.5, shown, ha="center", va="center", fontsize=8, color=text)


def _draw_bars(axis: Any, parts: Sequence[Row]) -> None:
    """A bar for each part, in which the hatched beginning is its roof."""
    places = range(len(parts))
    ms = [row.seconds * 1e3 for row in parts]
    bars = axis.barh(places, ms, 0.78, color=[_COLOUR[row.part] for row in parts])
    roofs = [min(row.roof_seconds or 0.0, row.seconds) * 1e3 for row in parts]
    if any(roofs):
        style = {"facecolor": "none", "edgecolor": _INK, "hatch": "///", "linewidth": 0.4}
        label = "roof: the same work at the rate measured for it alone"
        axis.barh(places, roofs, 0.78, label=label, **style)
        axis.legend(loc="lower right", frameon=False, fontsize=9)
    axis.bar_label(bars, [_label(row) for row in parts], fontsize=8, padding=3)
    axis.set_yticks(places, [row.part for row in parts], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, max(ms) * 1.28)
    axis.set_xlabel("ms of a step", fontsize=9)
    _bare(axis, "top", "right")


def _label(row: Row) -> str:
    of_roof = "" if row.of_roof is None else f", {row.of_roof:.2f} of roof"
    return f"{row.seconds * 1e3:,.2f} ms, {row.share:.1%}{of_roof}"


def _bare(axis: Any, *sides: str) -> None:
    for side in sides:
        axis.spines[side].set_visible(False)
