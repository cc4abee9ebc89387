"""Charts of a plan page: lengths, the cost of every rank in a step, and curves."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator, PercentFormatter

from alload_jax.planning.metrics import idle_fraction
from alload_jax.report.charts import (
    COLOURS,
    add_note,
    add_tips,
    binned,
    box_key,
    compact,
    cost_scale,
    legend,
    line_key,
    line_style,
    new_axes,
    percent,
    policy_colour,
    scale_x_log,
    scale_y,
    section,
    show_cost,
    svg,
)


@dataclass(frozen=True)
class StepBars:
    """One optimizer step of one policy.

    Attributes:
      step: index of the step within the epoch.
      ranks: number of ranks, including those that are not drawn.
      parts: (rank, cost, seq_len, kind) of every sample and padding on every rank; the kind is
        "whole", "split" or "padding".
    """

    step: int
    ranks: int
    parts: list[tuple[int, float, int, str]]


@dataclass(frozen=True)
class PolicyPart:
    """An epoch as one policy plans it.

    Attributes:
      name: displayed name, such as `equal_tokens (independent)`.
      metrics: values by their names in `METRICS`; None is shown as a dash.
      steps: the steps to draw, about three.
      imbalance: [steps] max/mean − 1 of cost over ranks.
    """

    name: str
    metrics: dict[str, float | int | None]
    steps: tuple[StepBars, ...]
    imbalance: np.ndarray


_WIDTH, _HEIGHT = 720, 290
"""Of curves, in CSS pixels."""


# ---------------------------------------------------------------- lengths

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
        low, high = int(seq_len.min()), int(seq_len.max())
        return cls(low, high, min(max(math.ceil(math.log2(high / low)), 1), _MAX_CLASSES))

    def position(self, seq_len: np.ndarray, parts: int) -> np.ndarray:
        """[N] index of the part that each length lies in, of `parts` equal parts of the scale."""
        inner = self.edges(parts)[1:-1] * (1 - 1e-9)  # a length at an edge, rounded, is above it
        return np.searchsorted(inner, seq_len, side="right")

    def edges(self, parts: int) -> np.ndarray:
        """[parts + 1] lengths in tokens at which parts begin and end."""
        return np.geomspace(self.low, self.high, parts + 1)

    def colour(self, index: int) -> str:
        """Name of the colour of a class; the longest always has the strongest."""
        if self.count == 1:
            return "s3"
        return f"s{round(index * (_MAX_CLASSES - 1) / (self.count - 1))}"

    def legend(self) -> list[tuple[str, str]]:
        """(key, range of lengths as text) of every class."""
        inner = [compact(_two_digits(edge)) for edge in self.edges(self.count)[1:-1]]
        edges = [compact(self.low), *inner, compact(self.high)]
        ranges = edges[:1] if self.low == self.high else map("–".join, pairwise(edges))
        return [(box_key(self.colour(n)), text) for n, text in enumerate(ranges)]


def lengths_figure(seq_len: np.ndarray, cost: np.ndarray, classes: LengthClasses) -> str:
    """Draws histograms of samples, tokens and cost over length, one above the other.

    Args:
      seq_len: [N] tokens of each sample.
      cost: [N] cost of each sample.
      classes: the classes of lengths.
    """
    parts = classes.count * _BINS_PER_CLASS if classes.high > classes.low else 1
    edges = classes.edges(parts) if parts > 1 else np.array([0.5, 2]) * classes.low
    fine = classes.position(seq_len, parts * _FINE)
    colours = [COLOURS[classes.colour(n * classes.count // parts)] for n in range(parts)]
    chart, rows = new_axes(_WIDTH, 360, rows=3)
    ends = [compact(round(edge)) for edge in edges.tolist()]
    labels, top = [], 0.0
    for axes, (name, weights) in zip(
        rows, (("samples", None), ("tokens", seq_len), ("cost", cost)), strict=True
    ):
        share = np.bincount(fine, weights=weights, minlength=parts * _FINE).astype(np.float64)
        share /= share.sum() or 1
        heights = share.reshape(parts, _FINE).sum(axis=1)
        top = max(top, heights.max())
        axes.bar(edges[:-1], heights, np.diff(edges), align="edge", color=colours)
        tips = (
            f"{low}–{high} tokens: {percent(height)} of {name}"
            for (low, high), height in zip(pairwise(ends), heights.tolist(), strict=True)
        )
        add_tips(axes, edges.tolist(), tips)
        scale_x_log(axes, edges[0], edges[-1], "")
        scale_y(axes, top, f"share of {name}", percent=True, parts=3)
        if parts > 1 and share.any():
            middle = classes.edges(len(share))[int(np.searchsorted(np.cumsum(share), 0.5))]
            labels.append(f"half of the {name} above {compact(_two_digits(middle))} tokens")
            add_note(axes, middle, 0.95, f"half above {compact(_two_digits(middle))} tokens")
    rows[-1].set_xlabel("sequence length (tokens, logarithmic)")
    label = "Histograms of samples, tokens and cost over sequence length. " + "; ".join(labels)
    content = legend(classes.legend(), "tokens") + svg(chart, "lengths", label)
    return section("Where the work is", _longest_sentence(seq_len, cost), content)


def _longest_sentence(seq_len: np.ndarray, cost: np.ndarray) -> str:
    """The share of tokens and cost in the longest tenth of the samples; ties count in part."""
    size = len(seq_len)
    wanted = _LONGEST_SHARE * size
    bar = np.partition(seq_len, size - math.ceil(wanted))[size - math.ceil(wanted)]
    above, ties = seq_len > bar, seq_len == bar
    part = (wanted - np.count_nonzero(above)) / np.count_nonzero(ties)
    tokens, costs = (
        float(values[above].sum() + part * values[ties].sum()) / (float(values.sum()) or 1)
        for values in (seq_len, cost)
    )
    return (
        f"The longest tenth of the samples hold <b>{percent(tokens)}</b> of the tokens "
        f"and <b>{percent(costs)}</b> of the cost."
    )


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


# ---------------------------------------------------------------- the ranks of a step

_MAX_RANKS = 64
_MAX_STEPS = 4
_BAR = 0.8
_SMALLEST = 0.02
_STACKING = ("split", "whole", "padding")


def bars_figure(policies: Sequence[PolicyPart], classes: LengthClasses, unit: str) -> str:
    """Draws steps of every policy on one scale; radio buttons choose the step."""
    count = min(max(len(policy.steps) for policy in policies), _MAX_STEPS)
    drawn = [step for policy in policies for step in policy.steps[:count]]
    high = max(float(rank_totals(step).max()) for step in drawn)
    groups = [
        "".join(
            _panel(policy, number, policy_colour(n, len(policies)), classes, unit, high)
            for n, policy in enumerate(policies)
            if number < len(policy.steps)
        )
        for number in range(count)
    ]
    sentence = (
        "Every bar is a rank and stacks the sequences that it computes in one optimizer step. "
        "The step ends when the <b>slowest rank</b> ends; the shaded part is <b>waiting</b>."
    )
    content = f'<div class="panels">{groups[0]}</div>'
    if count > 1:  # radio buttons, which work without scripts
        steps = [{p.steps[n].step for p in policies if n < len(p.steps)} for n in range(count)]
        names = list("ABCD"[:count])
        if all(len(step) == 1 for step in steps):  # all policies have the same ones
            names = [f"{step.pop():,}" for step in steps]
        inputs = "".join(
            f'<input type="radio" name="step" id="step-{n}"{" checked" if n == 0 else ""}/>'
            f'<label for="step-{n}">{escape(name)}</label>'
            for n, name in enumerate(names)
        )
        panels = "".join(f'<div class="panels panels-{n}">{g}</div>' for n, g in enumerate(groups))
        content = f'<div class="choice" role="group" aria-label="Step">Step {inputs}{panels}</div>'
    return section("Who waits for whom", sentence, _bars_legend(drawn, classes) + content)


def rank_totals(step: StepBars) -> np.ndarray:
    """[ranks] total cost of each rank in the step."""
    ranks = np.fromiter((part[0] for part in step.parts), np.int64, len(step.parts))
    costs = np.fromiter((part[1] for part in step.parts), np.float64, len(step.parts))
    return np.bincount(ranks, weights=costs, minlength=max(step.ranks, 1))


def _panel(
    policy: PolicyPart, number: int, colour: str, classes: LengthClasses, unit: str, high: float
) -> str:
    """A step of a policy; `high` is the largest cost of a rank of all panels."""
    step, (factor, unit_name) = policy.steps[number], cost_scale(high, unit)
    totals = rank_totals(step)
    end, mean, drawn = float(totals.max()), float(totals.mean()), min(len(totals), _MAX_RANKS)
    waits = percent(float(idle_fraction(totals)))
    chart, (axes,) = new_axes(250, 310)
    _stack(axes, step, drawn, factor, high, classes)
    axes.axhline(mean * factor, color=COLOURS["ink"], lw=1.2, ls="dashed")
    axes.axhline(end * factor, color=COLOURS["p0"], lw=1.6)
    add_tips(axes, (np.arange(drawn + 1) - 0.5).tolist(), _rank_tips(step, totals, drawn, unit))
    axes.set_xlim(-0.5, drawn - 0.5)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    cut = f"first {drawn} of {len(totals):,} ranks" if drawn < len(totals) else "rank"
    axes.set_xlabel(cut)
    scale_y(axes, high * factor, f"cost of the step ({unit_name})".removesuffix(" ()"))
    label = (
        f"{policy.name}, step {step.step}: {len(totals):,} ranks, slowest "
        f"{show_cost(end, unit)}, mean {show_cost(mean, unit)}; ranks wait {waits} of the time."
    )
    return (
        f'<section class="panel"><h3><i {box_key(colour)}></i>{escape(policy.name)}</h3>'
        f'<p class="wait-share"><b>{waits}</b> waiting <span>in step {step.step:,}</span></p>'
        f"{svg(chart, f'step {number} of {colour} {policy.name}', label)}</section>"
    )


def _stack(
    axes: Axes, step: StepBars, drawn: int, factor: float, high: float, classes: LengthClasses
) -> None:
    """Draws the bars as one path per look; adjacent small parts of one look are merged."""
    boxes: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    base = np.zeros(drawn)
    for rank, cost, look in _stacked_parts(step, drawn, high * _SMALLEST, classes):
        boxes[look].append((rank, base[rank], base[rank] + cost))
        base[rank] += cost
    end = rank_totals(step).max()
    idle = [(rank, low, end) for rank, low in enumerate(base.tolist()) if low < end * 0.999]
    _rectangles(axes, idle, factor, facecolor=COLOURS["p0"], alpha=0.15, lw=0)
    lw = 0.5 if drawn <= _MAX_RANKS // 2 else 0.25
    edges = {
        "whole": {"edgecolor": COLOURS["paper"], "lw": lw},
        "split": {"edgecolor": COLOURS["split"], "lw": 3 * lw},
        "padding": {"edgecolor": COLOURS["soft"], "lw": 0, "hatch": "////"},
    }
    # Split samples are drawn last, so that no neighbour covers their outline.
    for (kind, colour), parts in sorted(boxes.items(), key=lambda box: (box[0][0] == "split", box)):
        _rectangles(axes, parts, factor, facecolor=COLOURS[colour], **edges[kind])


def _rectangles(
    axes: Axes, parts: Sequence[tuple[int, float, float]], factor: float, **look: object
) -> None:
    """Adds a bar for each (rank, low, high), all as one path."""
    if not parts:
        return
    rank, low, high = np.array(parts).T
    left, right = rank - _BAR / 2, rank + _BAR / 2
    x, y = np.stack([left, right, right, left, left]), np.stack([low, low, high, high, low])
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(parts)
    axes.add_patch(PathPatch(Path(np.stack([x.T.ravel(), factor * y.T.ravel()], 1), codes), **look))


def _stacked_parts(
    step: StepBars, drawn: int, smallest: float, classes: LengthClasses
) -> list[tuple[int, float, tuple[str, str]]]:
    """(rank, cost, (kind, colour)) from bottom to top: split samples, whole ones, then padding.

    Samples are stacked by decreasing length.
    """
    parts = [part for part in step.parts if part[0] < drawn and part[1] > 0]
    parts.sort(key=lambda part: (part[0], _STACKING.index(part[3]), -part[2]))
    lengths = np.fromiter((part[2] for part in parts), np.int64, len(parts))
    stacked: list[tuple[int, float, tuple[str, str]]] = []
    for (rank, cost, _, kind), index in zip(
        parts, classes.position(lengths, classes.count).tolist(), strict=True
    ):
        look = (kind, "panel" if kind == "padding" else classes.colour(index))
        if (
            stacked
            and stacked[-1][0] == rank
            and stacked[-1][2] == look
            and (kind == "padding" or min(cost, stacked[-1][1]) < smallest)
        ):
            cost += stacked.pop()[1]
        stacked.append((rank, cost, look))
    return stacked


def _rank_tips(step: StepBars, totals: np.ndarray, drawn: int, unit: str) -> list[str]:
    """What each rank computes."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for rank, _, seq_len, kind in step.parts:
        if kind != "padding":
            lengths[rank].append(seq_len)
    tips = []
    for rank in range(drawn):
        wait = 1 - totals[rank] / (totals.max() or 1)
        text = f"rank {rank}: {show_cost(float(totals[rank]), unit)}, waits {percent(wait)}"
        if own := lengths[rank]:
            ends = dict.fromkeys((f"{min(own):,}", f"{max(own):,}"))
            text += f"; {len(own):,} × {'–'.join(ends)} tokens"
        tips.append(text)
    return tips


