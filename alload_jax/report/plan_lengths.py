"""Histograms of samples, tokens and cost over sequence length."""

import math
from dataclasses import dataclass
from html import escape

import numpy as np

from alload_jax.report.charts import (
    Axis,
    Tick,
    compact,
    figure,
    legend,
    linear_axis,
    log_axis,
    number,
    plot,
    rectangle,
)
from alload_jax.report.plan_figures import percent

_MAX_CLASSES = 6
_BINS_PER_CLASS = 6
_FINE = 50
_LONGEST_SHARE = 0.1


@dataclass(frozen=True)
class LengthClasses:
    """Classes of lengths of equal size on a logarithmic scale, numbered from the shortest.

    Attributes:
      low, high: shortest and longest sequence, in tokens.
      count: number of classes.
    """

    low: int
    high: int
    count: int

    @classmethod
    def of(cls, seq_len: np.ndarray) -> "LengthClasses":
        """Classes for sequences of `seq_len` ([N] tokens): one per doubling, at most six."""
        low, high = (int(seq_len.min()), int(seq_len.max())) if len(seq_len) else (1, 1)
        low = max(low, 1)
        doublings = math.ceil(math.log2(max(high, low) / low))
        return cls(low, max(high, low), min(max(doublings, 1), _MAX_CLASSES))

    def position(self, seq_len: np.ndarray, parts: int) -> np.ndarray:
        """[N] index of the part that each length lies in, of `parts` equal parts of the scale."""
        if self.high == self.low:
            return np.zeros(np.shape(seq_len), np.int64)
        scale = parts / math.log(self.high / self.low)
        place = np.log(np.maximum(seq_len, self.low) / self.low) * scale
        return np.minimum((place + 1e-9).astype(np.int64), parts - 1)

    def edge(self, position: float, parts: int) -> float:
        """The length in tokens at which a part begins."""
        return self.low * (self.high / self.low) ** (position / parts)

    def css(self, index: int) -> str:
        """CSS class of a class of lengths; the longest always has the strongest colour."""
        if self.count == 1:
            return "s3"
        return f"s{round(index * (_MAX_CLASSES - 1) / (self.count - 1))}"

    def legend(self) -> list[tuple[str, str]]:
        """(CSS class, range of lengths as text) of every class."""
        edges = [compact(_two_digits(self.edge(n, self.count))) for n in range(1, self.count)]
        edges = [compact(self.low), *edges, compact(self.high)]
        if self.low == self.high:
            return [(self.css(0), edges[0])]
        return [(self.css(n), f"{edges[n]}–{edges[n + 1]}") for n in range(self.count)]


def lengths_figure(seq_len: np.ndarray, cost: np.ndarray, classes: LengthClasses) -> str:
    """Draws histograms of samples, tokens and cost over length, one above the other.

    Args:
      seq_len: [N] tokens of each sample.
      cost: [N] cost of each sample.
      classes: the classes of lengths.
    """
    parts = classes.count * _BINS_PER_CLASS if classes.high > classes.low else 1
    fine = classes.position(seq_len, parts * _FINE)
    rows = [("samples", None), ("tokens", seq_len), ("cost", cost)]
    shares = [
        (name, _shares(np.bincount(fine, weights=weights, minlength=parts * _FINE)))
        for name, weights in rows
    ]
    heights = [share.reshape(parts, _FINE).sum(axis=1) for _, share in shares]
    y_high = float(max(height.max() for height in heights))
    plots = "".join(
        _histogram(name, share, height, y_high, classes)
        for (name, share), height in zip(shares, heights, strict=True)
    )
    content = legend(classes.legend(), "tokens") + f'<div class="rows">{plots}</div>'
    return figure("Where the work is", _longest_sentence(seq_len, cost), content, "lengths")


def _histogram(
    name: str, share: np.ndarray, height: np.ndarray, y_high: float, classes: LengthClasses
) -> str:
    """Draws one histogram over log-spaced lengths and marks its median."""
    parts = len(height)
    x = log_axis(classes.low, classes.high, "sequence length (tokens, logarithmic)")
    y = _share_axis(y_high, f"share of {name}")
    marks = []
    for n in np.flatnonzero(height).tolist():
        low, high = classes.edge(n, parts), classes.edge(n + 1, parts)
        top, css = y.at(height[n]), classes.css(n * classes.count // parts)
        tip = f"{compact(round(low))}–{compact(round(high))} tokens: {percent(height[n])} of {name}"
        marks.append(rectangle(100 * n / parts, 100 - top, 100 / parts, top, f"bar {css}", tip))
    label = f"Histogram: share of {name} over sequence length. No {name}."
    if height.any() and parts > 1:
        middle = classes.edge(float(np.searchsorted(np.cumsum(share), 0.5)) + 0.5, len(share))
        middle = min(max(middle, classes.low), classes.high)
        text = f"half above {compact(_two_digits(middle))} tokens"
        marks.append(_marker(x, middle, text))
        label = f"Histogram: share of {name} over sequence length, {text}."
    elif height.any():
        label = f"Histogram: all {name} in sequences of {classes.low:,} tokens."
    return plot(x, y, "".join(marks), label, "short", x_lines=False)


def _marker(x: Axis, value: float, text: str) -> str:
    place = x.at(value)
    css, shift = ("before", "-.5em") if place > 50 else ("after", ".5em")
    at = number(place)
    return (
        f'<line class="marker" x1="{at}%" x2="{at}%" y1="-6" y2="100%"/>'
        f'<text class="note {css}" x="{at}%" y="0" dx="{shift}" dy=".35em">{escape(text)}</text>'
    )


def _share_axis(high: float, title: str) -> Axis:
    axis = linear_axis(high, title)
    few = axis.ticks[:: max(1, len(axis.ticks) // 3)]
    return Axis(0.0, axis.high, tuple(Tick(t.value, percent_tick(t.value)) for t in few), title)


def percent_tick(value: float) -> str:
    """A share as a short label: 0%, 7.5%, 50%."""
    return f"{100 * value:,.3g}%" if abs(value) < 10 else f"{100 * value:,.0f}%"


def _longest_sentence(seq_len: np.ndarray, cost: np.ndarray) -> str:
    """The share of tokens and cost in the longest tenth of the samples; ties count in part."""
    size = len(seq_len)
    if not size:
        return "The data set has no samples."
    wanted = _LONGEST_SHARE * size
    bar = np.partition(seq_len, size - math.ceil(wanted))[size - math.ceil(wanted)]
    above, ties = seq_len > bar, seq_len == bar
    part = (wanted - np.count_nonzero(above)) / np.count_nonzero(ties)
    tokens, costs = (
        _ratio(float(v[above].sum() + part * v[ties].sum()), float(v.sum()))
        for v in (seq_len, cost)
    )
    return (
        f"The longest tenth of the samples hold <b>{percent(tokens)}</b> of the tokens "
        f"and <b>{percent(costs)}</b> of the cost."
    )


def _shares(counts: np.ndarray) -> np.ndarray:
    total = counts.sum()
    return counts / total if total > 0 else counts * 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
