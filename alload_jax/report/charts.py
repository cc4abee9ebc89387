"""What the charts of a plan page share: SVG by matplotlib, legends, short numbers.

matplotlib draws in the light colours of `plan_page.css`. `svg` replaces them by the names of the
style sheet's variables, so that the window's colour scheme decides.
"""

import io
import math
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

CSS = (files("alload_jax.report") / "plan_page.css").read_text(encoding="utf-8")
COLOURS: dict[str, str] = dict(re.findall(r"--(\w+): (#\w{6});", CSS.partition("}")[0]))
"""Light colours by the names of their variables: `p0` to `p4` and `best` of policies, `s0` to `s5`
of lengths, and others."""
STYLE: dict[Any, object] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelcolor": COLOURS["soft"],
    "axes.spines.bottom": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": COLOURS["soft"],
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "grid.color": COLOURS["grid"],
    "hatch.linewidth": 1,
    "lines.markeredgecolor": COLOURS["paper"],
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "text.color": COLOURS["ink"],
    "text.parse_math": False,
    "xtick.color": COLOURS["soft"],
    "xtick.major.pad": 6,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": COLOURS["soft"],
    "ytick.major.pad": 6,
    "ytick.major.size": 0,
}
"""Settings of matplotlib in which charts are drawn and written."""
_TIP = "tip "
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SECONDS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (180.0, 1.0, "s"), (10800.0, 1 / 60, "min"))


# ---------------------------------------------------------------- drawing


def new_axes(width: float, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of this size in CSS pixels, with axes one below the other on the same scales."""
    figure = Figure((width / 72, height / 72))
    grid = figure.subplots(rows, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(44 / width, 40 / height, 1 - 16 / width, 1 - 26 / height, hspace=0.5)
    return figure, list(grid[:, 0])


def scale_y(axes: Axes, high: float, title: str, *, percent: bool = False, parts: int = 5) -> None:
    """Lets y reach from 0 to `high` in about so many parts, with the title above."""
    axes.set_ylim(0, high * 1.04 if high > 0 else 1)
    axes.yaxis.set_major_locator(MaxNLocator(parts, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter((lambda y, _: percent_tick(y)) if percent else "{x:,g}")
    axes.set_title(title)


def scale_x_log(axes: Axes, low: float, high: float, title: str) -> None:
    """Makes x logarithmic from `low` to `high`, with ticks at 1, 2 and 5 times powers of ten."""
    if high <= low:
        low, high = low / 2, high * 2
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    located = LogLocator(subs=(1, 2, 5) if high / low < 2e4 else (1,)).tick_values(low, high)
    ticks = [tick for tick in located if low <= tick <= high]
    axes.set_xticks(ticks if len(ticks) > 1 else [low, high])
    axes.xaxis.set_major_formatter(lambda x, _: compact(x))
    axes.minorticks_off()
    axes.set_xlabel(title)


def add_note(axes: Axes, x: float, y: float, text: str) -> None:
    """Marks `x` by a line, with a text at the height `y`, 0 to 1, on the side with more room."""
    axes.axvline(x, color=COLOURS["ink"], lw=1, ls="dotted", clip_on=False)
    is_right = axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0] > 0.5
    axes.annotate(
        text,
        (x, y),
        (-5 if is_right else 5, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
    )


def add_tips(axes: Axes, edges: Iterable[float], tips: Iterable[str]) -> None:
    """Gives each column between two of the edges a tooltip."""
    for (left, right), tip in zip(pairwise(edges), tips, strict=True):
        axes.axvspan(left, right, fc="none", ec="none", clip_on=False, gid=_TIP + tip)


def svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an SVG element for HTML. Equal figures give equal text.

    Args:
      figure: drawn in `STYLE`, in `COLOURS`.
      name: unique on the page, which ids derive from.
      label: text alternative for screen readers.
    """
    file = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    # What stands before is a document's: a declaration, metadata with links, global styles.
    text = text[text.index('<g id="figure_1">') :]
    text = re.sub(rf'<g id="{_TIP}([^"]*)">', r'<g class="hit"><title>\1</title>', text)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"\d+\.\d+", _rounded, path[0]), text)
    text = re.sub(r">\s+<", "><", text)
    for variable, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    width, height = 72 * figure.get_size_inches()
    return (
        f'<svg class="chart" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width:g} {height:g}">{text}'
    )


