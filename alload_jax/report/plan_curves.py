"""Curves of a plan page: imbalance over the epoch, time over M_comp, a metric over ranks."""

from collections.abc import Sequence
from html import escape

import numpy as np

from alload_jax.report.charts import (
    Axis,
    Tick,
    band,
    binned,
    compact,
    dots,
    figure,
    legend,
    line,
    linear_axis,
    log_axis,
    number,
    plot,
    policy_colour,
    rectangle,
    stretched,
)
from alload_jax.report.plan_figures import cost_scale, metric, percent, show_cost
from alload_jax.report.plan_lengths import percent_tick
from alload_jax.report.plan_page_data import PolicyPart

_BINS = 200
_TIPS = 50


def epoch_figure(policies: Sequence[PolicyPart]) -> str:
    """Imbalance over the steps of an epoch: lines of the mean, bands up to the maximum."""
    known = [(n, policy) for n, policy in enumerate(policies) if len(policy.imbalance)]
    if not known:
        return ""
    curves = [(n, policy, *binned(policy.imbalance, _BINS)) for n, policy in known]
    x = Axis(0, 100, tuple(Tick(v, f"{v}%", v % 50 != 0) for v in range(0, 101, 25)), "epoch")
    x = Axis(0, 100, x.ticks, "progress through the epoch")
    top, beyond = _top([high for *_, high in curves])
    y = _percent_axis(top, "imbalance (max/mean − 1)")
    areas, lines = [], []
    for n, _, mean, high in curves:
        css, xs = policy_colour(n, len(policies)), _middles(len(mean))
        if len(mean) == 1:
            xs, mean, high = [0.0, 100.0], mean.repeat(2), high.repeat(2)
        if len(policies[n].imbalance) > _BINS:
            areas.append(band(x, y, xs, mean.tolist(), high.tolist(), css))
        lines.append(line(x, y, xs, mean.tolist(), css))
    label = "Imbalance over the epoch. " + "; ".join(
        f"{policy.name}: mean {percent(float(np.mean(policy.imbalance)))}, "
        f"worst {percent(float(np.max(policy.imbalance)))}"
        for _, policy in known
    )
    marks = stretched("".join(areas + lines)) + _epoch_tips(known)
    names = [
        (f"line {policy_colour(n, len(policies))}", f"{p.name}, {len(p.imbalance):,} steps")
        for n, p in known
    ]
    sentence = (
        "How much longer the slowest rank takes than the mean of all ranks, from the first step to "
        "the last. Bands reach up to the worst of the steps that share a point."
    ) + beyond
    return figure("Imbalance over the epoch", sentence, legend(names) + plot(x, y, marks, label))


def _top(highs: list[np.ndarray]) -> tuple[float, str]:
    """Upper end of the axis, and a sentence if a few steps, such as the last, exceed it."""
    usual = max(float(np.quantile(high, 0.97)) for high in highs)
    worst = max(float(high.max()) for high in highs)
    if worst <= 2 * usual or usual <= 0:
        return worst, ""
    return 1.2 * usual, f" Cut off at the top: the worst step reaches {percent(worst)}."


def curve_figure(values: np.ndarray, times: np.ndarray, chosen: float) -> str:
    """Draws the predicted time per epoch over M_comp and marks the chosen M_comp.

    Args:
      values: [n] values of M_comp.
      times: [n] predicted seconds per epoch; values that are not finite are skipped.
      chosen: the chosen M_comp.
    """
    keep = np.isfinite(times) & (values > 0)
    values, times = np.asarray(values)[keep], np.asarray(times)[keep]
    if not len(values):
        return ""
    order = np.argsort(values, kind="stable")
    values, times = values[order], times[order]
    factor, unit = cost_scale(float(times.max()), "s")
    x = log_axis(
        min(float(values[0]), chosen or np.inf),
        max(float(values[-1]), chosen),
        "M_comp (B·S^p, logarithmic)",
    )
    y = linear_axis(float(times.max()) * factor, f"predicted time per epoch ({unit})")
    points = list(zip(values.tolist(), (times * factor).tolist(), strict=True))
    marks = stretched(line(x, y, values.tolist(), (times * factor).tolist(), "best"))
    marks += dots(x, y, points if len(points) <= 80 else [], "best", unit)
    best = int(times.argmin())
    text = f"chosen: {compact(chosen)}"
    marks += _chosen(x, y, chosen, float(np.interp(chosen, values, times)) * factor, text)
    label = (
        f"Predicted time per epoch over M_comp: least {show_cost(float(times[best]), 's')} at "
        f"{compact(float(values[best]))}; {text}."
    )
    sentence = (
        "With a small M_comp, micro-batches use little of the memory; with a large one, ranks wait "
        "for long sequences. The ring marks the chosen bound."
    )
    return figure("Choosing M_comp", sentence, plot(x, y, marks, label))


