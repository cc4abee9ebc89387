"""Charts as inline SVG with coordinates in percent, so that they fit any width at one text size.

Curves are in a nested, stretched SVG of 1000 × 1000 units whose strokes do not scale. Colours,
strokes and heights are classes in `plan_page.css`: `policy_colour` gives those of policies, and
`s0` to `s5` are those of lengths. Labels of class `minor` are hidden in narrow windows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

_NICE = (1, 2, 2.5, 5, 10)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis; the label of a minor tick may be hidden."""

    value: float
    label: str
    minor: bool = False


@dataclass(frozen=True)
class Axis:
    """Maps values to percent of the box, on a linear or a logarithmic scale."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    title: str
    log: bool = False

    def at(self, value: float) -> float:
        """Position of a value on the axis, 0 to 100; values outside are clipped."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return 100 * min(max((value - low) / (high - low), 0), 1)


def linear_axis(high: float, title: str, label: str = "{:g}", factor: float = 1) -> Axis:
    """An axis from 0 to a round number at or above `high`; labels show value × factor."""
    high = high if math.isfinite(high) and high > 0 else 1.0
    size = 10 ** math.floor(math.log10(high / 4))
    step = next(size * nice for nice in _NICE if size * nice * 4.999 >= high)
    count = math.ceil(high / step - 1e-9)
    ticks = tuple(Tick(n * step, label.format(n * step * factor)) for n in range(count + 1))
    return Axis(0.0, count * step, ticks, title)


def log_axis(low: float, high: float, title: str) -> Axis:
    """A logarithmic axis from `low` to `high` with ticks at 1, 2 and 5 times powers of ten."""
    if high <= low:
        low, high = low / 2, high * 2
    ticks = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1, 2, 5) if high / low < 2e4 else (1,):
            value = digit * 10.0**power
            if low * 0.999 <= value <= high * 1.001:
                ticks.append(Tick(value, compact(value), minor=digit != 1))
    if sum(not tick.minor for tick in ticks) < 2:
        ticks = [Tick(tick.value, tick.label) for tick in ticks]
    if len(ticks) < 2:
        ticks = [Tick(low, compact(low)), Tick(high, compact(high))]
    return Axis(low, high, tuple(ticks), title, log=True)


def compact(value: float) -> str:
    """The number in a few characters: 640, 4,400, 29k, 1.5×10⁶."""
    if value == 0 or 1 <= abs(value) < 9_999.5:
        return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.2g}"
    if 9_999.5 <= abs(value) < 999_500:
        return f"{value / 1000:.3g}k"
    if 1e-3 <= abs(value) < 1:
        return f"{value:.2g}"
    digits, power = f"{value:.1e}".split("e")
    digits = digits.removesuffix(".0")
    return ("" if digits == "1" else f"{digits}×") + power_of_ten(int(power))