def _bars_legend(drawn: Sequence[StepBars], classes: LengthClasses) -> str:
    kinds = {part[3] for step in drawn for part in step.parts}
    entries = classes.legend()
    if "split" in kinds:
        entries.append(('class="key split"', "split"))
    if "padding" in kinds:
        entries.append(('class="key padding"', "padding, fixed cost"))
    entries += [
        ('class="key waiting"', "waiting"),
        (line_key("p0", "solid"), "slowest rank"),
        (line_key("ink", "dashed"), "mean"),
    ]
    return legend(entries, "tokens")


# ---------------------------------------------------------------- curves

_BINS = 200
_TIPS = 50


def epoch_figure(policies: Sequence[PolicyPart]) -> str:
    """Imbalance over the steps of an epoch: lines of the mean, bands up to the maximum."""
    known = [(policy_colour(n, len(policies)), policy) for n, policy in enumerate(policies)]
    chart, (axes,) = new_axes(_WIDTH, _HEIGHT)
    highs = []
    for colour, policy in known:
        mean, high = binned(policy.imbalance, _BINS)
        highs.append(high)
        x = 100 * (np.arange(len(mean)) + 0.5) / len(mean)
        if len(mean) == 1:
            x, mean, high = np.array([0.0, 100.0]), mean.repeat(2), high.repeat(2)
        if len(policy.imbalance) > _BINS:
            axes.fill_between(x, mean, high, color=COLOURS[colour], alpha=0.16, lw=0)
        axes.plot(x, mean, color=COLOURS[colour], ls=line_style(colour))
    usual = max(float(np.quantile(high, 0.97)) for high in highs)
    top, beyond = max(float(high.max()) for high in highs), ""
    if top > 2 * usual > 0:  # a few steps, such as the last
        beyond = f" Cut off at the top: the worst step reaches {percent(top)}."
        top = 1.2 * usual
    scale_y(axes, top, "imbalance (max/mean − 1)", percent=True)
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_xlabel("progress through the epoch")
    means = {policy.name: binned(policy.imbalance, _TIPS)[0] for _, policy in known}
    tips = [
        f"at {100 * n / _TIPS:.0f}% of the epoch: "
        + ", ".join(
            f"{name} {percent(mean[n * len(mean) // _TIPS])}" for name, mean in means.items()
        )
        for n in range(_TIPS)
    ]
    add_tips(axes, np.linspace(0, 100, _TIPS + 1).tolist(), tips)
    label = "Imbalance over the epoch. " + "; ".join(
        f"{policy.name}: mean {percent(float(np.mean(policy.imbalance)))}, "
        f"worst {percent(float(np.max(policy.imbalance)))}"
        for _, policy in known
    )
    sentence = (
        "How much longer the slowest rank takes than the mean of all ranks, from the first step to "
        "the last. Bands reach up to the worst of the steps that share a point."
    )
    entries = [
        (line_key(c, line_style(c)), f"{p.name}, {len(p.imbalance):,} steps") for c, p in known
    ]
    content = legend(entries) + svg(chart, "epoch", label)
    return section("Imbalance over the epoch", sentence + beyond, content)