def ranks_figure(
    over_ranks: dict[str, list[tuple[int, float]]], name: str, policies: Sequence[PolicyPart]
) -> str:
    """Draws the metric `name` of every policy over the number of ranks."""
    series = {key: sorted(points) for key, points in over_ranks.items() if points}
    if not series:
        return ""
    shown = metric(name)
    ranks = sorted({n for points in series.values() for n, _ in points})
    x = log_axis(ranks[0], ranks[-1], "ranks (logarithmic)")
    ticks = tuple(Tick(n, f"{n:,}", minor=i % 2 == 1) for i, n in enumerate(ranks))
    x = Axis(x.low, x.high, ticks[:: max(1, len(ticks) // 10)], x.title, log=True)
    high = max(value for points in series.values() for _, value in points)
    title = shown.label.lower()
    y = _percent_axis(high, title) if shown.form == "percent" else linear_axis(high, title)
    known = [policy.name for policy in policies]
    colours = {
        key: policy_colour(known.index(key), len(known)) if key in known else f"p{1 + n % 4}"
        for n, key in enumerate(series)
    }
    marks = stretched(
        "".join(
            line(x, y, [n for n, _ in points], [v for _, v in points], colours[k])
            for k, points in series.items()
        )
    )
    marks += "".join(_rank_dots(x, y, p, colours[k], k, shown.form) for k, p in series.items())
    names = [(f"line {colours[key]}", key) for key in series]
    label = f"{shown.label} over ranks. " + "; ".join(
        f"{key}: {_value(points[0][1], shown.form)} at {points[0][0]:,}, "
        f"{_value(points[-1][1], shown.form)} at {points[-1][0]:,}"
        for key, points in series.items()
    )
    sentence = f"{escape(shown.label)} as the same data set is planned for more and more ranks."
    return figure("More ranks", sentence, legend(names) + plot(x, y, marks, label))


def _rank_dots(
    x: Axis, y: Axis, points: list[tuple[int, float]], css: str, name: str, form: str
) -> str:
    return "".join(
        f'<circle class="dot {css}" cx="{number(x.at(n))}%" cy="{number(100 - y.at(v))}%" r="3.5">'
        f"<title>{escape(f'{name}, {n:,} ranks: {_value(v, form)}')}</title></circle>"
        for n, v in points
    )


def _value(value: float, form: str) -> str:
    return percent(value) if form == "percent" else compact(value)


def _percent_axis(high: float, title: str) -> Axis:
    axis = linear_axis(high, title)
    ticks = tuple(Tick(tick.value, percent_tick(tick.value)) for tick in axis.ticks)
    return Axis(0.0, axis.high, ticks, title)


def _middles(bins: int) -> list[float]:
    return [100 * (n + 0.5) / bins for n in range(bins)]


def _epoch_tips(known: list[tuple[int, PolicyPart]]) -> str:
    """Invisible columns whose tooltips give every policy's mean in that part of the epoch."""
    coarse = [(policy.name, binned(policy.imbalance, _TIPS)[0]) for _, policy in known]
    tips = []
    for n in range(_TIPS):
        values = ", ".join(
            f"{name} {percent(float(mean[n * len(mean) // _TIPS]))}" for name, mean in coarse
        )
        text = f"at {100 * n / _TIPS:.0f}% of the epoch: {values}"
        tips.append(rectangle(100 * n / _TIPS, 0, 100 / _TIPS, 100, "hit", text))
    return "".join(tips)


def _chosen(x: Axis, y: Axis, value: float, height: float, text: str) -> str:
    place, top = number(x.at(value)), number(100 - y.at(height))
    css, shift = ("before", "-.6em") if x.at(value) > 50 else ("after", ".6em")
    return (
        f'<line class="marker" x1="{place}%" x2="{place}%" y1="0" y2="100%"/>'
        f'<circle class="chosen" cx="{place}%" cy="{top}%" r="6"/>'
        f'<text class="note {css}" x="{place}%" y="100%" dx="{shift}" dy="-.8em">'
        f"{escape(text)}</text>"
    )
