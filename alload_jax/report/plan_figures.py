"""Metrics of a plan page: labels, formats, meanings; tiles and a table of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

import numpy as np

from alload_jax.report.charts import box_key, percent, policy_colour, show_cost


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


Value = float | int | None


class Metric(NamedTuple):
    """How a metric is shown; `better` is "" if neither lower nor higher values are better."""

    label: str
    form: Literal["percent", "count", "seconds", "times", "cost"]
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
    "cost": Metric("Cost of the epoch", "cost", "Sum of the steps' makespans."),
    "steps": Metric("Steps", "count", "Optimizer steps of one epoch.", ""),
    "buckets": Metric("Programs", "count", "Distinct micro-batch shapes to compile."),
    "first_step_seconds": Metric(
        "Time to the first step", "seconds", "Predicted, from the start of a run."
    ),
    "dropped": Metric("Dropped", "count", "Samples that were placed too rarely; must be 0."),
    "duplicated": Metric("Duplicated", "count", "Samples that were placed too often; must be 0."),
}
"""Name of a metric → how it is shown, in the order of the table."""


def show(name: str, value: Value) -> str:
    """A metric's value as text; a dash if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    form = METRICS[name].form
    if form == "percent":
        return percent(value)
    if form == "count":
        return f"{value:,.0f}"
    if form == "times":
        return f"{value:.2f}×"
    return show_cost(value, "s" if form == "seconds" else "")


def headline(policies: Sequence[PolicyPart]) -> str:
    """Tiles that compare the baseline with the best policy."""
    before, after = policies[0], policies[-1]
    tiles = []

    def add(title: str, value: str, pair: tuple[Value, Value] | None, meaning: str) -> None:
        """Adds a tile with two thin bars on one scale: the baseline above the best policy."""
        bars = ""
        if pair is not None:
            known = [max(each or 0.0, 0.0) for each in pair]
            widths = (100 * each / (max(known) or 1.0) for each in known)
            bars = "".join(
                f'<i style="background: var(--{colour}); width: {width:.1f}%"></i>'
                for width, colour in zip(widths, ("p0", "best"), strict=True)
            )
            bars = f'<div class="pair" aria-hidden="true">{bars}</div>'
        tiles.append(
            f'<div class="tile"><h2>{title}</h2><p class="value">{value}</p>{bars}'
            f'<p class="meaning">{escape(meaning)}</p></div>'
        )

    for name in ("idle", "imbalance"):
        old, new = before.metrics[name], after.metrics[name]
        text, pair = f'<span class="from">{show(name, old)}</span>', None
        if len(policies) > 1:
            text += f'<span class="arrow" aria-label="to">→</span><b>{show(name, new)}</b>'
            pair = old, new
        add(METRICS[name].label, text, pair, METRICS[name].meaning)
    gain = speedup(before, after)
    if gain is not None and len(policies) > 1:
        meaning = f"Samples in the same time, relative to {before.name}; predicted."
        add("Throughput", f"<b>{gain:.2f}×</b>", (1.0, gain), meaning)
    return f'<div class="tiles">{"".join(tiles)}</div>'


def lede(policies: Sequence[PolicyPart]) -> str:
    """The page's result in one sentence."""
    before, after = policies[0], policies[-1]
    waits = [show("idle", policy.metrics["idle"]) for policy in (before, after)]
    text = f"With <b>{escape(before.name)}</b>, ranks wait <b>{waits[0]}</b> of the time"
    if len(policies) > 1:
        text += f"; with <b>{escape(after.name)}</b>, <b>{waits[1]}</b>"
    return f'<p class="lede">{text}.</p>'


def speedup(before: PolicyPart, after: PolicyPart) -> float | None:
    """Ratio of the speeds of an epoch; None where it costs nothing."""
    for name, faster in (("tokens_per_second", 1), ("cost", -1)):
        first, last = before.metrics.get(name), after.metrics.get(name)
        if first and last:
            return (last / first) ** faster
    return None


def metrics_table(policies: Sequence[PolicyPart]) -> str:
    """A table of metrics (rows) and policies (columns); the best value of a row is bold."""
    head = "".join(
        f'<th scope="col"><i {box_key(policy_colour(n, len(policies)))}></i>'
        f"{escape(policy.name)}</th>"
        for n, policy in enumerate(policies)
    )
    present = {name for policy in policies for name in policy.metrics}
    rows = "".join(_row(name, policies) for name in METRICS if name in present)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Metrics of every policy">'
        f'<table><thead><tr><th scope="col">Metric</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(name: str, policies: Sequence[PolicyPart]) -> str:
    shown = METRICS[name]
    values = [policy.metrics.get(name) for policy in policies]
    texts = [show(name, value) for value in values]
    known = [value for value in values if value is not None and math.isfinite(value)]
    best = None
    if known and shown.better and len(set(texts)) > 1:
        best = show(name, min(known) if shown.better == "lower" else max(known))
    cells = "".join(
        f'<td class="best">{text}</td>' if text == best else f"<td>{text}</td>" for text in texts
    )
    return (
        f'<tr><th scope="row" title="{escape(shown.meaning)}">{shown.label}'
        f"<small>{escape(shown.meaning)}</small></th>{cells}</tr>"
    )