def curve_figure(values: np.ndarray, times: np.ndarray, chosen: float) -> str:
    """Draws the predicted time per epoch over M_comp and marks the chosen M_comp.

    Args:
      values: [n] values of M_comp, ascending from above 0.
      times: [n] predicted seconds per epoch.
      chosen: the chosen M_comp, one of them.
    """
    factor, unit = cost_scale(float(times.max()), "s")
    chart, (axes,) = new_axes(_WIDTH, _HEIGHT)
    axes.plot(values, times * factor, "o-", color=COLOURS["best"], clip_on=False)
    scale_y(axes, float(times.max()) * factor, f"predicted time per epoch ({unit})")
    scale_x_log(axes, values[0], values[-1], "M_comp (B·S^p, logarithmic)")
    text = f"chosen: {compact(chosen)}"
    add_note(axes, chosen, 0.05, text)
    height = float(np.interp(chosen, values, times)) * factor
    (ring,) = axes.plot(chosen, height, "o", ms=7, clip_on=False, zorder=4)
    ring.set(mec=COLOURS["ink"], mew=1.5, mfc=COLOURS["paper"])
    tips = [f"{show_cost(b, 's')} at {compact(a)}" for a, b in zip(values, times, strict=True)]
    add_tips(axes, _between(values), tips)
    best = int(times.argmin())
    label = (
        f"Predicted time per epoch over M_comp: least {show_cost(float(times[best]), 's')} at "
        f"{compact(float(values[best]))}; {text}."
    )
    sentence = (
        "With a small M_comp, micro-batches use little of the memory; with a large one, ranks wait "
        "for long sequences. The ring marks the chosen bound."
    )
    return section("Choosing M_comp", sentence, svg(chart, "curve", label))


