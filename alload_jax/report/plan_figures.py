"""Metrics of a plan page: labels, formats and meanings; headline tiles and the table."""

import math
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

from alload_jax.report.charts import policy_colour, power_of_ten
from alload_jax.report.plan_page_data import PolicyPart

Value = float | int | None


class Metric(NamedTuple):
    """How a metric is shown; `better` is "" if neither lower nor higher values are better."""

    label: str
    form: Literal["percent", "count", "number", "seconds", "times", "cost"]
    meaning: str
    better: Literal["lower", "higher", ""] = "lower"


METRICS: dict[str, Metric] = {
    "imbalance": Metric(
        "Imbalance", "percent", "How much longer the slowest rank takes than the mean of all ranks."
    ),
    "imbalance_max": Metric(
        "Worst imbalance", "percent", "Largest imbalance of a step in the epoch."
    ),
    "idle": Metric("Idle", "percent", "Share of the ranks' time spent waiting for the slowest."),
    "excess": Metric(
        "Above the bound", "percent", "Makespan relative to a lower bound for any placement."
    ),
    "cost_cv": Metric("Cost CV", "percent", "Standard deviation of cost over ranks / mean."),
    "compute_cv": Metric("Compute CV", "percent", "Standard deviation of B·S² over ranks / mean."),
    "step_cv": Metric("Step CV", "percent", "Standard deviation of step time / mean."),
    "padding": Metric("Padding", "percent", "Share of computed tokens that belong to no sample."),
    "utilisation": Metric(
        "Memory used", "percent", "Real tokens over the M_mem of every micro-batch.", "higher"
    ),
    "step_samples_min": Metric(
        "Fewest samples of a step", "times", "Over the mean number of samples.", "higher"
    ),
    "step_samples_max": Metric(
        "Most samples of a step", "times", "Over the mean number of samples."
    ),
    "longest_weight": Metric(
        "Weight of long samples",
        "times",
        "Weight of the longest tenth of the samples over that of the shortest tenth.",
        "",
    ),
    "longest_weight_by_step": Metric(
        "The same by step",
        "times",
        "If the gradient of each step is divided by its own number of samples.",
        "",
    ),
    "seconds_per_epoch": Metric("Time per epoch", "seconds", "Predicted, with all ranks."),
    "tokens_per_second": Metric("Tokens per second", "count", "Over all ranks.", "higher"),
    "throughput": Metric("Throughput", "times", "Relative to the baseline.", "higher"),
    "cost": Metric("Cost of the epoch", "cost", "Sum of the steps' makespans."),
    "steps": Metric("Steps", "count", "Optimizer steps of one epoch.", ""),
    "samples": Metric("Samples", "count", "Samples placed.", ""),
    "tokens": Metric("Tokens", "count", "Tokens of the samples placed.", ""),
    "buckets": Metric("Programs", "count", "Distinct micro-batch shapes to compile."),
    "first_step_seconds": Metric(
        "Time to the first step", "seconds", "Predicted, from the start of a run."
    ),
    "dropped": Metric("Dropped", "count", "Samples that were placed too rarely; must be 0."),
    "duplicated": Metric("Duplicated", "count", "Samples that were placed too often; must be 0."),
}
"""Name of a metric → how it is shown, in the order of the table."""

_SECONDS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (180.0, 1.0, "s"), (10800.0, 1 / 60, "min"))
_HEADLINES = ("idle", "imbalance")


def metric(name: str) -> Metric:
    """How to show a metric; metrics that `METRICS` lacks are shown with their names."""
    return METRICS.get(name) or Metric(name.replace("_", " "), "number", "", "")


def show(name: str, value: Value, cost_unit: str = "") -> str:
    """A metric's value as text; a dash if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    form = metric(name).form
    if form == "percent":
        return percent(value)
    if form == "count":
        return f"{value:,.0f}"
    if form == "times":
        return f"{value:.2f}×"
    if form in ("seconds", "cost"):
        return show_cost(value, "s" if form == "seconds" else cost_unit)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def percent(value: float) -> str:
    """The share in percent: 39.2%, 0.12%, 710%, <0.01%."""
    value = 100 * value
    if 0 < abs(value) < 0.005:
        return "<0.01%"
    digits = 0 if abs(value) >= 99.95 or value == 0 else 1 if abs(value) >= 0.995 else 2
    return f"{value:,.{digits}f}%"


def cost_scale(high: float, unit: str) -> tuple[float, str]:
    """(factor, name) of a readable unit for costs up to `high`."""
    if not math.isfinite(high) or high <= 0:
        return 1.0, unit
    if unit == "s":
        below = (scale[1:] for scale in _SECONDS if high < scale[0])
        return next(below, (1 / 3600, "h"))
    exponent = 3 * math.floor(math.log10(high) / 3)
    if exponent in (0, 3):
        return 1.0, unit
    return 10.0**-exponent, f"{power_of_ten(exponent)} {unit}".strip()


def show_cost(value: float, unit: str) -> str:
    """The cost with a readable unit: 12.3 s, 5.72×10⁹."""
    factor, name = cost_scale(value, unit)
    digits = value * factor
    text = f"{digits:,.0f}" if digits >= 1000 else f"{digits:.3g}"
    return f"{text}×{name}" if name.startswith("10") else f"{text} {name}".strip()


def headline(policies: Sequence[PolicyPart], cost_unit: str) -> str:
    """Tiles that compare the baseline with the best policy."""
    before, after = policies[0], policies[-1]
    tiles = [
        _tile(name, before.metrics[name], after.metrics.get(name), cost_unit, len(policies) > 1)
        for name in _HEADLINES
        if before.metrics.get(name) is not None
    ]
    gain = speedup(before, after)
    if gain is not None and len(policies) > 1:
        tiles.append(_gain_tile(gain, before.name))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def lede(policies: Sequence[PolicyPart]) -> str:
    """The page's result in one sentence; "" if idle time is unknown."""
    before, after = policies[0], policies[-1]
    waits, waits_after = before.metrics.get("idle"), after.metrics.get("idle")
    if waits is None:
        return ""
    text = f"With <b>{escape(before.name)}</b>, ranks wait <b>{percent(waits)}</b> of the time"
    if len(policies) > 1 and waits_after is not None:
        text += f"; with <b>{escape(after.name)}</b>, <b>{percent(waits_after)}</b>"
    return f'<p class="lede">{text}.</p>'