def _rounded(value: re.Match[str]) -> str:
    return f"{float(value[0]):.2f}"


def binned(values: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits values [N] into at most `bins` equal parts; returns their means and maxima [bins]."""
    starts = np.linspace(0, len(values), min(bins, len(values)), endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(values)))
    values = np.asarray(values, np.float64)
    return np.add.reduceat(values, starts) / counts, np.maximum.reduceat(values, starts)


# ---------------------------------------------------------------- HTML around charts


def policy_colour(index: int, count: int) -> str:
    """Name of the colour of policy `index` of `count`: the first is the baseline, the last best."""
    if index == 0:
        return "p0"
    return "best" if index == count - 1 else f"p{1 + (index - 1) % 4}"


def line_style(colour: str) -> str:
    """How lines of a policy's colour are drawn, in the words of both matplotlib and CSS."""
    return {"p1": "dashed", "p2": "dotted", "p3": "dashed", "p4": "dotted"}.get(colour, "solid")


def legend(entries: Iterable[tuple[str, str]], title: str = "") -> str:
    """A legend of (style of the key, name); see `box_key` and `line_key`."""
    items = "".join(f"<li><i {key}></i>{escape(name)}</li>" for key, name in entries)
    head = f'<li class="head">{escape(title)}</li>' if title else ""
    return f'<ul class="legend">{head}{items}</ul>'


def box_key(colour: str) -> str:
    """Attributes of a legend's box."""
    return f'class="key" style="background: var(--{colour})"'


def line_key(colour: str, style: str) -> str:
    """Attributes of a legend's line."""
    return f'class="key line" style="border-top: 3px {style} var(--{colour})"'


def section(title: str, sentence: str, content: str) -> str:
    """A chart with a title and one sentence on how to read it; `sentence` may contain markup."""
    return (
        f"<figure><figcaption><h2>{escape(title)}</h2>"
        f'<p>{sentence}</p></figcaption><div class="scroll">{content}</div></figure>'
    )


# ---------------------------------------------------------------- numbers


def compact(value: float) -> str:
    """The number in a few characters: 640, 4.4k, 1.5M."""
    return EngFormatter(sep="")(float(f"{value:.3g}"))


def percent(value: float) -> str:
    """The share in percent: 39.2%, 0.12%, 710%, <0.01%."""
    value = 100 * value
    if 0 < abs(value) < 0.005:
        return "<0.01%"
    digits = 0 if abs(value) >= 99.95 or value == 0 else 1 if abs(value) >= 0.995 else 2
    return f"{value:,.{digits}f}%"


def percent_tick(value: float) -> str:
    """A share as a short label: 0%, 7.5%, 50%."""
    return f"{100 * value:,.3g}%" if abs(value) < 10 else f"{100 * value:,.0f}%"


def cost_scale(high: float, unit: str) -> tuple[float, str]:
    """(factor, name) of a readable unit for costs up to `high`."""
    if high <= 0:
        return 1.0, unit
    if unit == "s":
        below = (scale[1:] for scale in _SECONDS if high < scale[0])
        return next(below, (1 / 3600, "h"))
    exponent = 3 * math.floor(math.log10(high) / 3)
    if exponent in (0, 3):
        return 1.0, unit
    return 10.0**-exponent, f"10{str(exponent).translate(_SUPERSCRIPTS)} {unit}".strip()


def show_cost(value: float, unit: str) -> str:
    """The cost with a readable unit: 12.3 s, 5.72×10⁹."""
    factor, name = cost_scale(value, unit)
    digits = value * factor
    text = f"{digits:,.0f}" if digits >= 1000 else f"{digits:.3g}"
    return f"{text}×{name}" if name.startswith("10") else f"{text} {name}".strip()