def ranks_figure(
    over_ranks: Mapping[str, Sequence[tuple[int, float]]], policies: Sequence[PolicyPart]
) -> str:
    """Draws the imbalance of every policy over the number of ranks."""
    series = {key: dict(sorted(points)) for key, points in over_ranks.items()}
    names = [policy.name for policy in policies]
    colours = {
        key: policy_colour(names.index(key), len(names)) if key in names else f"p{1 + n % 4}"
        for n, key in enumerate(series)
    }
    chart, (axes,) = new_axes(_WIDTH, _HEIGHT)
    for key, points in series.items():
        colour = colours[key]
        (line,) = axes.plot(list(points), list(points.values()), "o", clip_on=False)
        line.set(color=COLOURS[colour], ls=line_style(colour))
    ranks = sorted({n for points in series.values() for n in points})
    scale_x_log(axes, ranks[0], ranks[-1], "ranks (logarithmic)")
    axes.set_xticks(ranks[:: max(1, len(ranks) // 10)])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    high = max(value for points in series.values() for value in points.values())
    scale_y(axes, high, "imbalance", percent=True)
    tips = [
        ", ".join(f"{key} {percent(points[n])}" for key, points in series.items() if n in points)
        for n in ranks
    ]
    tips = [f"{n:,} ranks: {tip}" for n, tip in zip(ranks, tips, strict=True)]
    add_tips(axes, _between(ranks), tips)
    label = f"Imbalance over ranks. {'; '.join(tips)}"
    sentence = "Imbalance as the same data set is planned for more and more ranks."
    entries = [(line_key(c, line_style(c)), key) for key, c in colours.items()]
    return section("More ranks", sentence, legend(entries) + svg(chart, "ranks", label))


def _between(values: Sequence[float] | np.ndarray) -> list[float]:
    """Borders between increasing positive values, halfway on a logarithmic scale, and the ends."""
    known = np.asarray(values, np.float64)
    return [known[0] / 2, *np.sqrt(known[1:] * known[:-1]), known[-1] * 2]