def speedup(before: PolicyPart, after: PolicyPart) -> float | None:
    """Ratio of the speeds of an epoch, from the first metric that both policies have."""
    for name, faster in (("tokens_per_second", 1), ("seconds_per_epoch", -1), ("cost", -1)):
        first, last = before.metrics.get(name), after.metrics.get(name)
        if first and last and math.isfinite(first) and math.isfinite(last):
            return (last / first) ** faster
    return None


def metrics_table(policies: Sequence[PolicyPart], cost_unit: str) -> str:
    """A table of metrics (rows) and policies (columns); the best value of a row is bold."""
    present = {name for policy in policies for name in policy.metrics}
    names = [name for name in METRICS if name in present]
    names += [n for policy in policies for n in policy.metrics if n not in METRICS]
    head = "".join(
        f'<th scope="col"><i class="chip {policy_colour(n, len(policies))}"></i>'
        f"{escape(policy.name)}</th>"
        for n, policy in enumerate(policies)
    )
    rows = "".join(_row(name, policies, cost_unit) for name in dict.fromkeys(names))
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Metrics of every policy">'
        f'<table><thead><tr><th scope="col">Metric</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(name: str, policies: Sequence[PolicyPart], cost_unit: str) -> str:
    shown = metric(name)
    values = [policy.metrics.get(name) for policy in policies]
    texts = [show(name, value, cost_unit) for value in values]
    best = _best(values, shown.better) if len(set(texts)) > 1 else None
    cells = "".join(
        f'<td class="best">{escape(text)}</td>'
        if best is not None and text == show(name, best, cost_unit)
        else f"<td>{escape(text)}</td>"
        for text in texts
    )
    meaning = f"<small>{escape(shown.meaning)}</small>" if shown.meaning else ""
    title = f' title="{escape(shown.meaning)}"' if shown.meaning else ""
    return f'<tr><th scope="row"{title}>{escape(shown.label)}{meaning}</th>{cells}</tr>'


def _best(values: Sequence[Value], better: str) -> Value:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or not better:
        return None
    return min(known) if better == "lower" else max(known)


def _tile(name: str, before: Value, after: Value, cost_unit: str, compare: bool) -> str:
    shown = metric(name)
    value = f'<span class="from">{escape(show(name, before, cost_unit))}</span>'
    bars = ""
    if compare:
        best = escape(show(name, after, cost_unit))
        value += f'<span class="arrow" aria-label="to">→</span><b>{best}</b>'
        bars = _bars(before, after)
    return (
        f'<div class="tile"><h2>{escape(shown.label)}</h2><p class="value">{value}</p>{bars}'
        f'<p class="meaning">{escape(shown.meaning)}</p></div>'
    )


def _gain_tile(gain: float, baseline: str) -> str:
    return (
        f'<div class="tile"><h2>Throughput</h2><p class="value"><b>{gain:.2f}×</b></p>'
        f'{_bars(1.0, gain)}<p class="meaning">Samples in the same time, '
        f"relative to {escape(baseline)}; predicted.</p></div>"
    )


def _bars(before: Value, after: Value) -> str:
    """Two thin bars on one scale: the baseline above the best policy."""
    pair = [v if v is not None and math.isfinite(v) and v > 0 else 0.0 for v in (before, after)]
    high = max(pair) or 1.0
    rects = "".join(
        f'<rect class="{css}" x="0" y="{y}" width="{100 * v / high:.1f}%" height="5" rx="2.5"/>'
        for v, css, y in zip(pair, ("p0", "best"), (0, 9), strict=True)
    )
    return f'<svg class="pair" aria-hidden="true">{rects}</svg>'