def power_of_ten(exponent: int) -> str:
    """A power of ten with a superscript, such as 10⁹."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def policy_colour(index: int, count: int) -> str:
    """CSS class of policy `index` of `count`: the first is the baseline, the last the best."""
    if index == 0:
        return "p0"
    return "best" if index == count - 1 else f"p{1 + (index - 1) % 4}"


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def plot(x: Axis, y: Axis, marks: str, label: str, kind: str = "", x_lines: bool = True) -> str:
    """Draws axes around marks, with y's title above and x's title below.

    Args:
      x: horizontal axis.
      y: vertical axis.
      marks: SVG with coordinates in percent of the box.
      label: text alternative for screen readers.
      kind: additional CSS classes.
      x_lines: whether the ticks of x have grid lines.
    """
    lines, labels = [], []
    for tick in y.ticks:
        place = number(100 - y.at(tick.value))
        lines.append(f'<line class="grid" x1="0" x2="100%" y1="{place}%" y2="{place}%"/>')
        labels.append(
            f'<text class="ty" x="-8" y="{place}%" dy=".32em">{escape(tick.label)}</text>'
        )
    for tick in x.ticks:
        place, minor = number(x.at(tick.value)), " minor" if tick.minor else ""
        if x_lines:
            lines.append(f'<line class="grid" x1="{place}%" x2="{place}%" y1="0" y2="100%"/>')
        text = escape(tick.label)
        labels.append(f'<text class="tx{minor}" x="{place}%" y="100%" dy="1.5em">{text}</text>')
    return (
        f'<div class="plot {kind}"><p class="axis" aria-hidden="true">{escape(y.title)}</p>'
        f'<svg class="box" role="img" aria-label="{escape(label)}">'
        f"{''.join(lines)}{marks}{''.join(labels)}</svg>"
        f'<p class="axis x" aria-hidden="true">{escape(x.title)}</p></div>'
    )


def rectangle(left: float, top: float, width: float, height: float, css: str, tip: str = "") -> str:
    """A rectangle with coordinates in percent of the box; `tip` is its tooltip."""
    place = (
        f'x="{number(left)}%" y="{number(top)}%" '
        f'width="{number(width)}%" height="{number(height)}%"'
    )
    if not tip:
        return f'<rect class="{css}" {place}/>'
    return f'<rect class="{css}" {place}><title>{escape(tip)}</title></rect>'


def stretched(content: str) -> str:
    """A nested box of 1000 × 1000 units for paths, which cannot use percent."""
    return (
        '<svg class="stretched" viewBox="0 0 1000 1000" preserveAspectRatio="none" '
        f'width="100%" height="100%">{content}</svg>'
    )


def line(x: Axis, y: Axis, xs: Iterable[float], ys: Iterable[float], css: str) -> str:
    """A curve for use within `stretched`."""
    return f'<polyline class="line {css}" points="{_points(x, y, xs, ys)}"/>'


def band(
    x: Axis, y: Axis, xs: Sequence[float], low: Sequence[float], high: Sequence[float], css: str
) -> str:
    """The area between two curves for use within `stretched`."""
    there, back = _points(x, y, xs, high), _points(x, y, xs[::-1], low[::-1])
    return f'<polygon class="band {css}" points="{there} {back}"/>'


def dots(x: Axis, y: Axis, points: Iterable[tuple[float, float]], css: str, tip: str) -> str:
    """A dot for each point; `tip` names the quantity in the tooltips."""
    return "".join(
        f'<circle class="dot {css}" cx="{number(x.at(a))}%" cy="{number(100 - y.at(b))}%" r="3.5">'
        f"<title>{escape(tip)}: {escape(compact(b))} at {escape(compact(a))}</title></circle>"
        for a, b in points
    )


def legend(entries: Iterable[tuple[str, str]], title: str = "") -> str:
    """A legend of (CSS class, name); a class `line …` is drawn as a line, others as a box."""
    items = "".join(
        f'<li><svg class="key" aria-hidden="true">{_swatch(css)}</svg>{escape(name)}</li>'
        for css, name in entries
    )
    head = f'<li class="head">{escape(title)}</li>' if title else ""
    return f'<ul class="legend">{head}{items}</ul>'


def figure(title: str, sentence: str, content: str, kind: str = "") -> str:
    """A chart with a title and one sentence on how to read it; `sentence` may contain markup."""
    return (
        f'<figure class="{kind}"><figcaption><h2>{escape(title)}</h2>'
        f"<p>{sentence}</p></figcaption>{content}</figure>"
    )


def binned(values: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits values [N] into at most `bins` equal parts; returns their means and maxima [bins]."""
    starts = np.linspace(0, len(values), min(bins, len(values)), endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(values)))
    values = np.asarray(values, np.float64)
    return np.add.reduceat(values, starts) / counts, np.maximum.reduceat(values, starts)


def _points(x: Axis, y: Axis, xs: Iterable[float], ys: Iterable[float]) -> str:
    return " ".join(
        f"{round(10 * x.at(a), 1):g},{round(1000 - 10 * y.at(b), 1):g}"
        for a, b in zip(xs, ys, strict=True)
    )


def _swatch(css: str) -> str:
    if css.startswith("line "):
        return f'<line class="{css}" x1="0" x2="100%" y1="50%" y2="50%"/>'
    return f'<rect class="{css}" x="1" y="1" width="100%" height="100%"/>'
